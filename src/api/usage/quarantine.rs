//! What was refused.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Reason;

/// Entries of one page, unless asked for otherwise, and at most.
pub const LISTED: i64 = 100;
pub const MOST_LISTED: i64 = 1000;

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QuarantineFilter {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_id: Option<String>,
    /// Such as `type_not_found`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Also what was replayed and taken.
    #[serde(default)]
    pub include_replayed: bool,
    /// 1 to 1000, 100 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    /// `next_cursor` of the page before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Quarantine {
    pub records: Vec<Quarantined>,
    pub next_cursor: Option<String>,
}

/// A record, or a whole message, that was refused.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Quarantined {
    #[schema(value_type = String)]
    pub id: Uuid,
    pub source_id: String,
    /// When the stream had it.
    pub received_at: DateTime<Utc>,
    pub idempotency_key: Option<String>,
    pub reason: Reason,
    /// The record as it came; text if it could not be read.
    pub record: Value,
    /// When it was replayed and taken.
    pub replayed_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Replay {
    /// Up to 1,000 of them.
    #[schema(value_type = Vec<String>)]
    pub ids: Vec<Uuid>,
}

/// What became of a replay. Each is judged for itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Replayed {
    pub accepted: usize,
    pub duplicates: usize,
    /// `index` is the place in `ids`.
    pub rejected: Vec<super::Rejection>,
    /// Sent again, but not judged within the time that a request waits.
    pub buffered: usize,
}

impl Replayed {
    pub fn is_deferred(&self) -> bool {
        self.buffered > 0
    }
}
