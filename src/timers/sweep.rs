//! The sweep: finds what the fast path missed. One instance at a time.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use chrono::TimeDelta;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{meters::Meters, outcomes::Outcomes, scheduler::Scheduler, settling, store::Store};

/// Any number; only we take this lock.
const LOCK: i64 = 0x7469_6d65_7273;

/// Overdue timers that one sweep takes. More wait for the next, or for another instance.
const MOST_OVERDUE: i64 = 100_000;
const MOST_ABANDONED: i64 = 10_000;
const MOST_FORGOTTEN: u64 = 10_000;
const FORGETTING: usize = 20;
/// Above it the number of pending timers is "at least".
const MOST_COUNTED: i64 = 1_000_000;

pub struct Sweeper {
    store: Store,
    scheduler: Arc<Scheduler>,
    outcomes: Outcomes,
    meters: Arc<Meters>,
    interval: Duration,
    attempts_kept: Duration,
    /// When a sweep was last asked for here.
    last: Mutex<Instant>,
}

impl Sweeper {
    pub fn new(
        store: Store,
        scheduler: Arc<Scheduler>,
        outcomes: Outcomes,
        meters: Arc<Meters>,
        interval: Duration,
        attempts_kept: Duration,
    ) -> Self {
        let last = Mutex::new(Instant::now());
        Self { store, scheduler, outcomes, meters, interval, attempts_kept, last }
    }

    /// Sweeps at once, and whenever nobody has asked for it in time: while NATS is away, nobody does.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let watch = async {
            loop {
                let since = self.last.lock().expect(UNBROKEN).elapsed();
                match (self.interval * 3 / 2).checked_sub(since) {
                    Some(rest) if !rest.is_zero() => sleep(rest).await,
                    _ => self.sweep().await,
                }
            }
        };
        self.sweep().await;
        tokio::select! {
            () = watch => {}
            () = stop.cancelled() => {}
        }
    }

    pub async fn sweep(&self) {
        *self.last.lock().expect(UNBROKEN) = Instant::now();
        // A server that hangs must not keep us from the next.
        match timeout(PATIENCE, self.sweep_alone()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "a sweep of timers did not come to its end"),
            Err(_) => tracing::warn!("a sweep of timers did not come to its end within {PATIENCE:?}"),
        }
    }

    /// Under a lock that ends with its transaction, whatever happens.
    async fn sweep_alone(&self) -> Result<(), sqlx::Error> {
        let mut transaction = self.store.pool.begin().await?;
        let alone: bool =
            sqlx::query_scalar("select pg_try_advisory_xact_lock($1)").bind(LOCK).fetch_one(&mut *transaction).await?;
        if !alone {
            return Ok(());
        }
        let now = self.scheduler.now();
        // What the process that claimed it still knows, it may still say.
        for timer in self.store.abandoned(MOST_ABANDONED).await? {
            tracing::warn!(timer = %timer.id, tenant = %timer.tenant, "a process left this timer while it called back");
            let _ = self.outcomes.send(settling::abandoned(&timer, now));
        }
        // Apart, because those for NATS wait while it is away. And what is slow must not hide what is not.
        let crowded = self.scheduler.crowded();
        for for_nats in [false, true] {
            self.scheduler.hold(self.store.overdue(for_nats, &crowded, MOST_OVERDUE).await?);
        }
        let horizon = now + self.scheduler.near_window() + TimeDelta::from_std(self.interval * 2).unwrap_or_default();
        self.scheduler.arm(self.store.seconds_until(horizon).await?);
        self.meters.pending(self.store.pending(MOST_COUNTED).await?);
        for _ in 0..FORGETTING {
            if self.store.forget_attempts(self.attempts_kept, MOST_FORGOTTEN as i64).await? < MOST_FORGOTTEN {
                break;
            }
        }
        transaction.commit().await
    }
}

/// Longer than any sweep should take.
const PATIENCE: Duration = Duration::from_secs(60);

const UNBROKEN: &str = "no panic while the moment is held";
