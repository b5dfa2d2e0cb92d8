//! Replacing what the ledger has of a range.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Reason, Rejection};
use crate::api::Json;

/// Replacement records in one request. More are sent in parts.
pub const MOST_EVENTS: usize = 10_000;

/// How many days back a backfill reaches without the role `elevated`.
pub const BACKFILL_DAYS: i64 = 90;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BackfillMode {
    /// Nothing else is written into the range meanwhile: requests are refused, published records wait.
    Blocking,
    /// Records that come meanwhile are kept beside the replacement.
    NonBlocking,
}

impl BackfillMode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Blocking => "blocking",
            Self::NonBlocking => "non_blocking",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TimeRange {
    pub from: DateTime<Utc>,
    /// Not included.
    pub to: DateTime<Utc>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackfillRequest {
    pub usage_type: String,
    pub time_range: TimeRange,
    /// Usage records of this type and range, up to 10,000. They may name a `source_id`.
    #[serde(default)]
    #[schema(value_type = Vec<Value>)]
    pub replacement_events: Vec<Json>,
    /// `blocking` or `non_blocking`.
    pub mode: BackfillMode,
    /// Why, for those who ask later.
    pub reason: String,
    /// Shows what would change, and changes nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// More records are to come: the backfill waits for them, and for its commit.
    #[serde(default)]
    pub staged: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum BackfillAnswer {
    Operation(Box<Backfill>),
    Preview(Box<BackfillPreview>),
}

impl BackfillAnswer {
    pub fn is_deferred(&self) -> bool {
        matches!(self, Self::Operation(backfill) if backfill.is_deferred())
    }

    pub fn is_preview(&self) -> bool {
        matches!(self, Self::Preview(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BackfillStatus {
    /// It waits for more records, or for its commit.
    Pending,
    InProgress,
    Completed,
    Failed,
}

impl BackfillStatus {
    pub fn from_word(word: &str) -> Option<Self> {
        serde_json::from_value(Value::String(word.to_owned())).ok()
    }
}

/// A backfill: its audit record, and how far it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Backfill {
    #[schema(value_type = String)]
    pub id: Uuid,
    pub tenant_id: String,
    pub usage_type: String,
    pub range_start: DateTime<Utc>,
    pub range_end: DateTime<Utc>,
    pub mode: BackfillMode,
    pub status: BackfillStatus,
    /// Who submitted it.
    pub operator_id: String,
    pub reason: String,
    pub events_added: Option<i64>,
    pub events_archived: Option<i64>,
    pub affects_invoiced_period: bool,
    pub created_at: DateTime<Utc>,
    pub completed_at: Option<DateTime<Utc>>,
    /// The same as `id`.
    #[schema(value_type = String)]
    pub audit_record_id: Uuid,
    /// Why it failed.
    pub error: Option<Reason>,
    /// Of one that goes on.
    pub progress: Option<BackfillProgress>,
    pub reverted_at: Option<DateTime<Utc>>,
    pub reverted_by: Option<String>,
    pub revert_reason: Option<String>,
}

impl Backfill {
    pub fn is_deferred(&self) -> bool {
        self.progress.is_some() || matches!(self.status, BackfillStatus::Pending | BackfillStatus::InProgress)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BackfillProgress {
    /// `receiving`, `archiving`, `writing`, `closing` or `reverting`.
    pub phase: String,
    pub done: i64,
    pub total: i64,
    /// Unless something happens until then, it fails.
    pub lease_until: DateTime<Utc>,
}

/// What a backfill would do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BackfillPreview {
    /// Always true.
    pub dry_run: bool,
    pub events_archived: i64,
    pub events_added: i64,
    pub affects_invoiced_period: bool,
    /// Those with the most events first, up to 100.
    pub resources: Vec<ResourcePreview>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResourcePreview {
    pub source_id: String,
    pub resource_id: String,
    pub events_archived: i64,
    pub value_archived: String,
    pub events_added: i64,
    pub value_added: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackfillId {
    #[schema(value_type = String)]
    pub id: Uuid,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackfillEvents {
    #[schema(value_type = String)]
    pub id: Uuid,
    /// Up to 10,000.
    #[schema(value_type = Vec<Value>)]
    pub records: Vec<Json>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BackfillReceived {
    pub accepted: usize,
    /// Sent before.
    pub duplicates: usize,
    pub rejected: Vec<Rejection>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackfillReversion {
    #[schema(value_type = String)]
    pub id: Uuid,
    /// Why, for those who ask later.
    pub reason: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetInvoiced {
    /// What was used before is on an invoice.
    pub until: DateTime<Utc>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Invoiced {
    pub tenant_id: String,
    pub until: Option<DateTime<Utc>>,
}
