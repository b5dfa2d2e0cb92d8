//! Writes down what became of callbacks, in batches, and tells it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{sleep, timeout},
};
use uuid::Uuid;

use super::{
    meters::{self, Meters},
    scheduler::Scheduler,
    settling::UNKNOWN,
    store::{Entry, Settled, Settlement, Store},
};
use crate::{
    api::timers::{Id, Status},
    database::is_about_data,
    events::Events,
};

/// Nobody waits for an outcome, so that it may wait for company.
const GATHERED: Duration = Duration::from_millis(10);
const MOST: usize = 2000;

/// Takes settlements. When all of them are dropped, the rest is written and the task ends.
pub type Outcomes = mpsc::UnboundedSender<Settlement>;

/// What is told of a run that is over.
#[derive(Serialize)]
struct Told<'a> {
    id: Id,
    status: Status,
    run: i32,
    attempts: i32,
    execute_at: DateTime<Utc>,
    executed_at: DateTime<Utc>,
    late_by_ms: i64,
    error: Option<&'a str>,
}

pub fn start(
    store: Store,
    events: Events,
    meters: Arc<Meters>,
    scheduler: Arc<Scheduler>,
) -> (Outcomes, JoinHandle<()>) {
    let (outcomes, mut waiting) = mpsc::unbounded_channel();
    let writing = tokio::spawn(async move {
        let mut batch = Vec::new();
        while waiting.recv_many(&mut batch, MOST).await > 0 {
            let more = async { while batch.len() < MOST && waiting.recv_many(&mut batch, MOST).await > 0 {} };
            let _ = timeout(GATHERED, more).await;
            one_each(&mut batch);
            write(&store, &events, &meters, &scheduler, std::mem::take(&mut batch)).await;
        }
    });
    (outcomes, writing)
}

/// Writes until it is written: nobody else knows these outcomes. One of which PostgreSQL can't keep the words is written
/// without them.
async fn settle(store: &Store, settlements: &[Settlement]) -> Vec<Settled> {
    let mut pause = Duration::from_millis(50);
    loop {
        match store.settle(settlements).await {
            Ok(settled) => return settled,
            Err(error) if !is_about_data(&error) => {
                tracing::warn!(%error, count = settlements.len(), "outcomes of timers could not be written yet");
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
            Err(error) => match settlements {
                [one] if one.error.is_none() && one.response.is_none() => {
                    tracing::error!(%error, timer = %one.id, "the outcome of a timer can't be written");
                    return Vec::new();
                }
                [one] => {
                    tracing::error!(%error, timer = %one.id, "what is known of an outcome can't be written");
                    let bare = Settlement { error: None, response: None, ..one.clone() };
                    return Box::pin(settle(store, &[bare])).await;
                }
                many => {
                    let (first, second) = many.split_at(many.len() / 2);
                    let mut settled = Box::pin(settle(store, first)).await;
                    settled.extend(Box::pin(settle(store, second)).await);
                    return settled;
                }
            },
        }
    }
}

/// One for each claim. What the sweep took for abandoned, once or several times, gives way to what became of it.
fn one_each(settlements: &mut Vec<Settlement>) {
    settlements.sort_unstable_by_key(|one| (one.id, one.claim, one.error.as_deref() == Some(UNKNOWN)));
    settlements.dedup_by_key(|one| (one.id, one.claim));
}

async fn write(store: &Store, events: &Events, meters: &Meters, scheduler: &Scheduler, settlements: Vec<Settlement>) {
    let settled = settle(store, &settlements).await;
    let settled: HashMap<(Uuid, Uuid), Status> = settled.iter().map(|one| ((one.id, one.claim), one.status)).collect();
    let mut next = Vec::new();
    for settlement in &settlements {
        // What somebody else settled has been told by him.
        let Some(status) = settled.get(&(settlement.id, settlement.claim)).copied() else { continue };
        let goes_on = settlement.next_run == settlement.run && settlement.status == Status::Pending;
        if status == Status::Pending {
            let destination = settlement.destination.clone();
            next.push(Entry { due_at: settlement.due_at, id: settlement.id, destination });
        }
        if goes_on && status == Status::Pending {
            meters.retried();
            continue;
        }
        meters::settled(settlement.outcome);
        let told = Told {
            id: Id(settlement.id),
            status: settlement.outcome,
            run: settlement.run,
            attempts: settlement.attempt,
            execute_at: settlement.run_at,
            executed_at: settlement.ended_at,
            late_by_ms: settlement.late_by_ms,
            error: settlement.error.as_deref(),
        };
        events.send(format!("timer.{}.{}", settlement.tenant, settlement.outcome), &told).await;
        if status == Status::Canceled {
            let told = Told { status, ..told };
            events.send(format!("timer.{}.{status}", settlement.tenant), &told).await;
        }
    }
    scheduler.expect(next);
}
