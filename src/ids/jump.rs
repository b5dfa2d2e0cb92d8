//! After the counters were put back to an older state.

use std::time::Duration;

use super::{Ids, keys::Kind, sequences::CounterName};
use crate::error::Result;

impl Ids {
    /// Passes over numbers that every counter may have given since. Tells how many counters there are.
    pub async fn jump(&self, margin: i64) -> Result<usize> {
        let (now, mut jumped) = (self.clock.now(), 0);
        for (key, record) in self.registry.ids.all() {
            let counter = match &record.kind {
                Kind::Increment(_) => Some(CounterName::Increment(&key)),
                Kind::Formatted(known) => {
                    // Ids of a format may exist that nobody knows of.
                    self.guards.announce(&key, known.version).await?;
                    // Earlier days are over; today may have begun since.
                    known.scope_at(now).map(|scope| CounterName::Formatted(&key, scope))
                }
                Kind::Snowflake(_) => None,
            };
            if let Some(counter) = counter {
                self.sequences.jump(counter, margin).await?;
                jumped += 1;
            }
        }
        Ok(jumped)
    }

    /// Lends no worker id that somebody may hold, for as long as he may. Tells how many keys there are.
    pub async fn hold_workers(&self, more: u32, longest: Duration) -> Result<usize> {
        let mut held = 0;
        for (key, record) in self.registry.ids.all() {
            if let Kind::Snowflake(settings) = &record.kind {
                self.hold_workers_of(&key, settings, more, longest).await?;
                held += 1;
            }
        }
        Ok(held)
    }
}
