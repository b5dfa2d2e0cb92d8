//! The emitter: never in the way, and nothing counted twice.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::json;
use tidemark::{
    api::usage::UsageRecord,
    client::{Emitter, EmitterCounts, EmitterOptions},
};

use crate::{
    support::{Deployment, eventually, name},
    usage::{hurried, ledger, ledger_with, rows},
    usage_limits::stalled,
};

async fn emitter(deployment: &Deployment, options: EmitterOptions) -> Emitter {
    deployment.client().await.emitter(&name("default"), &name("default"), options)
}

fn call(number: u64) -> UsageRecord {
    UsageRecord::new("calls", format!("r{number}"), number)
}

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn records_are_sent_in_batches_and_flushed_at_the_end() {
    let (deployment, server, http) = ledger().await;
    let emitter =
        emitter(&deployment, EmitterOptions { linger: Duration::from_secs(3600), ..Default::default() }).await;
    (0..1200).for_each(|number| emitter.emit(call(number)));
    // Two full batches go by themselves; the rest waits for company, or for somebody who is in a hurry.
    eventually("full batches are sent", async || (emitter.counts().accepted == 1000).then_some(())).await;
    assert_eq!(emitter.counts().waiting, 200);
    let counts = emitter.stop(PATIENCE).await;
    assert_eq!(counts, EmitterCounts { emitted: 1200, accepted: 1200, ..Default::default() });
    assert_eq!(rows(&deployment.database().await).await, 1200);
    assert_eq!(http.reconciled().await, [1200, 1200, 0, 0]);
    server.stop().await;
}

#[tokio::test]
async fn while_the_service_is_away_the_oldest_are_dropped_and_counted() {
    let (deployment, server, _) = ledger().await;
    server.stop().await;
    let emitter = emitter(&deployment, EmitterOptions { queue: 30, batch: 10, ..Default::default() }).await;
    (0..100).for_each(|number| emitter.emit(call(number)));
    let counts = emitter.counts();
    assert_eq!((counts.emitted, counts.dropped, counts.waiting), (100, 70, 30));
    let server = deployment.serve().await;
    let counts = emitter.stop(PATIENCE).await;
    assert_eq!((counts.accepted, counts.dropped, counts.waiting), (30, 70, 0), "{counts:?}");
    let oldest: String = sqlx::query_scalar("select min(value)::text from usage_records")
        .fetch_one(&deployment.database().await)
        .await
        .unwrap();
    assert_eq!(oldest, "70");
    server.stop().await;
}

#[tokio::test]
async fn a_slow_service_buffers_and_says_so() {
    let (deployment, server, http) = ledger_with(hurried).await;
    let database = deployment.database().await;
    let held = stalled(&deployment).await;
    let emitter = emitter(&deployment, EmitterOptions::default()).await;
    (0..20).for_each(|number| emitter.emit(call(number)));
    emitter.flush().await;
    assert_eq!(emitter.counts(), EmitterCounts { emitted: 20, buffered: 20, ..Default::default() });
    held.rollback().await.unwrap();
    eventually("they are written after all", async || (rows(&database).await == 20).then_some(())).await;
    assert_eq!(http.reconciled().await, [20, 20, 0, 0]);
    server.stop().await;
}

#[tokio::test]
async fn a_limit_is_waited_for_as_the_service_says() {
    let (deployment, server, http) = ledger().await;
    let limits = "/api/uc/v1/admin/limits/default";
    http.put_json(limits, json!({"sustained_rate": 100, "burst_size": 20, "max_batch_size": 7})).await;
    let emitter = emitter(&deployment, EmitterOptions { batch: 20, ..Default::default() }).await;
    (0..120).for_each(|number| emitter.emit(call(number)));
    let counts = emitter.stop(PATIENCE).await;
    assert_eq!(
        counts,
        EmitterCounts { emitted: 120, accepted: 120, ..Default::default() },
        "in smaller batches, later"
    );
    assert_eq!(rows(&deployment.database().await).await, 120);
    let metrics = http.get("/metrics").await.text;
    assert!(metrics.contains("tidemark_usage_limited_total{dimension=\"sustained_rate\"}"), "it was limited");
    server.stop().await;
}

#[tokio::test]
async fn what_is_refused_is_heard_of() {
    let (deployment, server, _) = ledger().await;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = heard.clone();
    let on_rejected = move |record: &UsageRecord, reason: &tidemark::api::usage::Reason| {
        hears.lock().unwrap().push((record.usage_type.clone(), reason.code.as_str()));
    };
    let options = EmitterOptions { on_rejected: Some(Arc::new(on_rejected)), ..Default::default() };
    let emitter = emitter(&deployment, options).await;
    emitter.emit(UsageRecord::new("unheard", "r", 1));
    emitter.flush().await;
    emitter.emit(call(1));
    emitter.emit(UsageRecord::new("bytes", "r", "-1"));
    let twice = call(2);
    emitter.emit(twice.clone());
    emitter.emit(twice);
    let counts = emitter.stop(PATIENCE).await;
    assert_eq!((counts.accepted, counts.duplicates, counts.rejected), (2, 1, 2));
    let expected = [("unheard".to_owned(), "type_not_found"), ("bytes".to_owned(), "counter_violation")];
    assert_eq!(*heard.lock().unwrap(), expected);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_killed_meanwhile_counts_everything_once() {
    let (deployment, server, _) = ledger().await;
    server.stop().await;
    let emitter = emitter(&deployment, EmitterOptions { batch: 50, ..Default::default() }).await;
    let database = deployment.database().await;
    let number = AtomicU64::new(0);
    for _ in 0..3 {
        let mut process = deployment.spawn_ready(&[]).await;
        let before = rows(&database).await;
        eventually("it writes", async || {
            (0..100).for_each(|_| emitter.emit(call(number.fetch_add(1, Ordering::Relaxed) + 1)));
            (rows(&database).await > before).then_some(())
        })
        .await;
        process.kill();
    }
    let (server, number) = (deployment.serve().await, number.into_inner());
    let counts = emitter.stop(PATIENCE).await;
    assert_eq!((counts.waiting, counts.dropped, counts.rejected), (0, 0, 0), "{counts:?}");
    assert_eq!(counts.accepted + counts.duplicates + counts.buffered, number);
    eventually("each once", async || (rows(&database).await == number as i64).then_some(())).await;
    let sum: i64 =
        sqlx::query_scalar("select sum(value)::bigint from usage_records").fetch_one(&database).await.unwrap();
    assert_eq!(sum as u64, number * (number + 1) / 2);
    server.stop().await;
}
