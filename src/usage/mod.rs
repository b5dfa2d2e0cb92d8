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
//!
//! Read it is by event time ([`query`], from a [`cursor`]) or in the order of acceptance ([`feed`]); [`correct`] amends and
//! withdraws single records, [`backfill`] replaces ranges, which [`ranges`] closes to live records meanwhile.
//! [`retention`] lets go what is kept no longer; [`historical`] is a second database for what is old.

mod audit;
mod backfill;
mod backlog;
mod buckets;
mod correct;
mod courtesy;
mod cursor;
mod detaching;
mod feed;
mod historical;
pub(crate) mod identity;
mod ingest;
mod limits;
mod metadata;
mod quarantine;
mod query;
mod ranges;
pub(crate) mod record;
mod refusals;
mod retention;
mod rules;
mod sink;
pub(crate) mod store;
mod types;
mod units;
mod upkeep;
mod verdicts;

use std::{
    num::NonZeroU32,
    sync::{Arc, Weak},
    time::Duration,
};

use governor::{DefaultKeyedRateLimiter, Quota};

use sqlx::PgPool;
use tokio::{sync::Semaphore, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use limits::TenantLimits;
pub use store::forget_positions;
pub use types::SourceRecord;

use crate::{
    api::{
        Name,
        usage::{
            AmendRecord, ApplyRetention, CancelBackfill, ChangeRetention, ChangeUnit, CommitBackfill, DeprecateRecord,
            GetBackfill, GetHistory, GetInvoiced, GetLimits, GetMetadata, GetRecord, GetRetention, GetSourceLimits,
            Ingest, ListQuarantine, ListSources, ListUnits, MOST_EVENTS, MarkInvoiced, QueryRecords, ReadFeed,
            RegisterSource, RegisterUnit, ReplayQuarantine, ReportRetention, RevertBackfill, RevertElevatedBackfill,
            SendBackfillEvents, SetLimits, SetSourceLimits, SubmitBackfill, SubmitElevatedBackfill,
        },
    },
    clock::Clock,
    config::Config,
    error::{Error, Result},
    events::Events,
    gateway::Hosted,
    jetstream::{Bucket, jetstream_context},
    registry::Registry,
    turns::Turns,
};
use backlog::Backlog;
use buckets::Buckets;
use courtesy::Courtesy;
use cursor::Cursors;
use historical::Historical;
use limits::LimitTable;
use ranges::Ranges;
use refusals::Refusals;
use retention::Retainer;
use sink::Sink;
use types::Types;
use upkeep::Upkeep;
use verdicts::Verdicts;

/// Answers the operations on usage.
pub struct Usage {
    database: PgPool,
    /// For pages alone: whoever reads much must not keep others from writing.
    reading: PgPool,
    historical: Arc<Historical>,
    cursors: Cursors,
    shards: u16,
    ranges: Arc<Ranges>,
    retention: Arc<Retainer>,
    /// How long work on a range may take until it must say that it goes on.
    lease: Duration,
    backfill_pace: DefaultKeyedRateLimiter<Name>,
    backfills_at_once: Semaphore,
    /// Whose turn it is to read, and to wait for the feed.
    reading_turns: Turns,
    courtesy: Arc<Courtesy>,
    waiting_turns: Turns,
    /// How long a caller is made to wait for a verdict, or for the end of a backfill.
    answer_within: Duration,
    longest_wait: Duration,
    tracker: TaskTracker,
    stop: CancellationToken,
    leaving: CancellationToken,
    me: Weak<Self>,
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
    /// For pages.
    pub reading: PgPool,
    pub nats: async_nats::Client,
    pub sink_nats: async_nats::Client,
    pub jetstream: async_nats::jetstream::Context,
    pub registry: Registry,
    pub events: Events,
    pub clock: Clock,
    /// When the process begins to leave, nobody waits for news any more.
    pub leaving: CancellationToken,
}

/// The connections that sinks need.
pub fn connections(config: &Config) -> u32 {
    u32::from(config.usage.shards) + 4
}

/// How many readers of a tenant may wait for the feed at once.
const WAITS_OF_A_TENANT: usize = 100;

/// Backfills that are written at once: each holds a connection that others need.
const BACKFILLS: usize = 2;

/// Sinks while they write.
pub struct Running {
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Usage {
    /// Begins to write what comes, and to take requests.
    pub async fn start(parts: Parts, config: &Config, stop: CancellationToken) -> Result<(Arc<Self>, Running)> {
        let Parts { database, sink_database, reading, nats, sink_nats, jetstream, registry, events, clock, leaving } =
            parts;
        let (prefix, usage) = (&config.nats.prefix, &config.usage);
        let subject = usage.subject.clone();
        let (stop, tracker) = (stop.child_token(), TaskTracker::new());
        let stream = format!("{prefix}_USAGE");
        let types = Arc::new(Types::new(registry.clone()));
        let limits = LimitTable::new(registry.clone(), usage);
        let verdicts = Verdicts::start(nats.clone(), &config.nats.inbox_prefix, stop.clone()).await?;
        let backlog = Arc::new(Backlog::new(stream.clone(), usage.backlog_bytes));
        tracker.spawn(backlog.clone().watch(jetstream.clone(), stop.clone()));
        let ranges = Arc::new(Ranges::new(events.clone()));
        tracker.spawn(ranges.clone().follow(database.clone(), stop.clone()));
        let refusals = Arc::new(Refusals::default());
        tracker.spawn(refusals.clone().write(database.clone(), stop.clone()));
        let historical = Historical::new(database.clone(), config, clock.clone());
        let historical = Arc::new(historical.map_err(Error::internal)?);
        let retention = Arc::new(Retainer {
            database: database.clone(),
            historical: historical.clone(),
            types: types.clone(),
            clock: clock.clone(),
            default_days: usage.retention_days,
        });
        let upkeep = Upkeep {
            database: database.clone(),
            retention: retention.clone(),
            quarantine_kept: usage.quarantine_kept,
            reconciliation_kept: usage.reconciliation_kept,
        };
        tracker.spawn(upkeep.run(stop.clone()));
        let courtesy = Arc::new(Courtesy::default());
        let sink = Arc::new(Sink {
            database: sink_database,
            jetstream: jetstream_context(&sink_nats),
            nats: sink_nats,
            stream,
            subject: usage.subject.clone(),
            types: types.clone(),
            limits: limits.clone(),
            verdicts: verdicts.clone(),
            events: events.clone(),
            courtesy: courtesy.clone(),
        });
        sink.start(usage.shards, &tracker, &stop);
        let buckets = Bucket::new(jetstream, format!("{prefix}_usage_limits"));
        let buckets = Buckets::new(buckets, events.clone(), clock.clone());
        let pace = NonZeroU32::new(usage.backfill_rate).unwrap_or(NonZeroU32::MIN);
        let burst = pace.max(NonZeroU32::new(MOST_EVENTS as u32).unwrap_or(pace));
        let (lease, answer_within) = (usage.backfill_lease, usage.answer_within);
        let usage = Arc::new_cyclic(|me| Self {
            database,
            reading,
            historical,
            cursors: Cursors::default(),
            shards: usage.shards,
            ranges,
            retention,
            lease,
            backfill_pace: DefaultKeyedRateLimiter::keyed(Quota::per_second(pace).allow_burst(burst)),
            backfills_at_once: Semaphore::new(BACKFILLS),
            courtesy,
            reading_turns: Turns::new((config.usage.readers / 2).max(1) as usize),
            waiting_turns: Turns::new(WAITS_OF_A_TENANT),
            answer_within,
            longest_wait: config.http.request_timeout.saturating_sub(Duration::from_secs(2)),
            tracker: tracker.clone(),
            stop: stop.clone(),
            leaving,
            me: me.clone(),
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
        });
        let abandoned = Self::end_abandoned(Arc::downgrade(&usage), lease);
        let stopping = stop.clone();
        tracker.spawn(async move { stopping.run_until_cancelled(abandoned).await });
        Ok((usage, Running { stop, tracker }))
    }

    pub fn host(self: &Arc<Self>, hosted: &mut Hosted) {
        hosted.add::<Ingest>(self);
        hosted.add::<QueryRecords>(self);
        hosted.add::<ReadFeed>(self);
        hosted.add::<GetRecord>(self);
        hosted.add::<GetHistory>(self);
        hosted.add::<AmendRecord>(self);
        hosted.add::<DeprecateRecord>(self);
        hosted.add::<SubmitBackfill>(self);
        hosted.add::<SubmitElevatedBackfill>(self);
        hosted.add::<RevertElevatedBackfill>(self);
        hosted.add::<SendBackfillEvents>(self);
        hosted.add::<CommitBackfill>(self);
        hosted.add::<CancelBackfill>(self);
        hosted.add::<GetBackfill>(self);
        hosted.add::<RevertBackfill>(self);
        hosted.add::<GetInvoiced>(self);
        hosted.add::<MarkInvoiced>(self);
        hosted.add::<GetRetention>(self);
        hosted.add::<ChangeRetention>(self);
        hosted.add::<ReportRetention>(self);
        hosted.add::<ApplyRetention>(self);
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
