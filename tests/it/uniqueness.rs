//! The promise: an id is never given twice, whoever is killed.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::json;
use tidemark::{
    api::ids::{FormattedRequest, IncrementRequest, IncrementSettings, Mode, SnowflakeIds, SnowflakeRequest},
    client::Client,
    error::Result,
};

use tokio::time::timeout;

use crate::support::{Deployment, Process, eventually, name};

/// Ids of one of the kinds, as texts that tell the kind.
async fn take(client: &Client, caller: usize) -> Result<Vec<String>> {
    let size = Some(1 + (caller % 5) as i64);
    let increment = async |key: &str| -> Result<Vec<String>> {
        let request = IncrementRequest { size, ..Default::default() };
        let ids = client.increment(&name(key), &request).await?.id;
        assert!(ids.is_sorted_by(|a, b| a < b), "an answer grows: {ids:?}");
        Ok(ids.iter().map(|id| format!("{key} {id}")).collect())
    };
    match caller % 4 {
        0 => increment("range").await,
        1 => increment("strict").await,
        2 => Ok(client.formatted(&name("formatted"), &FormattedRequest { size }).await?.id),
        _ => match client.next_snowflakes(&name("snowflake"), &SnowflakeRequest { size, strings: true }).await? {
            SnowflakeIds::Strings { id } => Ok(id),
            SnowflakeIds::Numbers { id } => panic!("asked for strings, got {id:?}"),
        },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_id_comes_twice_while_three_processes_are_killed_and_started_again() {
    const CALLERS: usize = 16;
    const ROUNDS: usize = 8;
    let deployment = Deployment::new().await;
    // Small ranges: many reservations, so that kills hit them in every state.
    let mut environment = deployment.environment();
    environment.insert("TIDEMARK__IDS__DEFAULT_BATCH_SIZE".into(), "7".into());
    environment.insert("TIDEMARK__IDS__MAX_BATCH_SIZE".into(), "50".into());
    let spawn = async || {
        let mut process = Process::spawn(&["serve", "--roles", "ids"], environment.clone());
        process.is_ready().await;
        process
    };
    let mut processes = [spawn().await, spawn().await, spawn().await];
    let client = deployment.client().await;
    client.set_increment(&name("range"), &IncrementSettings::from_base(0)).await.unwrap();
    let strict = IncrementSettings { mode: Mode::Strict, ..IncrementSettings::from_base(0) };
    client.set_increment(&name("strict"), &strict).await.unwrap();
    let parts = json!({"parts": [
        {"type": "fixed-chars", "value": "F"}, {"type": "date-format", "format": "yyyyMMdd"},
        {"type": "fixed-chars", "value": "-"}, {"type": "auto-increment", "length": 4, "reset_scope": "date"},
    ]});
    client.set_formatted(&name("formatted"), &serde_json::from_value(parts).unwrap()).await.unwrap();
    let layout = json!({"base_ts": 1_700_000_000_000_i64, "ts_size": 41, "worker_id_size": 10, "seq_size": 12});
    client.set_snowflake(&name("snowflake"), &serde_json::from_value(layout).unwrap()).await.unwrap();

    let given: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
    let totals: Arc<[AtomicUsize; 4]> = Arc::default();
    let done = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (given, totals, done, client) = (given.clone(), totals.clone(), done.clone(), client.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    // A killed process leaves callers without an answer; they ask again.
                    let answer = timeout(Duration::from_secs(1), take(&client, caller)).await;
                    let Ok(Ok(ids)) = answer else { continue };
                    let mut given = given.lock().unwrap();
                    for id in ids {
                        if let Some(earlier) = given.insert(id.clone(), caller) {
                            panic!("{id} was given to {earlier} and to {caller}");
                        }
                        totals[caller % 4].fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();

    for round in 0..ROUNDS {
        let counts = || totals.each_ref().map(|total| total.load(Ordering::Relaxed));
        let before = counts();
        eventually("ids of every kind are given", async || {
            counts().iter().zip(before).all(|(now, before)| *now > before + 100).then_some(())
        })
        .await;
        processes[round % 3].kill();
        processes[round % 3] = spawn().await;
    }
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(given.lock().unwrap().len() > ROUNDS * 400);
}
