//! Formatted keys: texts made of parts.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Mode;
use crate::api::Name;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormattedRequest {
    /// How many ids, 1 to 1000. One if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub size: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FormattedIds {
    pub id: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormattedSettings {
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What an id is made of, in this order.
    pub parts: Vec<Part>,
    #[serde(default)]
    #[schema(inline)]
    pub mode: Mode,
}

/// A part of an id.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Part {
    /// The same characters in every id.
    FixedChars { value: String },
    /// One of the characters, each in its turn as the counter advances.
    FixedPollingChar { chars_scope: String },
    /// Characters chosen at random.
    FixedRandomChars {
        chars_scope: String,
        #[schema(minimum = 1, maximum = 255)]
        length: u32,
    },
    /// The time as the pattern says: `yyyyMMdd`, `HH:mm`, `'literal'`.
    DateFormat {
        format: String,
        /// An IANA name. UTC if not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        time_zone: Option<String>,
    },
    /// Milliseconds since 1970, less `base_ts`.
    Timestamp {
        #[serde(default)]
        base_ts: i64,
    },
    /// Seconds since 1970, less `base_unix`.
    UnixSeconds {
        #[serde(default)]
        base_unix: i64,
    },
    /// The number of the key's counter. Several such parts show the same number.
    AutoIncrement {
        /// Shorter numbers are padded to this length.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        length: Option<u32>,
        /// Whether a number that outgrows the length is refused, as exhausted.
        #[serde(default)]
        length_fixed: bool,
        #[serde(default)]
        padding_mode: PaddingMode,
        /// One character.
        #[serde(default = "zero")]
        padding_char: String,
        /// 2 to 36. Digits above nine are lower-case letters.
        #[serde(default = "ten")]
        number_base: u32,
        #[serde(default)]
        reset_scope: ResetScope,
        /// Whose days the scope counts. The first date part's zone if not given, else UTC.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        time_zone: Option<String>,
    },
}

fn zero() -> String {
    "0".into()
}

fn ten() -> u32 {
    10
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PaddingMode {
    #[default]
    Prefix,
    Suffix,
}

/// When the counter starts again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResetScope {
    #[default]
    None,
    Year,
    Month,
    Date,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FormattedConfig {
    #[schema(value_type = String)]
    pub key: Name,
    pub name: Option<String>,
    pub parts: Vec<Part>,
    #[schema(inline)]
    pub mode: Mode,
    /// What the next id may look like. It is not spent.
    pub sample_id: String,
    /// What keeps ids from repeating: the counter, or chance alone, with its bits.
    pub uniqueness: String,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}
