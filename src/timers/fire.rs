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
    scheduler::Scheduler,
    settling,
    store::{Claimed, Entry, Settlement, Store},
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
    /// Where it took room, which may not be where it goes by now.
    destination: Arc<str>,
    since: Instant,
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
        entries: Vec<Entry>,
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
                self.settle(&outcomes, &one, settling::skipped(&one.timer));
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

    /// Claims what may be fired, waiting for PostgreSQL if it is away. The rest is released.
    async fn claim(&self, entries: Vec<Entry>, stop: &CancellationToken) -> Vec<Held> {
        let ids: Vec<Uuid> = entries.iter().map(|entry| entry.id).collect();
        let claim = Uuid::new_v4();
        let mut pause = Duration::from_millis(50);
        let claims = loop {
            match self.store.claim(&ids, &self.owner, claim, self.callback_timeout * LASTS).await {
                Ok(claims) => break claims,
                Err(error) => tracing::warn!(%error, count = ids.len(), "due timers wait for PostgreSQL"),
            }
            tokio::select! {
                // They stay as they are, for somebody else.
                () = stop.cancelled() => return Vec::new(),
                () = sleep(pause) => pause = (pause * 2).min(Duration::from_secs(1)),
            }
        };
        let since = Instant::now();
        let mut destinations: HashMap<Uuid, Arc<str>> =
            entries.into_iter().map(|entry| (entry.id, entry.destination)).collect();
        let held: Vec<Held> = claims
            .claimed
            .into_iter()
            .filter_map(|timer| {
                let destination = destinations.remove(&timer.id)?;
                Some(Held { timer, destination, since })
            })
            .collect();
        for destination in destinations.into_values() {
            self.scheduler.release(&destination, 1);
        }
        if let Some(now) = claims.now {
            self.scheduler.compare_clocks(now);
        }
        self.scheduler.hold(claims.early);
        held
    }

    async fn call_http(&self, timers: Vec<(Held, HttpCallback)>, outcomes: &Outcomes) {
        let call = |(one, callback): (Held, HttpCallback)| async move {
            let began = one.now();
            let report = self.http.call(&one.timer, &callback, began).await;
            (one, began, report)
        };
        let mut calls: FuturesUnordered<_> = timers.into_iter().map(call).collect();
        while let Some((one, began, report)) = calls.next().await {
            self.called(outcomes, &one, began, report);
        }
    }

    async fn call_nats(&self, timers: Vec<(Held, NatsCallback)>, outcomes: &Outcomes) {
        if timers.is_empty() {
            return;
        }
        let calls: Vec<_> = timers.iter().map(|(one, callback)| (&one.timer, callback)).collect();
        let began: Vec<_> = timers.iter().map(|(one, _)| one.now()).collect();
        let reports = self.nats.call(&calls).await;
        for (((one, _), began), report) in timers.iter().zip(began).zip(reports) {
            self.called(outcomes, one, began, report);
        }
    }

    fn called(&self, outcomes: &Outcomes, one: &Held, began: DateTime<Utc>, report: Report) {
        if let Some(error) = &report.error {
            tracing::info!(timer = %one.timer.id, tenant = %one.timer.tenant, error, "a callback failed");
        }
        self.settle(outcomes, one, settling::after_call(&one.timer, report, began, one.now()));
    }

    fn settle(&self, outcomes: &Outcomes, one: &Held, settlement: Settlement) {
        self.scheduler.release(&one.destination, 1);
        let _ = outcomes.send(settlement);
    }
}
