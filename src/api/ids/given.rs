//! Who was given what.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GivenRequest {
    /// The id of an increment key, or the number inside a formatted id.
    pub number: i64,
    /// For a formatted key that starts again: the year, month or day of the id, such as `2026`, `2026-11` or
    /// `2026-11-16`. The current one if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

/// One write to a counter: the numbers that it took, and for whom.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GivenTo {
    pub counter: String,
    pub first: i64,
    pub last: i64,
    pub at: DateTime<Utc>,
    /// The instance that took them. `tidemark instances` shows those that live.
    pub instance: String,
    /// The `X-Request-ID`, `Idempotency-Key` or trace of the first request that they were taken for, if it had one.
    pub request_id: Option<String>,
}
