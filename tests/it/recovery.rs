//! Servers that go away and come back to a process that recovers by itself.

use std::{collections::HashSet, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use serde_json::json;
use uuid::Uuid;

use crate::{
    support::{API_KEY, Servers, eventually},
    usage::{RECORDS, record},
};

#[tokio::test]
async fn a_process_waits_for_its_servers_and_outlives_them() {
    let mut servers = Servers::start("recovery").await;
    let deployment = servers.deployment().await;

    // Neither is there at the start.
    servers.nats.stop();
    servers.postgres.stop();
    let mut process = deployment.spawn(&[]);
    let http = process.http().await;
    let caller = http.clone().key(API_KEY);
    assert_eq!(http.get("/health").await.status, 200);
    let ready = http.get("/ready").await;
    assert_eq!(ready.status, 503);
    assert!(ready.json()["checks"]["nats"] != "ok" && ready.json()["checks"]["postgres"] != "ok", "{}", ready.text);
    let early = caller.get("/v1/id/increment?key=k").await;
    assert_eq!((early.status, early.json()["code"].as_i64()), (503, Some(4002)), "{}", early.text);
    let healthz = http.get("/healthz").await;
    assert_eq!((healthz.status, healthz.json()["code"].as_i64()), (500, Some(1)));
    servers.nats.restart().await.unwrap();
    process.prints("waiting for PostgreSQL").await;
    servers.postgres.restart().await.unwrap();
    process.is_ready().await;
    http.make_key("k", 0).await;

    let is_ready = async || (http.get("/ready").await.status == 200).then_some(());
    let mut given = HashSet::new();
    let mut mint = async || {
        let answer = caller.get("/v1/id/increment?key=k&size=1000").await;
        let ids = answer.json()["data"]["id"].as_array().cloned().unwrap_or_default();
        let fresh = ids.iter().all(|id| given.insert(id.as_i64().unwrap()));
        assert!(fresh, "an id was given twice");
        answer.status
    };
    assert_eq!(mint().await, 200);

    // PostgreSQL crashes: it is said, and ids need none of it.
    servers.postgres.kill();
    eventually("the loss of PostgreSQL is noticed", async || {
        let ready = http.get("/ready").await;
        let checks = ready.json()["checks"].clone();
        (ready.status == 503 && checks["postgres"] != "ok" && checks["nats"] == "ok").then_some(())
    })
    .await;
    assert_eq!(mint().await, 200);
    servers.postgres.restart().await.unwrap();
    eventually("ready after PostgreSQL is back", is_ready).await;

    // NATS crashes: unavailable until it is back, and no id comes twice.
    servers.nats.kill();
    eventually("the loss is noticed", async || {
        (http.get("/ready").await.json()["checks"]["nats"] != "ok").then_some(())
    })
    .await;
    let mut status = 200;
    while status == 200 {
        // What is in memory is still given.
        status = mint().await;
    }
    assert_eq!(status, 503);
    let metrics = http.get("/metrics").await.text;
    let errors = r#"idbuilder_storage_errors_total{backend="jetstream",operation="write"}"#;
    assert!(metrics.contains(errors) && metrics.contains("tidemark_nats_connections_lost_total"), "{metrics}");
    servers.nats.restart().await.unwrap();
    eventually("ready after NATS is back", is_ready).await;
    for _ in 0..5 {
        assert_eq!(mint().await, 200);
    }
    eventually("the registry is followed again", async || {
        let made = http.clone().admin().post("/v1/config/increment", json!({"key": "later", "base": 0})).await;
        (made.status == 200).then_some(())
    })
    .await;
    // What the server had in memory is made again: limits of requests.
    eventually("stages are allocated again", async || {
        let allocated =
            http.clone().header("X-Request-ID", &Uuid::new_v4().to_string()).post("/stages", json!({})).await;
        (allocated.status == 201).then_some(())
    })
    .await;
    eventually("usage is taken again", async || {
        let taken = caller.post(RECORDS, json!([record("nothing", "r", 1)])).await;
        (taken.json()["code"] == "type_not_found").then_some(())
    })
    .await;
    let client = deployment.client().await;
    let request = tidemark::api::ids::IncrementRequest::default();
    client.increment(&"k".parse().unwrap(), &request).await.expect("the endpoints are back too");

    // A server that hangs rather than refuses.
    let stopped = Pid::from_raw(servers.nats.id() as i32);
    kill(stopped, Signal::SIGSTOP).unwrap();
    eventually("every thread of it stands still", async || {
        let threads = std::fs::read_dir(format!("/proc/{stopped}/task")).unwrap();
        let state = |thread: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
            stat.rsplit(") ").next().unwrap().starts_with('T')
        };
        threads.into_iter().all(state).then_some(())
    })
    .await;
    let answer = tokio::time::timeout(Duration::from_secs(4), http.get("/ready")).await;
    kill(stopped, Signal::SIGCONT).unwrap();
    assert_eq!(answer.expect("an answer within four seconds").status, 503);
    eventually("ready after the hang", is_ready).await;

    // Shards to which nothing was sent are read all the same, so everything is known to be judged.
    let now = chrono::Utc::now();
    eventually("the watermark goes on", async || {
        let page = caller.fed("").await;
        let watermark = page["watermark"].as_str()?.parse::<chrono::DateTime<chrono::Utc>>().unwrap();
        (watermark > now).then_some(())
    })
    .await;
}
