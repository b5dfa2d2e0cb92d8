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
    meters::Meters,
    scheduler::Scheduler,
    store::{Entry, Settlement, Store},
};
use crate::{
    api::timers::{Id, Status},
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
            write(&store, &events, &meters, &scheduler, std::mem::take(&mut batch)).await;
        }
    });
    (outcomes, writing)
}

async fn write(store: &Store, events: &Events, meters: &Meters, scheduler: &Scheduler, settlements: Vec<Settlement>) {
    let mut pause = Duration::from_millis(50);
    // Nobody else knows these outcomes, so they are not given up.
    let settled = loop {
        match store.settle(&settlements).await {
            Ok(settled) => break settled,
            Err(error) => {
                tracing::warn!(%error, count = settlements.len(), "outcomes of timers could not be written yet");
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    };
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
        meters.settled(settlement.outcome);
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
    }
    scheduler.expect(next);
}
