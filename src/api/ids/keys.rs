//! Keys of all types: the list, and the tokens that open them.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::Name;

/// Nothing to say but yes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Verified {}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigPageRequest {
    /// Only keys that begin with this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Only keys after this one: the `next_cursor` of the page before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// How many, 1 to 100. 20 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub size: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConfigPage {
    pub items: Vec<ConfigSummary>,
    /// Where the next page begins, if there is one.
    pub next_cursor: Option<String>,
    pub has_more: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConfigSummary {
    #[schema(value_type = String)]
    pub key: Name,
    pub id_type: IdType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IdType {
    Increment,
    Formatted,
    Snowflake,
}

impl IdType {
    pub fn as_str(self) -> &'static str {
        match self {
            IdType::Increment => "increment",
            IdType::Formatted => "formatted",
            IdType::Snowflake => "snowflake",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeyToken {
    #[schema(value_type = String)]
    pub key: Name,
    pub token: String,
    pub expires_at: DateTime<Utc>,
}
