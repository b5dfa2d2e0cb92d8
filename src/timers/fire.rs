//! Firing: claim what is due, call back, hand over the outcome.

use std::{collections::HashMap, sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use futures::{StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use super::{
    deliver::{HttpCaller, NatsCaller, Report},
    meters::Meters,
    outcomes::Outcomes,
    scheduler::{Scheduler, Slot},
    settling,
    store::{Claimed, Entry, Store},
};
use crate::api::timers::{Callback, HttpCallback, NatsCallback};

/// Timers of one claim.
const MOST: usize = 1000;

/// Claims under way at once: while one waits for its disk, the next gathers.
const CLAIMS: usize = 2;

/// A claim lasts so many times as long as a callback may. Then somebody else may settle it.
const LASTS: u32 = 2;

pub struct Firing {
    pub store: Store,
    pub scheduler: Arc<Scheduler>,
    pub http: HttpCaller,
    pub nats: NatsCaller,
    pub meters: Arc<Meters>,
    /// This instance, as rows name it.
    pub owner: Arc<str>,
    pub callback_timeout: Duration,
}

/// A claimed timer, and when that was by a clock that only goes forward.
struct Held {
    timer: Claimed,
    since: Instant,
    _slot: Slot,
}

impl Held {
    /// PostgreSQL's time, counted on from the claim.
    fn now(&self) -> DateTime<Utc> {
        self.timer.claimed_at + self.since.elapsed()
    }
}

impl Firing {
    /// Fires until told to stop. What is under way then goes on in the tracker.
    pub async fn run(self: Arc<Self>, outcomes: Outcomes, tracker: TaskTracker, stop: CancellationToken) {
        let claims = Arc::new(Semaphore::new(CLAIMS));
        loop {
            let next = async {
                let permit = claims.clone().acquire_owned().await.expect("never closed");
                (self.scheduler.due(MOST, || self.nats.is_connected()).await, permit)
            };
            let (entries, permit) = tokio::select! {
                () = stop.cancelled() => return,
                next = next => next,
            };
            self.meters.under_way(self.scheduler.under_way());
            tracker.spawn(self.clone().fire(entries, permit, outcomes.clone(), stop.clone()));
        }
    }

    async fn fire(
        self: Arc<Self>,
        entries: Vec<(Entry, Slot)>,
        permit: OwnedSemaphorePermit,
        outcomes: Outcomes,
        stop: CancellationToken,
    ) {
        let held = self.claim(entries, &stop).await;
        drop(permit);
        self.meters.fired(held.iter().map(|one| settling::lateness(&one.timer, one.now())));
        let (mut on_http, mut on_nats) = (Vec::new(), Vec::new());
        for one in held {
            if settling::is_too_late(&one.timer) {
                let _ = outcomes.send(settling::skipped(&one.timer));
                continue;
            }
            match one.timer.callback.clone() {
                Callback::Http(callback) => on_http.push((one, callback)),
                Callback::Nats(callback) => on_nats.push((one, callback)),
            }
        }
        tokio::join!(self.call_http(on_http, &outcomes), self.call_nats(on_nats, &outcomes));
        self.meters.under_way(self.scheduler.under_way());
    }

    /// Claims what may be fired, waiting for PostgreSQL if it is away.
    async fn claim(&self, entries: Vec<(Entry, Slot)>, stop: &CancellationToken) -> Vec<Held> {
        let ids: Vec<Uuid> = entries.iter().map(|(entry, _)| entry.id).collect();
        let claim = Uuid::new_v4();
        let mut pause = Duration::from_millis(50);
        let (before, claims) = loop {
            let before = self.scheduler.own_time();
            match self.store.claim(&ids, &self.owner, claim, self.callback_timeout * LASTS).await {
                Ok(claims) => break (before, claims),
                Err(error) => tracing::warn!(%error, count = ids.len(), "due timers wait for PostgreSQL"),
            }
            tokio::select! {
                // They stay as they are, for somebody else.
                () = stop.cancelled() => return Vec::new(),
                () = sleep(pause) => pause = (pause * 2).min(Duration::from_secs(1)),
            }
        };
        let since = Instant::now();
        if let Some(theirs) = claims.now.or_else(|| claims.claimed.first().map(|timer| timer.claimed_at)) {
            self.scheduler.compare_clocks(before, theirs);
        }
        self.scheduler.hold(claims.early);
        let mut claimed: HashMap<Uuid, Claimed> = claims.claimed.into_iter().map(|timer| (timer.id, timer)).collect();
        // One that is not ours gives its room back.
        let held = entries.into_iter().filter_map(|(entry, slot)| {
            let timer = claimed.remove(&entry.id)?;
            Some(Held { timer, since, _slot: slot })
        });
        held.collect()
    }

    async fn call_http(&self, timers: Vec<(Held, HttpCallback)>, outcomes: &Outcomes) {
        let call = |(one, callback): (Held, HttpCallback)| async move {
            let began = one.now();
            let report = self.http.call(&one.timer, &callback, began).await;
            (one, began, report)
        };
        let mut calls: FuturesUnordered<_> = timers.into_iter().map(call).collect();
        while let Some((one, began, report)) = calls.next().await {
            called(outcomes, &one, began, report);
        }
    }

    async fn call_nats(&self, timers: Vec<(Held, NatsCallback)>, outcomes: &Outcomes) {
        if timers.is_empty() {
            return;
        }
        let calls: Vec<_> = timers.iter().map(|(one, callback)| (&one.timer, callback)).collect();
        let began: Vec<_> = timers.iter().map(|(one, _)| one.now()).collect();
        self.nats.call(&calls, |index, report| called(outcomes, &timers[index].0, began[index], report)).await;
    }
}

fn called(outcomes: &Outcomes, one: &Held, began: DateTime<Utc>, report: Report) {
    if let Some(error) = &report.error {
        tracing::info!(timer = %one.timer.id, tenant = %one.timer.tenant, error, "a callback failed");
    }
    let _ = outcomes.send(settling::after_call(&one.timer, report, began, one.now()));
}
