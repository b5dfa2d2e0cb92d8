//! Formatted keys: texts made of parts, one of which may count.

mod change;
mod format;
mod pattern;
#[cfg(test)]
mod tests;
mod uniqueness;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

pub use format::{Format, Scope};

use super::{
    Ids,
    keys::{KeyRecord, Kind, check_name, known, size},
    sequences::{CounterName, Taking},
};
use crate::{
    api::{
        Call, Handle, Name,
        ids::{Formatted, FormattedConfig, FormattedIds, FormattedSettings, GetFormatted, IdType, Part, SetFormatted},
    },
    error::{Error, Result},
    watermark::{Absent, Bounds, RequestId, Steps},
};

/// Formats that a key may have had while ids were given. More than anybody needs, and a record stays small.
const MOST_FORMATS: usize = 100;

/// A formatted key as the registry has it, understood.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct FormattedKey {
    pub settings: FormattedSettings,
    pub version: u64,
    /// What keeps its ids apart, as it was found when the format was set.
    uniqueness: String,
    /// The formats before, whose ids may exist.
    earlier: Vec<Vec<Part>>,
    format: Format,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    settings: FormattedSettings,
    version: u64,
    uniqueness: String,
    earlier: Vec<Vec<Part>>,
}

impl TryFrom<Stored> for FormattedKey {
    type Error = Error;

    fn try_from(Stored { settings, version, uniqueness, earlier }: Stored) -> Result<Self> {
        Ok(Self { format: Format::new(&settings.parts)?, settings, version, uniqueness, earlier })
    }
}

impl From<FormattedKey> for Stored {
    fn from(FormattedKey { settings, version, uniqueness, earlier, .. }: FormattedKey) -> Self {
        Self { settings, version, uniqueness, earlier }
    }
}

impl FormattedKey {
    /// The counter that is in use at a moment.
    pub(super) fn scope_at(&self, now: DateTime<Utc>) -> Option<Scope> {
        Some(self.format.counter?.scope_at(now))
    }

    fn render(&self, now: DateTime<Utc>, numbers: Vec<i64>) -> Vec<String> {
        let stencil = self.format.at(now);
        numbers.into_iter().map(|number| stencil.id(number)).collect()
    }
}

impl Handle<Formatted> for Ids {
    async fn handle(&self, mut call: Call<Formatted>) -> Result<FormattedIds> {
        let name = &call.target;
        let record = self.existing(name).await?;
        let key: &FormattedKey = record.settings(name)?;
        let count = size(&mut call.request.size)?;
        // One reading of the clock for all parts, the counter's day included.
        let now = self.clock.now();
        let once = self.once(&call)?;
        let _measured = self.requests.measure(name, IdType::Formatted);
        let Some(terms) = key.format.counter else {
            let make = async || Ok(key.render(now, (1..=i64::from(count)).collect()));
            return Ok(FormattedIds { id: self.answer(once, make).await? });
        };
        let taking = Taking {
            steps: Steps::single(count),
            bounds: Bounds { base: 0, max: terms.max },
            mode: key.settings.mode,
            version: Some(key.version),
        };
        let (counter, request) = (CounterName::Formatted(name, terms.scope_at(now)), || call.context.request_id());
        let id = match once {
            None => key.render(now, self.sequences.take(counter, taking, &request).await?),
            Some(once) => {
                let key = key.clone();
                let render = move |numbers| key.render(now, numbers);
                Box::pin(self.sequences.take_once(counter, taking, &request, once, render)).await?
            }
        };
        Ok(FormattedIds { id })
    }
}

impl Handle<SetFormatted> for Ids {
    async fn handle(&self, call: Call<SetFormatted>) -> Result<FormattedConfig> {
        check_name(&call.request.name)?;
        self.registry
            .until_stored(|| self.set_formatted(&call.target, call.request.clone(), call.context.request_id()))
            .await
    }
}

impl Ids {
    async fn set_formatted(
        &self,
        name: &Name,
        settings: FormattedSettings,
        request: RequestId,
    ) -> Result<FormattedConfig> {
        let format = Format::new(&settings.parts)?;
        let uniqueness = format.uniqueness(self.clock.now())?.to_string();
        let row = self.find(name).await?;
        let key = match known::<FormattedKey>(&row, name)?.cloned() {
            Some(known)
                if known.settings.parts == settings.parts && self.guards.stands_at(name, known.version).await? =>
            {
                FormattedKey { settings, ..known }
            }
            known => {
                let version = known.as_ref().map(|known| known.version);
                let (mut earlier, before) =
                    known.map(|known| (known.earlier, Some(known.settings.parts))).unwrap_or_default();
                // The same again, where a change to another was broken off.
                let before = before.filter(|before| *before != settings.parts);
                let (formats, after) =
                    ([earlier.clone(), before.clone().into_iter().collect()].concat(), format.clone());
                let check = move || {
                    if formats.len() > MOST_FORMATS {
                        let problem = format!("have changed {MOST_FORMATS} times: make a new key");
                        return Err(Error::field("parts", problem));
                    }
                    formats.iter().try_for_each(|before| change::check(&Format::new(before)?, &after))
                };
                let used = self.guards.advance(name, version, request, check).await?;
                earlier.extend(before.filter(|_| used));
                let version = version.unwrap_or(0) + 1;
                let key = FormattedKey { settings, version, uniqueness, earlier, format };
                self.begin_counter(name, &key, used).await?;
                key
            }
        };
        let record = self.store(name, row, Kind::Formatted(key.clone())).await?;
        self.describe_formatted(name.clone(), &key, &record).await
    }
}

impl Handle<GetFormatted> for Ids {
    async fn handle(&self, call: Call<GetFormatted>) -> Result<FormattedConfig> {
        let record = self.existing(&call.target).await?;
        let key = record.settings(&call.target)?;
        self.describe_formatted(call.target.clone(), key, &record).await
    }
}

impl Ids {
    /// Makes the counter of a key that never starts again. Those of days begin with their first use.
    async fn begin_counter(&self, name: &Name, key: &FormattedKey, used: bool) -> Result<()> {
        if key.scope_at(self.clock.now()) != Some(Scope::Whole) {
            return Ok(());
        }
        // Once ids may exist, a counter of this key is either there or lost: its scope can't have changed.
        let counted =
            used && key.earlier.iter().any(|parts| parts.iter().any(|part| matches!(part, Part::AutoIncrement { .. })));
        let absent = if counted { Absent::IsLost } else { Absent::Begins };
        self.sequences.begin(CounterName::Formatted(name, Scope::Whole), absent, 0, None).await
    }

    async fn describe_formatted(&self, name: Name, key: &FormattedKey, record: &KeyRecord) -> Result<FormattedConfig> {
        let now = self.clock.now();
        let mark = match key.scope_at(now) {
            None => None,
            Some(scope) => self.sequences.cells().read(&CounterName::Formatted(&name, scope).to_string()).await?,
        };
        let next = mark.map_or(1, |mark| mark.mark.saturating_add(1));
        Ok(FormattedConfig {
            key: name,
            name: key.settings.name.clone(),
            parts: key.settings.parts.clone(),
            mode: key.settings.mode,
            sample_id: key.format.at(now).id(next),
            uniqueness: key.uniqueness.clone(),
            created_at: record.created_at,
            updated_at: record.updated_at,
        })
    }

    /// Puts a key back to its beginning where its counters are lost.
    pub(super) async fn begin_formatted_again(&self, name: &Name, key: &FormattedKey) -> Result<()> {
        self.guards.begin_again(name, key.version).await?;
        self.begin_counter(name, key, false).await
    }
}
