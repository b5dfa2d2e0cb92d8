//! Increment keys: numbers that grow.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::Name;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IncrementRequest {
    /// How many ids, 1 to 1000. One if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub size: Option<i64>,
    /// From one id to the next, up to the key's `max_request_delta`. The key's `delta` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub delta: Option<i64>,
    /// Whether each step is a random one from 1 to `delta`. As the key says if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rand_delta: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ids {
    /// The ids, in growing order.
    pub id: Vec<i64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IncrementSettings {
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where counting starts: the first id is one `delta` above.
    #[schema(minimum = 0)]
    pub base: i64,
    /// From one id to the next.
    #[serde(default = "one")]
    #[schema(minimum = 1, default = 1)]
    pub delta: i64,
    /// The largest `delta` of a request.
    #[serde(default = "hundred")]
    #[schema(minimum = 1, default = 100)]
    pub max_request_delta: i64,
    /// Whether each step is a random one from 1 to `delta`.
    #[serde(default)]
    pub rand_delta: bool,
    #[serde(default)]
    #[schema(inline)]
    pub mode: Mode,
    /// The last id there is. 2^63-1 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<i64>,
}

impl IncrementSettings {
    /// Every default.
    pub fn from_base(base: i64) -> Self {
        Self { name: None, base, delta: 1, max_request_delta: 100, rand_delta: false, mode: Mode::Range, max: None }
    }
}

fn one() -> i64 {
    1
}

fn hundred() -> i64 {
    100
}

/// What a counter is made for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Speed: instances reserve ranges ahead. Ids grow per instance, and a killed instance leaves a gap.
    #[default]
    Range,
    /// Order: ids grow across all instances, without gaps. Each answer waits for a synced write, shared with others.
    Strict,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IncrementConfig {
    #[schema(value_type = String)]
    pub key: Name,
    pub name: Option<String>,
    pub base: i64,
    /// The mark: never below the last id given. In the mode `range`, ids up to it may be reserved by instances.
    pub current: i64,
    pub delta: i64,
    pub max_request_delta: i64,
    pub rand_delta: bool,
    #[schema(inline)]
    pub mode: Mode,
    pub max: Option<i64>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}
