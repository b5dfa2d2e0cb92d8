//! Keys of all types, as the registry has them. One name is one key, whatever its type.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{Ids, formatted::FormattedKey};
use crate::{
    api::{
        Call, Handle, Name,
        ids::{ConfigPage, ConfigSummary, IdType, IncrementSettings, ListConfigs, SnowflakeSettings},
    },
    error::{Code, Error, Result},
    registry::{Record, Row},
};

/// The most ids of one request.
const MAX_SIZE: i64 = 1000;

/// The most keys of one page.
const MAX_PAGE: i64 = 100;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KeyRecord {
    #[serde(flatten)]
    pub kind: Kind,
    /// Tokens of earlier generations open nothing.
    pub token_generation: u64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "id_type", content = "config", rename_all = "lowercase")]
pub enum Kind {
    Increment(IncrementSettings),
    Formatted(FormattedKey),
    Snowflake(SnowflakeSettings),
}

impl Kind {
    pub fn id_type(&self) -> IdType {
        match self {
            Kind::Increment(_) => IdType::Increment,
            Kind::Formatted(_) => IdType::Formatted,
            Kind::Snowflake(_) => IdType::Snowflake,
        }
    }
}

impl Record for KeyRecord {
    const TABLE: &'static str = "id";
}

impl Ids {
    /// A key's record, whatever its type.
    pub(super) async fn find(&self, key: &Name) -> Result<Row<KeyRecord>> {
        self.registry.ready()?;
        self.registry.find(&self.registry.ids, key).await
    }

    /// The record of a key that must exist.
    pub(super) async fn existing(&self, key: &Name) -> Result<Arc<KeyRecord>> {
        self.find(key).await?.record.ok_or_else(|| Error::new(Code::NotFound, format!("key not found: {key}")))
    }

    /// Stores what a key is from now on; made anew, or as it was with other settings.
    pub(super) async fn store(&self, key: &Name, row: Row<KeyRecord>, kind: Kind) -> Result<KeyRecord> {
        let now = self.clock.now();
        let (created_at, token_generation) =
            row.record.map_or((now, 0), |known| (known.created_at, known.token_generation));
        let record = KeyRecord { kind, token_generation, created_at, updated_at: now };
        self.registry.store(key, &record, row.revision).await?;
        Ok(record)
    }
}

/// What a key of one type is made of.
pub trait Settings: Sized {
    const TYPE: IdType;
    fn of(kind: &Kind) -> Option<&Self>;
}

impl Settings for IncrementSettings {
    const TYPE: IdType = IdType::Increment;

    fn of(kind: &Kind) -> Option<&Self> {
        if let Kind::Increment(settings) = kind { Some(settings) } else { None }
    }
}

impl Settings for FormattedKey {
    const TYPE: IdType = IdType::Formatted;

    fn of(kind: &Kind) -> Option<&Self> {
        if let Kind::Formatted(key) = kind { Some(key) } else { None }
    }
}

impl Settings for SnowflakeSettings {
    const TYPE: IdType = IdType::Snowflake;

    fn of(kind: &Kind) -> Option<&Self> {
        if let Kind::Snowflake(settings) = kind { Some(settings) } else { None }
    }
}

impl KeyRecord {
    /// The settings of the type that was asked for. A key of another type is not the one.
    pub(super) fn settings<S: Settings>(&self, key: &Name) -> Result<&S> {
        S::of(&self.kind).ok_or_else(|| {
            let (wanted, found) = (S::TYPE.as_str(), self.kind.id_type().as_str());
            Error::new(Code::NotFound, format!("key not found: {key} is of the type {found}, not {wanted}"))
        })
    }
}

/// The settings that a key has before it is set. It can't change its type: its ids would be of two kinds.
pub(super) fn known<'a, S: Settings>(row: &'a Row<KeyRecord>, key: &Name) -> Result<Option<&'a S>> {
    let Some(record) = row.record.as_deref() else { return Ok(None) };
    let taken =
        || Error::field("key", format!("{key} is taken by a key of the type {}", record.kind.id_type().as_str()));
    S::of(&record.kind).ok_or_else(taken).map(Some)
}

/// What is set and what is counted are changed one after the other, and this instance is between the two.
pub(super) fn being_changed() -> Error {
    Error::unavailable(
        "the configuration of this key is being changed; ask again. If it stays so, a change was broken off: set it again",
    )
}

pub(super) fn check_name(name: &Option<String>) -> Result<()> {
    match name.as_ref().map(|name| name.chars().count()) {
        Some(length) if length > 255 => {
            Err(Error::field("name", format!("must have 255 characters at most, has {length}")))
        }
        _ => Ok(()),
    }
}

/// How many ids a request wants.
/// Asking for nothing is asking for one, also for who compares requests.
pub(super) fn size(size: &mut Option<i64>) -> Result<u32> {
    Ok(bounded(*size.get_or_insert(1), MAX_SIZE)? as u32)
}

fn bounded(size: i64, most: i64) -> Result<i64> {
    match (1..=most).contains(&size) {
        true => Ok(size),
        false => {
            let problem = format!("must lie between 1 and {most}, is {size}");
            Err(Error::field_as(Code::SizeExceedsLimit, "size", problem))
        }
    }
}

impl Handle<ListConfigs> for Ids {
    async fn handle(&self, call: Call<ListConfigs>) -> Result<ConfigPage> {
        self.registry.ready()?;
        let size = bounded(call.request.size.unwrap_or(20), MAX_PAGE)? as usize;
        let prefix = call.request.key.unwrap_or_default();
        let from = call.request.from.unwrap_or_default();
        let mut items: Vec<ConfigSummary> = self
            .registry
            .ids
            .all()
            .into_iter()
            .filter(|(key, _)| key.as_str() > from.as_str() && key.as_str().starts_with(&prefix))
            .map(|(key, record)| ConfigSummary { key, id_type: record.kind.id_type() })
            .take(size + 1)
            .collect();
        let has_more = items.len() > size;
        items.truncate(size);
        let next_cursor = items.last().filter(|_| has_more).map(|last| last.key.to_string());
        Ok(ConfigPage { items, next_cursor, has_more })
    }
}
