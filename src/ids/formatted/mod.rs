//! Formatted keys: texts made of parts, one of which may count.

mod format;
mod pattern;
#[cfg(test)]
mod tests;
mod uniqueness;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use format::{Format, Scope};

use super::{
    Ids,
    keys::{KeyRecord, Kind, check_name, other_type, size, taken_by_other_type},
    sequences::{CounterName, Taking},
};
use crate::{
    api::{
        Call, Handle, Name, Operation,
        ids::{
            Formatted, FormattedConfig, FormattedIds, FormattedSettings, GetFormatted, IdType, Part, ResetScope,
            SetFormatted,
        },
    },
    error::{Error, Result},
    watermark::{Bounds, Mark, Once, Requester, Steps},
};

/// A formatted key's settings, understood.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "FormattedSettings", into = "FormattedSettings")]
pub struct FormattedKey {
    pub settings: FormattedSettings,
    format: Format,
}

impl TryFrom<FormattedSettings> for FormattedKey {
    type Error = Error;

    fn try_from(settings: FormattedSettings) -> Result<Self> {
        Ok(Self { format: Format::new(&settings.parts)?, settings })
    }
}

impl From<FormattedKey> for FormattedSettings {
    fn from(key: FormattedKey) -> Self {
        key.settings
    }
}

pub(super) fn counter(key: &Name, scope: Scope) -> CounterName<'_> {
    CounterName { key, id_type: IdType::Formatted, scope }
}

impl FormattedKey {
    /// The counter that is in use now.
    pub(super) fn scope_at(&self, now: chrono::DateTime<chrono::Utc>) -> Option<Scope> {
        Some(self.format.counter?.scope_at(now))
    }
}

impl Ids {
    async fn mint_formatted(
        &self,
        name: &Name,
        key: &FormattedKey,
        count: u32,
        request: Requester<'_>,
    ) -> Result<Vec<String>> {
        // One reading of the clock for all parts, the counter's day included.
        let now = self.clock.now();
        let numbers = match &key.format.counter {
            None => (1..=i64::from(count)).collect(),
            Some(terms) => {
                let bounds = Bounds { base: 0, max: terms.max };
                let taking = Taking { steps: Steps::single(count), bounds, mode: key.settings.mode };
                self.sequences.take(counter(name, terms.scope_at(now)), taking, request).await?
            }
        };
        let stencil = key.format.at(now);
        Ok(numbers.into_iter().map(|number| stencil.id(number)).collect())
    }

    async fn describe_formatted(&self, name: Name, key: &FormattedKey, record: &KeyRecord) -> Result<FormattedConfig> {
        let now = self.clock.now();
        let mark = match key.scope_at(now) {
            None => 0,
            Some(scope) => {
                let mark = self.sequences.cells().read(&counter(&name, scope).to_string()).await?;
                mark.map_or(0, |mark| mark.mark)
            }
        };
        Ok(FormattedConfig {
            key: name,
            name: key.settings.name.clone(),
            parts: key.settings.parts.clone(),
            mode: key.settings.mode,
            sample_id: key.format.at(now).id(mark.saturating_add(1)),
            uniqueness: key.format.uniqueness(now)?.to_string(),
            created_at: record.created_at,
            updated_at: record.updated_at,
        })
    }

    /// Whether an id of the key was ever given.
    async fn is_in_use(&self, name: &Name) -> Result<bool> {
        let cells = self.sequences.cells();
        for key in cells.bucket().keys_below(&format!("formatted.{name}")).await? {
            if cells.read(&key).await?.is_some_and(|mark| mark.mark > 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Handle<Formatted> for Ids {
    async fn handle(&self, call: Call<Formatted>) -> Result<FormattedIds> {
        let name = &call.target;
        let record = self.existing(name).await?;
        let Kind::Formatted(key) = &record.kind else { return Err(other_type(name, IdType::Formatted, &record)) };
        let count = size(call.request.size)?;
        let request = || call.context.request_id();
        let mint = || self.mint_formatted(name, key, count, &request);
        let id = match &call.context.idempotency_key {
            None => mint().await?,
            Some(once) => {
                let once = Once::new(&Formatted::INFO, name, once, &call.request, self.idempotency_window)?;
                Box::pin(once.or_make(self.sequences.cells().bucket(), mint)).await?
            }
        };
        Ok(FormattedIds { id })
    }
}

impl Handle<SetFormatted> for Ids {
    async fn handle(&self, call: Call<SetFormatted>) -> Result<FormattedConfig> {
        let name = call.target;
        check_name(&call.request.name)?;
        let key = FormattedKey::try_from(call.request)?;
        key.format.uniqueness(self.clock.now())?;
        let row = self.find(&name).await?;
        match row.record.as_deref() {
            None => {}
            Some(KeyRecord { kind: Kind::Formatted(known), .. }) => {
                if let Some(error) = counts_differently(known, &key)
                    && self.is_in_use(&name).await?
                {
                    return Err(error);
                }
            }
            Some(record) => return Err(taken_by_other_type(&name, record)),
        }
        // First the counter, then the record, as with increment keys. The counters of days begin with their first use.
        if matches!(&key.format.counter, Some(terms) if terms.scope == ResetScope::None) {
            let begin = |state: &mut Option<Mark>| Ok(state.get_or_insert(Mark::at(0)).mark);
            let counter = counter(&name, Scope::Whole).to_string();
            self.sequences.cells().change(&counter, call.context.request_id(), begin).await?;
        }
        let record = self.store(&name, row, Kind::Formatted(key.clone())).await?;
        self.describe_formatted(name, &key, &record).await
    }
}

impl Handle<GetFormatted> for Ids {
    async fn handle(&self, call: Call<GetFormatted>) -> Result<FormattedConfig> {
        let record: Arc<KeyRecord> = self.existing(&call.target).await?;
        match &record.kind {
            Kind::Formatted(key) => self.describe_formatted(call.target, key, &record).await,
            _ => Err(other_type(&call.target, IdType::Formatted, &record)),
        }
    }
}

/// What of the counter can't change once an id was given, because the ids to come could look like ids of before.
fn counts_differently(known: &FormattedKey, wanted: &FormattedKey) -> Option<Error> {
    type Fixed<'a> = (u32, &'a crate::api::ids::PaddingMode, &'a str, ResetScope);
    fn fixed(key: &FormattedKey) -> Option<(usize, Fixed<'_>)> {
        key.settings.parts.iter().enumerate().find_map(|(index, part)| match part {
            Part::AutoIncrement { number_base, padding_mode, padding_char, reset_scope, .. } => {
                Some((index, (*number_base, padding_mode, padding_char.as_str(), *reset_scope)))
            }
            _ => None,
        })
    }
    let ((_, before), (index, after)) = (fixed(known)?, fixed(wanted)?);
    let zones = (known.format.counter?.zone, wanted.format.counter?.zone);
    let field = match () {
        () if before.0 != after.0 => "number_base",
        () if before.1 != after.1 => "padding_mode",
        () if before.2 != after.2 => "padding_char",
        () if before.3 != after.3 => "reset_scope",
        () if zones.0 != zones.1 && after.3 != ResetScope::None => "time_zone",
        () => return None,
    };
    Some(format::part_error(index, field, "can't change once an id was given: ids could repeat"))
}
