//! After a restore: nothing that may have been given since the backup is given again.

use std::sync::Arc;

use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use super::{Manifest, Margins, Result};
use crate::{
    clock::Clock,
    config::Config,
    events::Events,
    ids::{self, Ids},
    jetstream,
    noid::Pools,
    registry::Registry,
    stages::Stages,
    timers, usage,
    watermark::{self, Passed},
};

/// What was passed over.
#[derive(Debug)]
pub struct Jumped {
    pub counters: Passed,
    pub snowflake_keys: usize,
    pub pools: Passed,
    pub stages: Passed,
    /// The next stage's id.
    pub next_stage: i64,
    /// Timers that wait to be resumed.
    pub paused_timers: u64,
}

pub async fn past_what_was_given(
    config: &Config,
    nats: &async_nats::Client,
    database: &PgPool,
    manifest: &Manifest,
    margins: Margins,
    pause_timers: bool,
) -> Result<Jumped> {
    let (context, prefix, clock) = (jetstream::jetstream_context(nats), &config.nats.prefix, Clock::system());
    let (instance, numbers): (Arc<str>, _) = ("restore".into(), i64::from(margins.numbers));
    let registry = Registry::new(context.clone(), prefix);
    let stop = CancellationToken::new();
    let following = tokio::spawn(registry.clone().follow(stop.clone()));
    registry.loaded().await;
    let stores = ids::Stores {
        registry,
        counters: watermark::bucket(context.clone(), prefix),
        leases: watermark::lease_bucket(context.clone(), prefix),
    };
    let ids = Ids::new(stores, config, clock.clone(), instance.clone());
    let counters = ids.jump(numbers).await?;
    let snowflake_keys = ids.hold_workers(manifest.begun_at, margins.workers, margins.longest_lease).await?;
    let events = Events::new(nats.clone(), prefix.clone());
    let pools =
        Pools::new(watermark::bucket(context.clone(), prefix), events.clone(), config, clock.clone(), instance.clone());
    let pools = pools.jump(margins.numbers as usize).await?;
    let stages = Stages::new(context, events, config, clock, instance);
    let (stages, next_stage) = stages.jump(margins.numbers).await?;
    usage::forget_positions(database).await?;
    let paused_timers = timers::pause_what_may_have_fired(database, pause_timers).await?;
    stop.cancel();
    let _ = following.await;
    Ok(Jumped { counters, snowflake_keys, pools, stages, next_stage, paused_timers })
}
