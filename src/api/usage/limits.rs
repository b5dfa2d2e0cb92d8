//! Limits of requests with usage records.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{MOST_RECORD_BYTES, MOST_RECORDS};
use crate::api::Name;

/// What differs from the defaults for one tenant, or for one source of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitOverrides {
    /// Records per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sustained_rate: Option<u32>,
    /// Records at once, after a pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_size: Option<u32>,
    /// Records of one request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_batch_size: Option<u32>,
    /// Bytes of one record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_record_bytes: Option<u32>,
    /// Bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes_per_sec: Option<u32>,
    /// How old a record of the tenant may be; only for the tenant as a whole.
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub grace_period: Option<Duration>,
    /// How far ahead of time it may be; only for the tenant as a whole.
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub future_tolerance: Option<Duration>,
}

/// The limits that hold, defaults and overrides together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EffectiveLimits {
    pub sustained_rate: u32,
    pub burst_size: u32,
    pub max_batch_size: u32,
    pub max_record_bytes: u32,
    pub max_bytes_per_sec: u32,
}

impl EffectiveLimits {
    /// The first limit that can't be, and why.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        let bounds = [
            ("sustained_rate", self.sustained_rate, 1_000_000_000),
            ("burst_size", self.burst_size, 1_000_000_000),
            ("max_batch_size", self.max_batch_size, MOST_RECORDS as u32),
            ("max_record_bytes", self.max_record_bytes, MOST_RECORD_BYTES as u32),
            ("max_bytes_per_sec", self.max_bytes_per_sec, u32::MAX),
        ];
        let (field, found, most) = bounds.into_iter().find(|(_, found, most)| !(1..=*most).contains(found))?;
        Some((field, format!("must lie between 1 and {most}, is {found}")))
    }

    pub fn with(self, overrides: &LimitOverrides) -> Self {
        Self {
            sustained_rate: overrides.sustained_rate.unwrap_or(self.sustained_rate),
            burst_size: overrides.burst_size.unwrap_or(self.burst_size),
            max_batch_size: overrides.max_batch_size.unwrap_or(self.max_batch_size),
            max_record_bytes: overrides.max_record_bytes.unwrap_or(self.max_record_bytes),
            max_bytes_per_sec: overrides.max_bytes_per_sec.unwrap_or(self.max_bytes_per_sec),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    #[schema(value_type = String)]
    pub tenant_id: Name,
    /// None for the tenant as a whole.
    #[schema(value_type = Option<String>)]
    pub source_id: Option<Name>,
    pub overrides: LimitOverrides,
    #[serde(flatten)]
    pub effective: EffectiveLimits,
    /// None if nothing was ever set.
    pub updated_at: Option<DateTime<Utc>>,
}
