//! Units and sources: the types registry.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::Name;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MetricKind {
    /// A reading that never goes down.
    Counter,
    /// A reading as it is.
    Gauge,
}

impl MetricKind {
    pub fn as_str(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        [MetricKind::Counter, MetricKind::Gauge].into_iter().find(|kind| kind.as_str() == word)
    }
}

/// What is dropped first when more comes than can be written: the least important.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// Refused at 70 % of the backlog.
    Low,
    /// At 85 %.
    #[default]
    Medium,
    /// At 95 %.
    High,
    /// Never.
    Critical,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewUnit {
    /// What records name as their `usage_type`: letters, digits, `_ . : / -`, up to 100.
    pub name: String,
    /// `counter` or `gauge`.
    pub metric_kind: String,
    /// Such as `bytes`.
    pub base_unit: String,
    /// A JSON Schema over the record as it was sent. `{"type": "object"}` asks for nothing.
    pub schema: Value,
    /// The sources that may send it. Without one, nobody may.
    pub allowed_sources: Vec<String>,
    /// `critical`, `high`, `medium` (the default) or `low`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// `postgresql`, which is the one that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_backend: Option<String>,
    /// 7 to 2555.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention_days: Option<i64>,
    /// How old a record may be, such as `48h`. Without it the tenant's or the deployment's counts.
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub grace_period: Option<Duration>,
    /// How far ahead of time a record may be, such as `5m`.
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub future_tolerance: Option<Duration>,
}

/// What of a unit can be changed.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedUnit {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_sources: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention_days: Option<i64>,
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub grace_period: Option<Duration>,
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub future_tolerance: Option<Duration>,
}

/// A registered unit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Unit {
    pub name: String,
    pub metric_kind: MetricKind,
    pub base_unit: String,
    pub schema: Value,
    pub allowed_sources: Vec<String>,
    pub priority: Priority,
    pub storage_backend: String,
    pub retention_days: Option<i64>,
    #[serde(default, with = "humantime_serde")]
    #[schema(value_type = Option<String>)]
    pub grace_period: Option<Duration>,
    #[serde(default, with = "humantime_serde")]
    #[schema(value_type = Option<String>)]
    pub future_tolerance: Option<Duration>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Units {
    pub units: Vec<Unit>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSource {
    #[schema(value_type = String)]
    pub name: Name,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Source {
    #[schema(value_type = String)]
    pub name: Name,
    pub created_at: DateTime<Utc>,
    #[serde(skip)]
    pub repeated: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Sources {
    pub sources: Vec<Source>,
}
