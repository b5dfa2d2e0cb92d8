//! Reading the ledger, and correcting it.

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::MetricKind;
use crate::api::Json;

/// Records of one page, unless asked for otherwise, and at most.
pub const PAGE: usize = 100;
pub const MOST_OF_A_PAGE: usize = 1000;

/// The same for the feed.
pub const MOST_OF_THE_FEED: usize = 10_000;

/// Days that one query may span.
pub const MOST_DAYS: i64 = 366;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Active,
    /// Withdrawn, or replaced by its next revision.
    Deprecated,
    /// Replaced by a backfill.
    Archived,
}

impl Status {
    pub const ALL: [Self; 3] = [Self::Active, Self::Deprecated, Self::Archived];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Deprecated => "deprecated",
            Self::Archived => "archived",
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == word)
    }
}

/// A record as the ledger has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LedgerRecord {
    #[schema(value_type = String)]
    pub id: Uuid,
    /// 1, and one more with each amendment.
    pub revision: i32,
    pub tenant_id: String,
    pub source_id: String,
    pub user_id: Option<String>,
    pub resource_id: String,
    pub resource_type: Option<String>,
    pub usage_type: String,
    pub metric_kind: MetricKind,
    /// Exactly as it was sent.
    pub value: String,
    #[serde(serialize_with = "moment")]
    pub event_timestamp: DateTime<Utc>,
    pub idempotency_key: String,
    pub status: Status,
    /// The backfill that archived it last.
    #[schema(value_type = Option<String>)]
    pub backfill_operation_id: Option<Uuid>,
    /// The backfill that added it.
    #[schema(value_type = Option<String>)]
    pub added_by: Option<Uuid>,
    pub lineage: Option<Vec<String>>,
    #[schema(value_type = Option<Value>)]
    pub metadata: Option<Json>,
    /// When it was written down.
    #[serde(serialize_with = "moment")]
    pub created_at: DateTime<Utc>,
}

/// The same text as chrono's own, which grows it piece by piece: there are thousands in a page.
fn moment<S: Serializer>(moment: &DateTime<Utc>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&moment.to_rfc3339_opts(SecondsFormat::AutoSi, true))
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecordQuery {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_id: Option<String>,
    /// The first event time. With `to`, at most 366 days before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<DateTime<Utc>>,
    /// The end of the event times, not included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<DateTime<Utc>>,
    /// Also records that a backfill replaced.
    #[serde(default)]
    pub include_archived: bool,
    /// Also records that were withdrawn, and earlier revisions of those that were amended.
    #[serde(default)]
    pub include_deprecated: bool,
    /// `next_cursor` of the page before, with the same filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// 1 to 1000, 100 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size: Option<usize>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RecordPage {
    /// By event time, then id. A page of large records may have fewer than were asked for.
    pub records: Vec<LedgerRecord>,
    /// None on the last page.
    pub next_cursor: Option<String>,
}

/// A duration as text, or seconds.
fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "must be a duration such as 5s, or a number of seconds")]
    enum Wait {
        Seconds(f64),
        Text(String),
    }
    match Option::<Wait>::deserialize(deserializer)? {
        None => Ok(None),
        Some(Wait::Seconds(seconds)) => Ok(Some(seconds)),
        Some(Wait::Text(text)) => {
            let seconds = text.parse().or_else(|_| humantime::parse_duration(&text).map(|wait| wait.as_secs_f64()));
            seconds.map(Some).map_err(|_| D::Error::custom("must be a duration such as 5s, or a number of seconds"))
        }
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FeedRequest {
    /// `next_position` of the page before; the beginning if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<String>,
    /// A position where the page ends at the latest; at the end of the feed if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
    /// 1 to 10000, 100 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// How long to wait for something new, 25 seconds at most: `5s`, or a number of seconds.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "seconds")]
    #[schema(value_type = Option<String>)]
    pub wait: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FeedPage {
    /// In the order of acceptance. What was corrected comes again, with its new status.
    pub records: Vec<LedgerRecord>,
    /// Where the next page begins.
    pub next_position: String,
    /// Everything that reached the stream before this moment is judged, and what was accepted of it is before
    /// `next_position`. None as long as nothing can be said.
    pub watermark: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecordId {
    #[schema(value_type = String)]
    pub id: Uuid,
}

/// What of a record is to be another. Its tenant, source, type, resource and time stay.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Amendment {
    #[schema(value_type = String)]
    pub id: Uuid,
    /// A number, or text that is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Value>,
    /// An object, or null for none.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub metadata: Option<Option<Value>>,
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub resource_type: Option<Option<String>>,
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub user_id: Option<Option<String>>,
    /// Why, for those who ask later.
    pub reason: String,
    /// The revision that is meant: 409 if there is a newer one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i32>,
}

/// What is given as null is given.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Deprecation {
    #[schema(value_type = String)]
    pub id: Uuid,
    /// Why, for those who ask later.
    pub reason: String,
    /// The revision that is meant: 409 if there is a newer one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i32>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Oldest first.
    pub versions: Vec<LedgerRecord>,
    /// Oldest first.
    pub changes: Vec<RecordChange>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RecordChange {
    /// The revision that it made, or withdrew.
    pub revision: i32,
    /// `amended` or `deprecated`.
    pub action: String,
    pub reason: String,
    /// Who did it.
    pub actor: String,
    pub request_id: Option<String>,
    pub at: DateTime<Utc>,
}
