//! How long usage is kept.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Days that can be asked for.
pub const LEAST_RETENTION: i64 = 7;
pub const MOST_RETENTION: i64 = 2555;

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetentionScope {
    /// `*` for all.
    pub tenant: String,
    /// `*` for all.
    pub usage_type: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetRetention {
    /// `*` for all.
    pub tenant: String,
    /// `*` for all.
    pub usage_type: String,
    /// 7 to 2555.
    pub retention_days: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Retention {
    pub tenant_id: String,
    pub usage_type: String,
    /// What holds in effect: what was set for the type goes over the tenant's, and that over what holds for all.
    pub retention_days: i64,
    /// What was set for exactly this, if anything was.
    pub set: Option<i64>,
    pub updated_at: Option<DateTime<Utc>>,
}

/// What retention would take now, or has taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RetentionReport {
    /// Whether it has been done.
    pub done: bool,
    /// What moves to the historical database, where there is one.
    pub moved: Vec<RetiredPartition>,
    /// Whole partitions, of which no policy keeps anything.
    pub partitions: Vec<RetiredPartition>,
    /// The rest, by tenant and type.
    pub records: Vec<RetiredRecords>,
}

impl RetentionReport {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.moved.is_empty() && self.partitions.is_empty() && self.records.is_empty()
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RetiredPartition {
    pub name: String,
    /// Whether it is one of the historical database.
    pub historical: bool,
    pub latest_event: Option<DateTime<Utc>>,
    /// Known when it is done.
    pub records: Option<i64>,
}

impl RetiredPartition {
    pub fn new(name: String, historical: bool, latest_event: Option<DateTime<Utc>>, records: Option<i64>) -> Self {
        Self { name, historical, latest_event, records }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RetiredRecords {
    pub tenant_id: String,
    pub usage_type: String,
    pub retention_days: i64,
    /// What was used before this goes.
    pub older_than: DateTime<Utc>,
    /// Counted up to 100,000 before it is done.
    pub records: i64,
}
