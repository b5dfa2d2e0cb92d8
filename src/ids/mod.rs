//! Identifiers: increment, formatted and snowflake keys.
//!
//! A key is a record of the registry ([`keys`]); what it counts is a mark or a set of leases in the watermark.

mod formatted;
mod given;
mod guard;
mod increment;
mod jump;
mod keys;
mod meters;
mod sequences;
mod snowflake;
mod tokens;

use std::{sync::Arc, time::Duration};

use serde::{Serialize, de::DeserializeOwned};

pub use keys::KeyRecord;

use crate::{
    access::Tokens,
    api::{
        Call, Name, Operation,
        ids::{
            Formatted, GetFormatted, GetIncrement, GetSnowflake, GetToken, Given, Increment, LeaseSnowflake,
            ListConfigs, NextSnowflakes, ReleaseSnowflake, RenewSnowflake, ResetToken, SetFormatted, SetIncrement,
            SetSnowflake, VerifyAdmin,
        },
    },
    clock::Clock,
    config::Config,
    error::Result,
    gateway::Hosted,
    jetstream::Bucket,
    registry::Registry,
    watermark::{AtHand, Cells, Once, RangeSettings},
};
use guard::Guards;
use keys::Kind;
use meters::Requests;
use sequences::Sequences;
use snowflake::{Leasing, Snowflakes};

/// Answers the operations on identifiers.
pub struct Ids {
    registry: Registry,
    sequences: Sequences,
    guards: Guards,
    requests: Requests,
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
    pub counters: Bucket,
    pub leases: Bucket,
}

impl Ids {
    pub fn new(stores: Stores, config: &Config, clock: Clock, instance: Arc<str>) -> Self {
        let settings = RangeSettings {
            default_size: config.ids.default_batch_size,
            max_size: config.ids.max_batch_size,
            prefetch_threshold: config.ids.prefetch_threshold,
        };
        let deadline = config.watermark.deadline;
        let guards = Guards::new(Cells::new(stores.counters.clone(), instance.clone(), deadline));
        let marks = Cells::new(stores.counters, instance.clone(), deadline);
        let leasing = Leasing {
            cells: Cells::new(stores.leases, instance.clone(), deadline),
            clock: clock.clone(),
            owned: config.ids.lease_ttl,
            unowned: config.ids.unowned_lease_ttl,
        };
        Self {
            registry: stores.registry,
            sequences: Sequences::new(marks, guards.clone(), settings),
            guards,
            requests: Requests::default(),
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
            match &record.kind {
                Kind::Increment(settings) => self.begin_increment_again(&key, settings).await?,
                Kind::Formatted(known) => self.begin_formatted_again(&key, known).await?,
                Kind::Snowflake(settings) => self.begin_snowflake_again(&key, settings).await?,
            }
        }
        Ok(())
    }

    /// What makes a request repeatable, if its caller named it.
    fn once<O: Operation<Target = Name, Request: Serialize>>(&self, call: &Call<O>) -> Result<Option<Once>> {
        Once::of(call, self.idempotency_window)
    }

    /// The answer, or the first one to a request that is repeated.
    async fn answer<A, F>(&self, once: Option<Once>, make: impl FnOnce() -> F) -> Result<A>
    where
        A: Serialize + DeserializeOwned,
        F: Future<Output = Result<A>>,
    {
        match once {
            None => make().await,
            Some(once) => Box::pin(self.sequences.cells().make_once(once, make)).await,
        }
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
