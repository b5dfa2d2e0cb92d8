//! The promise: an id is never given twice, whoever is killed.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tidemark::api::ids::IncrementRequest;

use crate::support::{Deployment, eventually, name};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_number_comes_twice_while_three_processes_are_killed_and_started_again() {
    const CALLERS: usize = 16;
    const ROUNDS: usize = 8;
    let deployment = Deployment::new().await;
    // Small ranges: many reservations, so that kills hit them in every state.
    let mut environment = deployment.environment();
    environment.insert("TIDEMARK__IDS__DEFAULT_BATCH_SIZE".into(), "7".into());
    environment.insert("TIDEMARK__IDS__MAX_BATCH_SIZE".into(), "50".into());
    let spawn = async || {
        let mut process = crate::support::Process::spawn(&["serve", "--roles", "ids"], environment.clone());
        process.is_ready().await;
        process
    };
    let mut processes = [spawn().await, spawn().await, spawn().await];
    let client = deployment.client().await;
    let settings = tidemark::api::ids::IncrementSettings::from_base(0);
    client.set_increment(&name("k"), &settings).await.unwrap();

    let given: Arc<Mutex<HashMap<i64, usize>>> = Arc::default();
    let total = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (given, total, done) = (given.clone(), total.clone(), done.clone());
            let (client, key) = (client.clone(), name("k"));
            tokio::spawn(async move {
                let mut last = None;
                while !done.load(Ordering::Relaxed) {
                    let request = IncrementRequest { size: Some(1 + (caller % 5) as i64), ..Default::default() };
                    // A killed process leaves callers without an answer; they ask again.
                    let Ok(ids) = client.increment(&key, &request).await else { continue };
                    assert!(ids.id.is_sorted_by(|a, b| a < b), "an answer grows: {ids:?}");
                    let mut given = given.lock().unwrap();
                    for id in ids.id {
                        if let Some(earlier) = given.insert(id, caller) {
                            panic!("{id} was given to {earlier} and to {caller}, whose last was {last:?}");
                        }
                        last = Some(id);
                        total.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();

    for round in 0..ROUNDS {
        let before = total.load(Ordering::Relaxed);
        eventually("ids are given", async || (total.load(Ordering::Relaxed) > before + 500).then_some(())).await;
        processes[round % 3].kill();
        processes[round % 3] = spawn().await;
    }
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(given.lock().unwrap().len() > ROUNDS * 500);
}
