//! Records as they come, and the verdict on them.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::MetricKind;
use crate::error::{Code, Error};

/// One usage record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UsageRecord {
    /// The name of a registered unit.
    pub usage_type: String,
    /// What was used. For usage of the tenant as such, the tenant's name.
    pub resource_id: String,
    /// A number, or text that is one: `"12.50"`. Kept exactly, up to 28 digits.
    pub value: Value,
    /// When it was used.
    pub event_timestamp: DateTime<Utc>,
    /// Names the record: the same again is a duplicate. A UUIDv7 is best; up to 255 characters.
    pub idempotency_key: String,
    /// If given, it must be the unit's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric_kind: Option<MetricKind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_type: Option<String>,
    /// What the resource belongs to, outermost first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Vec<String>>,
    /// An object of up to 8 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
}

impl UsageRecord {
    /// A record of now, under a key of its own. A value that must be exact is given as text.
    pub fn new(usage_type: impl Into<String>, resource_id: impl Into<String>, value: impl Into<Value>) -> Self {
        Self {
            usage_type: usage_type.into(),
            resource_id: resource_id.into(),
            value: value.into(),
            event_timestamp: Utc::now(),
            idempotency_key: Uuid::now_v7().to_string(),
            metric_kind: None,
            user_id: None,
            resource_type: None,
            lineage: None,
            metadata: None,
        }
    }
}

/// The forms in which records may come.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum RecordBodies {
    Object { records: Vec<UsageRecord> },
    List(Vec<UsageRecord>),
    One(Box<UsageRecord>),
}

/// The answer to records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Ingested {
    Verdict {
        accepted: usize,
        /// Taken before, and the same.
        duplicates: usize,
        rejected: Vec<Rejection>,
    },
    /// They are kept, and will be judged.
    Buffered {
        /// `buffered`
        status: Cow<'static, str>,
        records: usize,
    },
}

impl Ingested {
    pub fn buffered(records: usize) -> Self {
        Self::Buffered { status: "buffered".into(), records }
    }

    pub fn is_deferred(&self) -> bool {
        matches!(self, Self::Buffered { .. })
    }
}

/// A record that was refused, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Rejection {
    /// Which one of the request.
    pub index: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    pub reason: Reason,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reason {
    /// Such as `counter_violation`.
    #[schema(value_type = String)]
    pub code: Code,
    pub message: Cow<'static, str>,
    #[serde(default)]
    pub details: Option<Value>,
}

impl From<Error> for Reason {
    fn from(error: Error) -> Self {
        Self { code: error.code, message: error.message, details: error.details }
    }
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        let error = Error::new(reason.code, reason.message);
        match reason.details {
            Some(details) => error.details(details),
            None => error,
        }
    }
}
