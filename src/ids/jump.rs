//! After the counters were put back to an older state.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::{Ids, keys::Kind, sequences::CounterName};
use crate::{api::Name, error::Result, watermark::Passed};

impl Ids {
    /// Passes over so many ids that each key may have given since.
    pub async fn jump(&self, margin: i64) -> Result<Passed> {
        let mut passed = Passed::default();
        for (key, record) in self.registry.ids.all() {
            if !matches!(record.kind, Kind::Snowflake(_)) {
                passed.count(key.as_str(), self.jump_of(&key, &record.kind, margin).await)?;
            }
        }
        Ok(passed)
    }

    async fn jump_of(&self, key: &Name, kind: &Kind, margin: i64) -> Result<()> {
        match kind {
            Kind::Increment(settings) => {
                // The largest step that somebody may have asked for.
                let numbers = margin.saturating_mul(settings.max_request_delta.max(settings.delta));
                self.sequences.jump(CounterName::Increment(key), numbers).await
            }
            Kind::Formatted(known) => {
                // Ids of the format may exist that nobody knows of.
                self.guards.restore(key, known.version).await?;
                // Earlier days are over; the present one may have begun since. Midnight is not the same for everybody.
                let (now, hour) = (self.clock.now(), TimeDelta::hours(1));
                let mut scopes: Vec<_> =
                    [now - hour, now, now + hour].into_iter().filter_map(|at| known.scope_at(at)).collect();
                scopes.dedup();
                for scope in scopes {
                    self.sequences.jump(CounterName::Formatted(key, scope), margin).await?;
                }
                Ok(())
            }
            // Its worker ids are held instead.
            Kind::Snowflake(_) => Ok(()),
        }
    }

    /// Lends no worker id that somebody may hold, for as long as he may: those that were held when the backup was made, and so
    /// many more. Tells how many keys there are.
    pub async fn hold_workers(&self, since: DateTime<Utc>, more: u32, longest: Duration) -> Result<usize> {
        let mut held = 0;
        for (key, record) in self.registry.ids.all() {
            if let Kind::Snowflake(settings) = &record.kind {
                self.hold_workers_of(&key, settings, since, more, longest).await?;
                held += 1;
            }
        }
        Ok(held)
    }
}
