//! Timers: callbacks at their moment, once each, whatever happens to this process.
//!
//! PostgreSQL has the truth ([`store`]) and JetStream wakes us. A timer's way:
//!
//! 1. *Arm.* [`plan`] checks what is asked for, [`store`] keeps it, [`arm`] makes sure that somebody is woken for its second.
//! 2. *Wake.* [`wake`] hears the wake-up, reads the second's timers and gives them to the [`scheduler`], whose [`queue`] holds
//!    them until they are due.
//! 3. *Fire.* [`fire`] claims what is due in one statement, [`deliver`] calls back, [`settling`] decides how the timer goes
//!    on, [`outcomes`] writes it down and tells it.
//! 4. *Sweep.* [`sweep`] finds what was missed.

mod arm;
mod callback;
mod cancel;
mod create;
mod deliver;
mod fire;
mod look;
mod meters;
mod moment;
mod outcomes;
mod plan;
mod queue;
mod rates;
mod recurrence;
mod scheduler;
mod settling;
mod store;
mod sweep;
mod tend;
mod wake;
mod webhook;

use std::{sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use deliver::Rotation;
pub use store::pause_what_may_have_fired;

use crate::{
    api::timers::{
        CancelTimer, CancelTimers, CreateTimer, CreateTimers, FireTimer, GetTimer, GetTimerSecrets, GetWebhookSecret,
        ListAttempts, ListTimers, PauseTimer, ResumeTimer, RetryTimer, RotateWebhookSecret, UpdateTimer,
    },
    clock::Clock,
    config::Config,
    events::Events,
    gateway::Hosted,
    registry::Registry,
};
use arm::Armer;
use callback::Rules;
use deliver::{HttpCaller, NatsCaller, Signer};
use fire::Firing;
use meters::Meters;
use plan::Planner;
use queue::Queue;
use rates::Rates;
use scheduler::Scheduler;
use store::{Inserter, Store};
use sweep::Sweeper;
use wake::Waking;

/// Answers the operations on timers.
pub struct Timers {
    store: Store,
    inserter: Inserter,
    planner: Planner,
    scheduler: Arc<Scheduler>,
    signer: Arc<Signer>,
    rates: Rates,
    events: Events,
    clock: Clock,
}

/// Connections for firing alone: two claims, outcomes, and a sweep with its lock.
pub const CONNECTIONS: u32 = 6;

/// What timers need of the rest of the process.
pub struct Parts {
    pub database: PgPool,
    pub firing_database: PgPool,
    pub nats: async_nats::Client,
    pub jetstream: async_nats::jetstream::Context,
    pub registry: Registry,
    pub events: Events,
    pub clock: Clock,
    pub instance: Arc<str>,
}

/// Timers while they fire.
pub struct Running {
    stop: CancellationToken,
    tracker: TaskTracker,
    writing: JoinHandle<()>,
    callback_timeout: Duration,
}

impl Timers {
    /// Begins to fire what is due, and to take requests.
    pub async fn start(parts: Parts, config: &Config, stop: CancellationToken) -> (Arc<Self>, Running) {
        let Parts { database, firing_database, nats, jetstream, registry, events, clock, instance } = parts;
        let (timers, prefix) = (&config.timers, &config.nats.prefix);
        let stop = stop.child_token();
        let tracker = TaskTracker::new();
        // One for requests, one for firing.
        let (requests, store) = (Store::new(database), Store::new(firing_database));
        let meters = Arc::new(Meters::new());
        let armer = Armer::start(jetstream.client(), prefix.clone(), stop.clone());
        let queue = Queue::new(timers.concurrency, timers.concurrency_per_destination);
        let scheduler = Arc::new(Scheduler::new(armer.clone(), queue, timers.near_window, clock.running()));
        let (outcomes, writing) = outcomes::start(store.clone(), events.clone(), meters.clone(), scheduler.clone());
        let master = config.auth.token_secret.as_ref().or(config.auth.admin_token.as_ref());
        let master = master.map(|secret| secret.expose().as_bytes().to_vec());
        let signer = Arc::new(Signer::new(master, registry, timers.secret_overlap));
        let firing = Firing {
            store: store.clone(),
            scheduler: scheduler.clone(),
            http: HttpCaller::new(timers, signer.clone()),
            nats: NatsCaller::new(nats, timers.callback_timeout),
            meters: meters.clone(),
            owner: instance,
            callback_timeout: timers.callback_timeout,
        };
        tracker.spawn(Arc::new(firing).run(outcomes.clone(), tracker.clone(), stop.clone()));
        let sweeper = Sweeper::new(
            store.clone(),
            scheduler.clone(),
            outcomes,
            meters,
            timers.sweep_interval,
            timers.attempts_kept,
        );
        let sweeper = Arc::new(sweeper);
        let waking = Waking {
            jetstream,
            prefix: prefix.clone(),
            store: store.clone(),
            scheduler: scheduler.clone(),
            sweeper: sweeper.clone(),
        };
        tracker.spawn(Arc::new(waking).run(tracker.clone(), stop.clone()));
        tracker.spawn(sweeper.run(stop.clone()));
        if let Err(error) = armer.arm_sweep(timers.sweep_interval).await {
            tracing::warn!(%error, "the schedule of the sweep could not be set; instances sweep by themselves");
        }
        let planner = Planner { rules: Rules::new(config), min_delay: timers.min_delay };
        let rates = Rates::new(timers);
        let expecting = scheduler.clone();
        let inserter = Inserter::start(requests.clone(), move |entries| {
            metrics::counter!("tidemark_timers_created_total").increment(entries.len() as u64);
            expecting.expect(entries);
        });
        let timers = Self { store: requests, inserter, planner, scheduler, signer, rates, events, clock };
        (Arc::new(timers), Running { stop, tracker, writing, callback_timeout: config.timers.callback_timeout })
    }

    pub fn host(self: &Arc<Self>, hosted: &mut Hosted) {
        hosted.add::<CreateTimer>(self);
        hosted.add::<CreateTimers>(self);
        hosted.add::<CancelTimers>(self);
        hosted.add::<GetTimer>(self);
        hosted.add::<GetTimerSecrets>(self);
        hosted.add::<ListTimers>(self);
        hosted.add::<UpdateTimer>(self);
        hosted.add::<CancelTimer>(self);
        hosted.add::<FireTimer>(self);
        hosted.add::<RetryTimer>(self);
        hosted.add::<PauseTimer>(self);
        hosted.add::<ResumeTimer>(self);
        hosted.add::<ListAttempts>(self);
        hosted.add::<GetWebhookSecret>(self);
        hosted.add::<RotateWebhookSecret>(self);
    }
}

impl Running {
    /// Fires nothing more, and returns when what is under way is over and written down. A callback has its time, even if
    /// others have less: cutting it off would leave its end unknown.
    pub async fn stop(self, limit: Duration) {
        let limit = limit.max(self.callback_timeout + Duration::from_secs(2));
        self.stop.cancel();
        self.tracker.close();
        let ended = async {
            self.tracker.wait().await;
            let _ = self.writing.await;
        };
        if timeout(limit, ended).await.is_err() {
            tracing::warn!("callbacks were still under way; how they ended is not known");
        }
    }
}
