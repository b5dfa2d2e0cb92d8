//! Identifiers: increment, formatted and snowflake keys.
//!
//! A key is a record of the registry ([`keys`]); what it counts is a mark or a set of leases in the watermark.

mod formatted;
mod given;
mod increment;
mod keys;
mod sequences;
mod snowflake;
mod tokens;

use std::{sync::Arc, time::Duration};

pub use keys::KeyRecord;

use crate::{
    access::Tokens,
    api::ids::{
        Formatted, GetFormatted, GetIncrement, GetSnowflake, GetToken, Given, Increment, LeaseSnowflake, ListConfigs,
        NextSnowflakes, ReleaseSnowflake, RenewSnowflake, ResetToken, SetFormatted, SetIncrement, SetSnowflake,
        VerifyAdmin,
    },
    clock::Clock,
    config::Config,
    error::Result,
    gateway::Hosted,
    registry::Registry,
    watermark::{AtHand, Cells, Mark, RangeSettings, leases::Leases},
};
use formatted::Scope;
use keys::Kind;
use sequences::Sequences;
use snowflake::{Leasing, Snowflakes};

/// Answers the operations on identifiers.
pub struct Ids {
    registry: Registry,
    sequences: Sequences,
    snowflakes: Snowflakes,
    tokens: Option<Tokens>,
    token_ttl: chrono::Duration,
    idempotency_window: Duration,
    clock: Clock,
    instance: Arc<str>,
}

/// Where identifiers are kept.
pub struct Stores {
    pub registry: Registry,
    pub marks: Cells<Mark>,
    pub leases: Cells<Leases>,
}

impl Ids {
    pub fn new(stores: Stores, config: &Config, clock: Clock, instance: Arc<str>) -> Self {
        let settings = RangeSettings {
            default_size: config.ids.default_batch_size,
            max_size: config.ids.max_batch_size,
            prefetch_threshold: config.ids.prefetch_threshold,
        };
        let leasing = Leasing {
            cells: stores.leases,
            clock: clock.clone(),
            owned: config.ids.lease_ttl,
            unowned: config.ids.unowned_lease_ttl,
        };
        Self {
            registry: stores.registry,
            sequences: Sequences::new(stores.marks, settings),
            snowflakes: Snowflakes::new(leasing),
            tokens: Tokens::new(&config.auth),
            token_ttl: chrono::Duration::from_std(config.ids.token_ttl).unwrap_or(chrono::Duration::MAX),
            idempotency_window: config.watermark.idempotency_window,
            clock,
            instance,
        }
    }

    pub fn host(self: &Arc<Self>, hosted: &mut Hosted) {
        hosted.add::<Increment>(self);
        hosted.add::<SetIncrement>(self);
        hosted.add::<GetIncrement>(self);
        hosted.add::<Formatted>(self);
        hosted.add::<SetFormatted>(self);
        hosted.add::<GetFormatted>(self);
        hosted.add::<LeaseSnowflake>(self);
        hosted.add::<RenewSnowflake>(self);
        hosted.add::<ReleaseSnowflake>(self);
        hosted.add::<NextSnowflakes>(self);
        hosted.add::<SetSnowflake>(self);
        hosted.add::<GetSnowflake>(self);
        hosted.add::<ListConfigs>(self);
        hosted.add::<VerifyAdmin>(self);
        hosted.add::<GetToken>(self);
        hosted.add::<ResetToken>(self);
        hosted.add::<Given>(self);
    }

    /// Puts every key whose counter is lost back to its base. Ids repeat; somebody has said that this is meant.
    pub async fn begin_again(&self) -> Result<()> {
        for (key, record) in self.registry.ids.all() {
            let (counter, base) = match &record.kind {
                Kind::Increment(settings) => (increment::counter(&key), settings.base),
                Kind::Formatted(known) if known.scope_at(self.clock.now()) == Some(Scope::Whole) => {
                    (formatted::counter(&key, Scope::Whole), 0)
                }
                // Counters of days begin with their first use, and leases with the first holder.
                Kind::Formatted(_) | Kind::Snowflake(_) => continue,
            };
            let begin = move |state: &mut Option<Mark>| Ok(state.get_or_insert(Mark::at(base)).mark);
            self.sequences.cells().change(&counter.to_string(), None, begin).await?;
        }
        Ok(())
    }

    /// What this process holds, ready to give.
    pub fn at_hand(&self) -> Vec<AtHand> {
        self.sequences.at_hand()
    }

    /// Gives back what was reserved or leased and not used. Call it when no request is under way any more.
    pub async fn stop(&self) {
        tokio::join!(self.sequences.stop(), self.snowflakes.stop());
    }
}
