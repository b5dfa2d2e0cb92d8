//! Backup and restore: whatever was given between the two is never given again.

use std::{collections::BTreeSet, path::PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tidemark::{clock::Clock, config::Config};
use uuid::Uuid;

use crate::{
    support::{API_KEY, Deployment, Http, Running, eventually, servers::folder, tidemark},
    usage::{RECORDS, record},
};

/// Everything that a deployment has given so far.
#[derive(Default)]
struct Given {
    numbers: BTreeSet<i64>,
    strict: BTreeSet<i64>,
    texts: BTreeSet<String>,
    noids: BTreeSet<String>,
    stages: BTreeSet<i64>,
    props: BTreeSet<i64>,
    /// Worker ids of leases, with the owner.
    workers: BTreeSet<i64>,
}

/// Takes some of everything, and sees that nothing of it was given before.
async fn take(http: &Http, given: &mut Given) {
    let ids = async |path: &str| http.get(path).await.json()["data"]["id"].as_array().unwrap().clone();
    for _ in 0..3 {
        for id in ids("/v1/id/increment?key=range&size=10").await {
            assert!(given.numbers.insert(id.as_i64().unwrap()), "{id} was given twice");
        }
        for id in ids("/v1/id/increment?key=strict&size=10").await {
            assert!(given.strict.insert(id.as_i64().unwrap()), "{id} was given twice");
        }
        for id in ids("/v1/id/formatted?key=daily&size=10").await {
            assert!(given.texts.insert(id.as_str().unwrap().to_owned()), "{id} was given twice");
        }
        for id in http.post("/pools/books/mint?n=10", json!({})).await.json().as_array().unwrap() {
            assert!(given.noids.insert(id.as_str().unwrap().to_owned()), "{id} was minted twice");
        }
        let stage = http.clone().header("X-Request-ID", &Uuid::new_v4().to_string()).post("/stages", json!({})).await;
        assert_eq!(stage.status, 201, "{}", stage.text);
        let stage = stage.json()["stage_id"].as_i64().unwrap();
        assert!(given.stages.insert(stage), "stage {stage} was allocated twice");
        let prop = http.post("/stages/1/props", json!({ "path": format!("/Game/{}", Uuid::new_v4()) })).await;
        let prop = prop.json()["prop_id"].as_i64().unwrap();
        assert!(given.props.insert(prop), "prop {prop} was given twice");
        let lease = http.get(&format!("/v1/id/snowflake?key=events&owner={}", Uuid::new_v4())).await;
        let worker = lease.json()["data"]["worker_id"].as_i64().unwrap();
        assert!(given.workers.insert(worker), "worker {worker} was lent to two at once");
    }
}

async fn serve(deployment: &Deployment, clock: &Clock) -> (Running, Http) {
    let unlimited = |config: &mut Config| config.stages.rate_limit.requests = 1000;
    let server = deployment.serve_by_with(clock, unlimited).await;
    let http = Http::new(&server.url).key(API_KEY);
    (server, http)
}

async fn prepare(http: &Http) {
    let admin = http.clone().admin();
    let unit = json!({
        "name": "calls", "metric_kind": "gauge", "base_unit": "call", "schema": { "type": "object" },
        "allowed_sources": ["default"],
    });
    let parts = json!([{ "type": "date-format", "format": "yyyyMMdd-" }, { "type": "auto-increment", "length": 6, "reset_scope": "date" }]);
    for (path, body) in [
        ("/v1/config/increment", json!({ "key": "range", "base": 0 })),
        ("/v1/config/increment", json!({ "key": "strict", "base": 0, "mode": "strict" })),
        ("/v1/config/formatted", json!({ "key": "daily", "parts": parts })),
        (
            "/v1/config/snowflake",
            json!({ "key": "events", "base_ts": 1_700_000_000_000_i64, "ts_size": 41, "worker_id_size": 10, "seq_size": 12 }),
        ),
        ("/pools?name=books&template=.sddd", json!({})),
        ("/api/uc/v1/admin/units", unit),
    ] {
        let answer = admin.post(path, body).await;
        assert!(answer.status < 300, "{path}: {}", answer.text);
    }
}

async fn set_timer(http: &Http, within: &str) -> String {
    let callback = json!({ "type": "nats", "topic": "backup.timers" });
    let timer = http.post("/timers", json!({ "execute_in": within, "callback": callback })).await;
    assert_eq!(timer.status, 201, "{}", timer.text);
    timer.json()["data"]["id"].as_str().unwrap().to_owned()
}

/// A backup in which a timer waits that fires soon afterwards: set further ahead until the backup was quicker than it.
async fn backup_with_a_timer_that_is_due_soon(deployment: &Deployment, http: &Http) -> (PathBuf, String) {
    for seconds in [6, 12, 25] {
        let soon = set_timer(http, &format!("{seconds}s")).await;
        let folder = folder().join(format!("backup-{seconds}"));
        let (code, out, err) = tidemark(&["backup", folder.to_str().unwrap()], deployment.environment()).await;
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(out.contains("KV_tm_counters:") && out.contains("PostgreSQL:"), "{out}");
        if timer(http, &soon).await["status"] == "pending" {
            return (folder, soon);
        }
    }
    panic!("a backup of almost nothing takes over 25 s");
}

async fn timer(http: &Http, id: &str) -> Value {
    http.get(&format!("/timers/{id}")).await.json()["data"].clone()
}

#[tokio::test]
async fn nothing_is_given_again_after_a_restore() {
    let old = Deployment::new().await;
    let (server, http) = serve(&old, &Clock::system()).await;
    prepare(&http).await;
    let mut given = Given::default();
    take(&http, &mut given).await;
    // A record that is broken harms nobody else, here neither.
    assert_eq!(http.post("/pools?name=torn&template=.sd", json!({})).await.status, 201);
    let counters = async_nats::jetstream::new(old.nats().await).get_key_value("tm_counters").await.unwrap();
    counters.put("noid.torn", "half a rec".into()).await.unwrap();
    let later = set_timer(&http, "2h").await;
    report(&http, "before").await;
    eventually("it is in the ledger before the backup", async || {
        (resources_of(&http).await == ["before"]).then_some(())
    })
    .await;

    let (folder, soon) = backup_with_a_timer_that_is_due_soon(&old, &http).await;
    let folder = folder.to_str().unwrap();
    let (code, _, err) = tidemark(&["backup", folder], old.environment()).await;
    assert!(code == Some(1) && err.contains("is not empty"), "{err}");

    // What the backup knows nothing of: ids, a timer that fires, usage.
    take(&http, &mut given).await;
    eventually("the timer has fired", async || (timer(&http, &soon).await["status"] == "completed").then_some(()))
        .await;
    report(&http, "after").await;

    // Not over a deployment that runs, nor over one that has something.
    let restore = async |deployment: &Deployment, more: &[&str]| {
        let arguments = [&["restore", folder, "--margin", "100"], more].concat();
        tidemark(&arguments, deployment.environment()).await
    };
    let (code, _, err) = restore(&old, &["--replace"]).await;
    assert!(code == Some(1) && err.contains("is running"), "{err}");
    server.stop().await;
    let (code, _, err) = restore(&old, &[]).await;
    assert!(code == Some(1) && err.contains("something already") && err.contains("KV_tm_counters"), "{err}");

    let new = Deployment::empty().await;
    let (code, out, err) = restore(&new, &[]).await;
    assert_eq!(code, Some(0), "{out}{err}");
    for said in [
        "3 keys and 1 pools have passed over 100 ids",
        "the pool torn is broken, as it was in the backup",
        "1 timers that may have fired since are paused",
        "the next stage is 104",
    ] {
        assert!(out.contains(said), "{said}: {out}");
    }
    // Whoever publishes before anybody serves is not overlooked: no position of before counts.
    let positions = "select count(*) from usage_shards where stream_created <> 'restored'";
    let known: i64 = sqlx::query_scalar(positions).fetch_one(&new.database().await).await.unwrap();
    assert_eq!(known, 0);
    let early = json!([record("calls", "early", 1)]).to_string();
    let nats = new.nats().await;
    let stored = async_nats::jetstream::new(nats.clone()).publish("usage.default.default", early.into()).await;
    stored.unwrap().await.unwrap();
    let (server, http) = serve(&new, &Clock::system()).await;
    take(&http, &mut given).await;
    // Workers are held for as long as the longest lease, and lent from further up.
    assert!(given.workers.iter().rev().take(3).all(|worker| *worker >= 64), "{:?}", given.workers);
    // A stage that was passed over is none.
    assert_eq!(http.get("/stages/50").await.status, 404);
    assert_eq!(http.get("/stages/1").await.status, 200);
    // The timer that has fired waits for a decision; the other one still comes.
    assert_eq!(timer(&http, &soon).await["status"], "paused");
    assert_eq!(timer(&http, &later).await["status"], "pending");
    let resumed = http.post(&format!("/timers/{soon}/resume"), json!({})).await;
    assert_eq!(resumed.status, 200, "{}", resumed.text);
    eventually("it fires when it is resumed", async || {
        (timer(&http, &soon).await["status"] == "completed").then_some(())
    })
    .await;
    // The ledger has what it had, and takes what is sent again.
    eventually("both are in the ledger after the restore", async || {
        (resources_of(&http).await == ["before", "early"]).then_some(())
    })
    .await;
    report(&http, "again").await;
    server.stop().await;

    // Over what is there, if that is meant; and again nothing is repeated.
    let arguments = ["restore", folder, "--margin", "1000", "--workers", "200", "--replace", "--longest-lease", "1h"];
    let (code, out, err) = tidemark(&arguments, new.environment()).await;
    assert_eq!(code, Some(0), "{out}{err}");
    let (server, http) = serve(&new, &Clock::system()).await;
    assert_eq!(resources_of(&http).await, ["before"]);
    assert!(out.contains("have passed over 1100 ids"), "what the first restore gave is passed over too: {out}");
    let closed = http.post("/pools/books/mint?n=1", json!({})).await;
    assert_eq!(closed.json(), json!([]), "a pool that may be used up is closed");
    server.stop().await;
}

/// Accepted, or stored in the stream if the machine is busy.
async fn report(http: &Http, resource: &str) {
    let answer = http.post(RECORDS, json!([record("calls", resource, 1)])).await;
    assert!(matches!(answer.status, 200 | 202), "{}", answer.text);
}

async fn resources_of(http: &Http) -> Vec<String> {
    let answer = http.get(RECORDS).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["resource_id"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn a_restore_that_was_broken_off_lets_nobody_start() {
    let old = Deployment::new().await;
    let (server, http) = serve(&old, &Clock::system()).await;
    prepare(&http).await;
    let folder = folder().join("broken-off");
    let (code, _, err) = tidemark(&["backup", folder.to_str().unwrap()], old.environment()).await;
    assert_eq!(code, Some(0), "{err}");
    server.stop().await;
    // A file that is cut short, damaged or gone is noticed before anything is touched.
    let replaced = ["restore", folder.to_str().unwrap(), "--margin", "100", "--replace"];
    let (stages, dump) = (folder.join("tm_STAGES.snapshot"), folder.join("postgres.dump"));
    let whole = std::fs::read(&stages).unwrap();
    let broken: Vec<u8> = whole.iter().map(|byte| !byte).collect();
    let saved = std::fs::read(&dump).unwrap();
    let mut damaged = saved.clone();
    *damaged.last_mut().unwrap() ^= 1;
    for (path, right, wrong) in
        [(&stages, &whole, &whole[..whole.len() / 2]), (&stages, &whole, &broken), (&dump, &saved, &damaged)]
    {
        std::fs::write(path, wrong).unwrap();
        let (code, _, err) = tidemark(&replaced, old.environment()).await;
        assert!(code == Some(1) && err.contains(&format!("{}: is not as it was saved", path.display())), "{err}");
        std::fs::write(path, right).unwrap();
    }
    std::fs::remove_file(&stages).unwrap();
    let (code, _, err) = tidemark(&replaced, old.environment()).await;
    assert!(code == Some(1) && err.contains("tm_STAGES.snapshot: No such file"), "{err}");
    old.serve().await.stop().await;
    // One that the server won't have all the same: everything before it is there, what comes after is not.
    std::fs::write(&stages, &broken).unwrap();
    let manifest = folder.join("manifest.json");
    let described = std::fs::read_to_string(&manifest).unwrap();
    let mut forged: Value = serde_json::from_str(&described).unwrap();
    let hash: String = Sha256::digest(&broken).iter().map(|byte| format!("{byte:02x}")).collect();
    forged["files"]["tm_STAGES.snapshot"] = json!(hash);
    std::fs::write(&manifest, forged.to_string()).unwrap();
    let new = Deployment::empty().await;
    let restore = ["restore", folder.to_str().unwrap(), "--margin", "100"];
    let (code, _, err) = tidemark(&restore, new.environment()).await;
    assert!(code == Some(1) && err.contains("tm_STAGES"), "{err}");
    let mut process = new.spawn(&[]);
    let (code, printed) = process.ended().await;
    assert!(code == Some(1) && printed.contains("its restore was broken off"), "{printed}");
    std::fs::write(&stages, whole).unwrap();
    std::fs::write(&manifest, described).unwrap();
    let (code, out, err) = tidemark(&[&restore[..], &["--replace"]].concat(), new.environment()).await;
    assert_eq!(code, Some(0), "{out}{err}");
    let server = new.serve().await;
    server.stop().await;
}

#[tokio::test]
async fn bad_use_of_backups_is_named() {
    let deployment = Deployment::empty().await;
    let folder = folder().join("no-backup");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.to_str().unwrap();
    for (arguments, code, mentions) in [
        (vec!["restore", path], 2, "--margin"),
        (vec!["restore", path, "--margin", "-1"], 2, "--margin"),
        (vec!["restore", path, "--margin", "1"], 1, "manifest.json"),
        (vec!["restore", "/nowhere", "--margin", "1"], 1, "/nowhere/manifest.json"),
        (vec!["backup"], 2, "FOLDER"),
    ] {
        let (ended, out, err) = tidemark(&arguments, deployment.environment()).await;
        assert!(ended == Some(code) && err.contains(mentions), "{arguments:?}: {out}{err}");
    }
    std::fs::write(folder.join("manifest.json"), "{}").unwrap();
    let (code, _, err) = tidemark(&["restore", path, "--margin", "1"], deployment.environment()).await;
    assert!(code == Some(1) && err.contains("is no manifest of a backup"), "{err}");
}
