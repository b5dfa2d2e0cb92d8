//! Snowflake keys: a layout of bits, and leases of worker ids.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::Name;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnowflakeSettings {
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Leading bits that are not used, such as the sign.
    #[serde(default = "one")]
    #[schema(default = 1)]
    pub skip_size: u8,
    /// The moment from which timestamps count, in milliseconds since 1970.
    pub base_ts: i64,
    /// Bits of the timestamp, in milliseconds.
    pub ts_size: u8,
    /// Bits of the worker id.
    pub worker_id_size: u8,
    /// Bits of the sequence inside a millisecond.
    pub seq_size: u8,
}

fn one() -> u8 {
    1
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SnowflakeConfig {
    #[schema(value_type = String)]
    pub key: Name,
    pub name: Option<String>,
    pub skip_size: u8,
    pub base_ts: i64,
    pub ts_size: u8,
    pub worker_id_size: u8,
    pub seq_size: u8,
    /// Leases that are live.
    pub active_workers: u64,
    /// When the timestamp runs out of bits. None if that lies beyond all calendars.
    pub expires_on: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// One name for one process while it runs, 1 to 64 bytes. Whoever starts anew takes a new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SnowflakeLease {
    pub skip_size: u8,
    pub base_ts: i64,
    pub ts_size: u8,
    pub worker_id: u32,
    pub worker_id_size: u8,
    pub seq_size: u8,
    /// Who holds it: the caller's name for himself, or one made for him.
    pub owner: String,
    /// The number of this lease: no other lease of the key has it.
    pub epoch: u64,
    /// No timestamp before this may be minted,
    pub not_before: DateTime<Utc>,
    /// and none at or after this.
    pub expires_at: DateTime<Utc>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenewRequest {
    pub owner: String,
    pub epoch: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReleaseRequest {
    pub owner: String,
    pub epoch: u64,
    /// The last timestamp minted, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_timestamp: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Released {
    pub released: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnowflakeRequest {
    /// How many ids, 1 to 1000. One if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub size: Option<i64>,
    /// Ids as texts: JavaScript loses bits of numbers above 2^53.
    #[serde(default)]
    pub strings: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum SnowflakeIds {
    Numbers { id: Vec<u64> },
    Strings { id: Vec<String> },
}
