//! What the ledger knows of itself.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MetadataRequest {
    /// The first minute of the reconciliation; the last hour if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<DateTime<Utc>>,
    /// The end of it, not included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Metadata {
    pub earliest_event: Option<DateTime<Utc>>,
    pub latest_event: Option<DateTime<Utc>>,
    /// All of the tenant's records.
    pub total_records: i64,
    /// Records by source.
    pub sources: BTreeMap<String, i64>,
    /// The latest event by source.
    pub watermarks: BTreeMap<String, DateTime<Utc>>,
    pub storage_health: StorageHealth,
    /// What came in each minute, by source, newest first: emitted = accepted + duplicates + rejected, always.
    pub reconciliation: Vec<Minute>,
}

/// What is kept and not yet written to the ledger, for the whole deployment.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct StorageHealth {
    /// `healthy`, or `behind` when the backlog is above the first mark of load shedding.
    pub status: String,
    pub backlog_messages: u64,
    pub backlog_bytes: u64,
    /// The age of the oldest message that is not written yet.
    pub oldest_unpersisted_seconds: f64,
    /// How long the backlog takes at the present rate; none if nothing moves.
    pub seconds_to_drain: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Minute {
    pub source_id: String,
    pub minute: DateTime<Utc>,
    pub emitted: i64,
    pub accepted: i64,
    pub duplicates: i64,
    pub rejected: i64,
}
