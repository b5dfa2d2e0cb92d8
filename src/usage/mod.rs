//! The usage ledger: what is published or sent is written down once, or refused with a reason.
//!
//! A record's way, whatever its entrance:
//!
//! 1. *Into the stream.* Services publish to `usage.<tenant>.<source>`; [`ingest`] does it for those who ask for a verdict,
//!    after [`buckets`] (how fast) and [`backlog`] (how much is waiting) have let them pass.
//! 2. *Read.* [`sink`] reads each shard in order. [`record`] takes messages apart, [`identity`] says which record it is,
//!    [`rules`] what can be told from it alone, by the [`types`] registry.
//! 3. *Judged and written.* The sink decides on repeats and counters, and writes a batch in one transaction with its own
//!    position ([`store`]).
//! 4. *Told.* [`verdicts`] go back to who waits; what was refused waits in [`quarantine`].

mod audit;
mod backlog;
mod buckets;
pub(crate) mod identity;
mod ingest;
mod limits;
mod metadata;
mod quarantine;
pub(crate) mod record;
mod refusals;
mod rules;
mod sink;
pub(crate) mod store;
mod types;
mod units;
mod upkeep;
mod verdicts;

use std::{sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use limits::TenantLimits;
pub use types::SourceRecord;

use crate::{
    api::{
        Name,
        usage::{
            ChangeUnit, GetLimits, GetMetadata, GetSourceLimits, Ingest, ListQuarantine, ListSources, ListUnits,
            RegisterSource, RegisterUnit, ReplayQuarantine, SetLimits, SetSourceLimits,
        },
    },
    clock::Clock,
    config::Config,
    error::Result,
    events::Events,
    gateway::Hosted,
    jetstream::{Bucket, jetstream_context},
    registry::Registry,
};
use backlog::Backlog;
use buckets::Buckets;
use limits::LimitTable;
use refusals::Refusals;
use sink::Sink;
use types::Types;
use upkeep::Upkeep;
use verdicts::Verdicts;

/// Answers the operations on usage.
pub struct Usage {
    database: PgPool,
    nats: async_nats::Client,
    registry: Registry,
    types: Arc<Types>,
    limits: LimitTable,
    buckets: Buckets,
    backlog: Arc<Backlog>,
    verdicts: Arc<Verdicts>,
    refusals: Arc<Refusals>,
    events: Events,
    clock: Clock,
    /// The first token of the events' subjects.
    subject: Name,
}

/// What usage needs of the rest of the process.
pub struct Parts {
    pub database: PgPool,
    /// For the sinks alone: what they hold is held.
    pub sink_database: PgPool,
    pub nats: async_nats::Client,
    pub sink_nats: async_nats::Client,
    pub jetstream: async_nats::jetstream::Context,
    pub registry: Registry,
    pub events: Events,
    pub clock: Clock,
}

/// The connections that sinks need.
pub fn connections(config: &Config) -> u32 {
    u32::from(config.usage.shards) + 4
}

/// Sinks while they write.
pub struct Running {
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Usage {
    /// Begins to write what comes, and to take requests.
    pub async fn start(parts: Parts, config: &Config, stop: CancellationToken) -> Result<(Arc<Self>, Running)> {
        let Parts { database, sink_database, nats, sink_nats, jetstream, registry, events, clock } = parts;
        let (prefix, usage) = (&config.nats.prefix, &config.usage);
        let subject = usage.subject.clone();
        let (stop, tracker) = (stop.child_token(), TaskTracker::new());
        let stream = format!("{prefix}_USAGE");
        let types = Arc::new(Types::new(registry.clone()));
        let limits = LimitTable::new(registry.clone(), usage);
        let verdicts = Verdicts::start(nats.clone(), &config.nats.inbox_prefix, stop.clone()).await?;
        let backlog = Arc::new(Backlog::new(stream.clone(), usage.backlog_bytes));
        tracker.spawn(backlog.clone().watch(jetstream.clone(), stop.clone()));
        let refusals = Arc::new(Refusals::default());
        tracker.spawn(refusals.clone().write(database.clone(), stop.clone()));
        let upkeep = Upkeep {
            database: database.clone(),
            quarantine_kept: usage.quarantine_kept,
            reconciliation_kept: usage.reconciliation_kept,
        };
        tracker.spawn(upkeep.run(stop.clone()));
        let sink = Arc::new(Sink {
            database: sink_database,
            jetstream: jetstream_context(&sink_nats),
            nats: sink_nats,
            stream,
            subject: usage.subject.clone(),
            types: types.clone(),
            limits: limits.clone(),
            verdicts: verdicts.clone(),
        });
        sink.start(usage.shards, &tracker, &stop);
        let buckets = Bucket::new(jetstream, format!("{prefix}_usage_limits"));
        let buckets = Buckets::new(buckets, events.clone(), clock.clone());
        let usage = Self {
            database,
            nats,
            registry,
            types,
            limits,
            buckets,
            backlog,
            verdicts,
            refusals,
            events,
            clock,
            subject,
        };
        Ok((Arc::new(usage), Running { stop, tracker }))
    }

    pub fn host(self: &Arc<Self>, hosted: &mut Hosted) {
        hosted.add::<Ingest>(self);
        hosted.add::<ListQuarantine>(self);
        hosted.add::<ReplayQuarantine>(self);
        hosted.add::<GetMetadata>(self);
        hosted.add::<ListUnits>(self);
        hosted.add::<RegisterUnit>(self);
        hosted.add::<ChangeUnit>(self);
        hosted.add::<RegisterSource>(self);
        hosted.add::<ListSources>(self);
        hosted.add::<GetLimits>(self);
        hosted.add::<SetLimits>(self);
        hosted.add::<GetSourceLimits>(self);
        hosted.add::<SetSourceLimits>(self);
    }
}

impl Running {
    /// Writes nothing more, and returns when what was under way is over. What was read and not written stays in the stream.
    pub async fn stop(self, limit: Duration) {
        self.stop.cancel();
        self.tracker.close();
        if timeout(limit, self.tracker.wait()).await.is_err() {
            tracing::warn!("usage was still being written; the stream has what is not in the ledger");
        }
    }
}
