//! Once, whatever crashes: every sum and count equals the generator's.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sqlx::PgPool;
use tidemark::embedded::Durability;
use tokio::task::JoinHandle;

use crate::{
    support::{API_KEY, Barrier, Deployment, Proxy, Servers, eventually},
    usage::{RECORDS, hurried, ledger, publish, record, rows, stream, with},
};

/// What a generator has published, and what the ledger must have of it.
#[derive(Default)]
struct Published {
    records: i64,
    sum: i64,
}

/// Publishes messages of gauges and rising counters for a tenant, until told to stop.
fn generator(nats: async_nats::Client, tenant: &str, stop: Arc<AtomicBool>) -> JoinHandle<Published> {
    let subject = format!("usage.{tenant}.default");
    tokio::spawn(async move {
        let mut published = Published::default();
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let mut message = Vec::new();
            for _ in 0..20 {
                number += 1;
                message.extend([record("calls", "r", number), record("bytes", "r", number)]);
                published.records += 2;
                published.sum += 2 * number;
            }
            publish(&nats, &subject, &[], json!(message).to_string().into()).await;
            // However slow the machine is: what waits at the end is not much.
            while stream(&nats).await.messages > 400 && !stop.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        published
    })
}

/// Waits until everything is in the ledger, and checks every account of it.
async fn settled(database: &PgPool, tenants: HashMap<String, Published>) {
    let expected: i64 = tenants.values().map(|published| published.records).sum();
    eventually("everything is in the ledger", async || {
        let there: i64 = rows(database).await;
        assert!(there <= expected, "{there} of {expected}");
        (there == expected).then_some(())
    })
    .await;
    for (tenant, published) in tenants {
        let ledger: (i64, i64) =
            sqlx::query_as("select count(*), sum(value)::bigint from usage_records where tenant_id = $1")
                .bind(&tenant)
                .fetch_one(database)
                .await
                .unwrap();
        assert_eq!(ledger, (published.records, published.sum), "{tenant}");
        let tallies: i64 = sqlx::query_scalar("select sum(records)::bigint from usage_tallies where tenant_id = $1")
            .bind(&tenant)
            .fetch_one(database)
            .await
            .unwrap();
        assert_eq!(tallies, published.records, "{tenant}");
        let minutes: (i64, i64, i64, i64) = sqlx::query_as(
            "select sum(emitted)::bigint, sum(accepted)::bigint, sum(duplicates)::bigint, sum(rejected)::bigint
             from usage_minutes where tenant_id = $1",
        )
        .bind(&tenant)
        .fetch_one(database)
        .await
        .unwrap();
        assert_eq!(minutes, (published.records, published.records, 0, 0), "{tenant}");
    }
    let heads: bool = sqlx::query_scalar(
        "select coalesce(bool_and(head.value = (select max(value) from usage_records record where record.series = head.series)), true)
         from counter_heads head",
    )
    .fetch_one(database)
    .await
    .unwrap();
    assert!(heads, "every head is its counter's last reading");
}

async fn units(deployment: &Deployment) {
    let server = deployment.serve().await;
    server.http().unit("calls", "gauge").await;
    server.http().unit("bytes", "counter").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_again_and_again_nothing_is_lost_or_doubled() {
    let deployment = Deployment::new().await;
    units(&deployment).await;
    let stop = Arc::new(AtomicBool::new(false));
    let nats = deployment.nats().await;
    let tenants = ["a", "b", "c", "d"];
    let generators: Vec<_> = tenants.iter().map(|tenant| generator(nats.clone(), tenant, stop.clone())).collect();
    let database = deployment.database().await;
    for _ in 0..6 {
        let mut process = deployment.spawn_ready(&[]).await;
        let before = rows(&database).await;
        eventually("it writes", async || (rows(&database).await > before).then_some(())).await;
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..300))).await;
        process.kill();
    }
    stop.store(true, Ordering::Relaxed);
    let published = join_all(generators).await.into_iter().map(Result::unwrap);
    let published = tenants.iter().map(|tenant| tenant.to_string()).zip(published).collect();
    let mut process = deployment.spawn_ready(&[]).await;
    settled(&database, published).await;
    process.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_every_step_of_the_transaction() {
    let deployment = Deployment::new().await;
    units(&deployment).await;
    let nats = deployment.nats().await;
    let database = deployment.database().await;
    let mut expected = 0;
    for (step, table, trigger) in [
        (
            "the position moves",
            "usage_shards",
            "create trigger barrier before update on usage_shards for each row
             when (new.position > old.position) execute function wait_here()",
        ),
        (
            "rows are inserted",
            "usage_records",
            "create trigger barrier before insert on usage_records for each row execute function wait_here()",
        ),
        (
            "heads move",
            "counter_heads",
            "create trigger barrier before insert on counter_heads for each row execute function wait_here()",
        ),
        (
            "tallies are kept",
            "usage_tallies",
            "create trigger barrier before insert on usage_tallies for each row execute function wait_here()",
        ),
        (
            "refusals are kept",
            "usage_quarantine",
            "create trigger barrier before insert on usage_quarantine for each row execute function wait_here()",
        ),
        // The commit was asked for, and succeeds when nobody is there to hear it: no verdict, no purge.
        (
            "commit",
            "usage_minutes",
            "create constraint trigger barrier after insert or update on usage_minutes deferrable initially deferred
             for each row execute function wait_here()",
        ),
    ] {
        let barrier = Barrier::at(&database, table, trigger).await;
        let mut process = deployment.spawn_ready(&[]).await;
        let message = json!([record("calls", "r", 1), record("bytes", step, 1), record("calls", "r", "bad")]);
        publish(&nats, "usage.default.default", &[], message.to_string().into()).await;
        expected += 2;
        barrier.reached().await;
        process.kill();
        barrier.lift().await;
        let mut process = deployment.spawn_ready(&[]).await;
        eventually(step, async || {
            let (there, refused): (i64, i64) =
                sqlx::query_as("select (select count(*) from usage_records), (select count(*) from usage_quarantine)")
                    .fetch_one(&database)
                    .await
                    .unwrap();
            assert!(there <= expected && refused <= expected / 2, "{step}: {there} rows, {refused} refused");
            (there == expected && refused == expected / 2).then_some(())
        })
        .await;
        // What was committed is not read again, and is purged although its writer is gone.
        eventually("the stream is empty", async || (stream(&nats).await.messages == 0).then_some(())).await;
        assert_eq!(rows(&database).await, expected, "{step}");
        process.kill();
    }
    let [emitted, accepted]: [i64; 2] = {
        let sums: (i64, i64) = sqlx::query_as("select sum(emitted)::bigint, sum(accepted)::bigint from usage_minutes")
            .fetch_one(&database)
            .await
            .unwrap();
        [sums.0, sums.1]
    };
    assert_eq!((emitted, accepted), (expected / 2 * 3, expected));
}

/// A deployment whose processes all believe that they own every shard: the function that tells them is another.
async fn believers() -> Deployment {
    let deployment = Deployment::new().await;
    let database = deployment.database().await;
    sqlx::raw_sql(
        "create schema shadow;
         create function shadow.pg_try_advisory_lock(integer, integer) returns boolean language sql as 'select true';
         do $$ begin execute format('alter database %I set search_path = shadow, pg_catalog, public', current_database()); end $$",
    )
    .execute(&database)
    .await
    .unwrap();
    database.close().await;
    deployment
}

/// Waits until two instances read every shard: four, and what the stream can't rewrite.
async fn both_read(deployment: &Deployment) {
    let nats = deployment.nats().await;
    eventually("both read every shard", async || (stream(&nats).await.consumer_count >= 10).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_sinks_that_both_believe_they_own_a_shard() {
    let deployment = believers().await;
    units(&deployment).await;
    let (one, two) = (deployment.serve().await, deployment.serve().await);
    both_read(&deployment).await;
    let stop = Arc::new(AtomicBool::new(false));
    let nats = deployment.nats().await;
    let tenants = ["a", "b", "c"];
    let generators: Vec<_> = tenants.iter().map(|tenant| generator(nats.clone(), tenant, stop.clone())).collect();
    let database = deployment.database().await;
    eventually("much is written", async || (rows(&database).await > 4000).then_some(())).await;
    stop.store(true, Ordering::Relaxed);
    let published = join_all(generators).await.into_iter().map(Result::unwrap);
    settled(&database, tenants.iter().map(|tenant| tenant.to_string()).zip(published).collect()).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_with_two_bodies_racing_over_two_writers() {
    let deployment = believers().await;
    units(&deployment).await;
    let servers = [deployment.serve_with(hurried).await, deployment.serve_with(hurried).await];
    both_read(&deployment).await;
    let callers = servers.each_ref().map(|server| server.http().key(API_KEY));
    let (won, lost) = (AtomicUsize::new(0), AtomicUsize::new(0));
    join_all((0..60).map(async |_| {
        let first = record("calls", "r", 1);
        let second = with(first.clone(), "value", 2);
        let answers = tokio::join!(callers[0].post(RECORDS, first), callers[1].post(RECORDS, second));
        for answer in [answers.0, answers.1] {
            match answer.status {
                200 => won.fetch_add(answer.json()["accepted"].as_u64().unwrap() as usize, Ordering::Relaxed),
                409 => {
                    assert_eq!(answer.json()["details"]["fields"], json!(["value"]), "{}", answer.text);
                    lost.fetch_add(1, Ordering::Relaxed)
                }
                // A verdict that the fenced one could not give.
                202 => 0,
                other => panic!("{other}: {}", answer.text),
            };
        }
    }))
    .await;
    let database = deployment.database().await;
    assert_eq!(rows(&database).await, 60);
    let refused: i64 = sqlx::query_scalar("select count(*) from usage_quarantine where code = 'duplicate_record'")
        .fetch_one(&database)
        .await
        .unwrap();
    assert_eq!(refused, 60);
    assert!(won.into_inner() <= 60 && lost.into_inner() <= 60);
    let [one, two] = servers;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_duplicates_changes_nothing() {
    let (deployment, server, http) = ledger().await;
    let batch: Vec<Value> =
        (0..500).flat_map(|number| [record("calls", "r", number), record("bytes", "r", number)]).collect();
    assert_eq!(http.verdict(json!(batch)).await, (1000, 0, vec![]));
    let nats = deployment.nats().await;
    let storm = (0..40).map(async |_| {
        publish(&nats, "usage.default.default", &[], json!(batch).to_string().into()).await;
    });
    join_all(storm).await;
    eventually("all are counted", async || (http.reconciled().await[0] == 41_000).then_some(())).await;
    assert_eq!(http.reconciled().await, [41_000, 1000, 40_000, 0]);
    assert_eq!(rows(&deployment.database().await).await, 1000);
    // Mixed with new ones, some of them twice.
    let new = record("bytes", "r", 1000);
    let mixed = json!([batch[0], new, batch[1], record("calls", "r", 1), new]);
    assert_eq!(http.verdict(mixed).await, (2, 3, vec![]));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_away_for_a_minute_under_load() {
    let mut servers = Servers::start_with("usage-outage", Durability::Synced).await;
    let deployment = servers.deployment().await;
    let server = deployment.serve_with(hurried).await;
    let http = server.http().key(API_KEY);
    http.unit("calls", "gauge").await;
    let (stop, sent, buffered) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let load: Vec<_> = (0..8)
        .map(|_| {
            let (http, stop, sent, buffered) = (http.clone(), stop.clone(), sent.clone(), buffered.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let records: Vec<Value> = (0..10).map(|_| record("calls", "r", 1)).collect();
                    let answer = http.post(RECORDS, json!(records)).await;
                    match answer.status {
                        200 => assert_eq!(answer.json()["accepted"], 10, "{}", answer.text),
                        202 => drop(buffered.fetch_add(10, Ordering::Relaxed)),
                        other => panic!("refused: {other} {}", answer.text),
                    }
                    sent.fetch_add(10, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    let went_by = async |least: usize| {
        let before = sent.load(Ordering::Relaxed);
        eventually("load goes on", async || (sent.load(Ordering::Relaxed) >= before + least).then_some(())).await;
    };
    went_by(500).await;
    servers.postgres.kill();
    // An outage is as long as it is.
    tokio::time::sleep(Duration::from_secs(60)).await;
    went_by(100).await;
    assert!(buffered.load(Ordering::Relaxed) > 500);
    servers.postgres.restart().await.unwrap();
    went_by(500).await;
    stop.store(true, Ordering::Relaxed);
    join_all(load).await.into_iter().for_each(|ended| ended.unwrap());
    let (database, sent) = (deployment.database().await, sent.load(Ordering::Relaxed) as i64);
    eventually("all that was sent is in the ledger", async || (rows(&database).await == sent).then_some(())).await;
    assert_eq!(http.reconciled().await[1..], [sent as u64, 0, 0]);
    server.stop().await;
}

#[tokio::test]
async fn a_record_that_the_database_will_not_have_blocks_nobody() {
    let (deployment, server, http) = ledger().await;
    let database = deployment.database().await;
    let overlooked = "alter table usage_records add constraint overlooked check (resource_id <> 'poison')";
    sqlx::query(overlooked).execute(&database).await.unwrap();
    let nats = deployment.nats().await;
    for resource in ["a", "poison", "b"] {
        let message = json!([record("calls", resource, 1), record("calls", "beside", 1)]);
        publish(&nats, "usage.default.default", &[], message.to_string().into()).await;
    }
    eventually("the others are written", async || (rows(&database).await == 4).then_some(())).await;
    let entries = http.get("/api/uc/v1/usage/quarantine").await.json();
    let entries = entries["records"].as_array().unwrap();
    assert_eq!(entries.len(), 2, "its whole message");
    assert!(entries.iter().all(|entry| entry["reason"]["code"] == "internal"));
    // Once the cause is mended it is replayed.
    sqlx::query("alter table usage_records drop constraint overlooked").execute(&database).await.unwrap();
    let ids: Vec<&Value> = entries.iter().map(|entry| &entry["id"]).collect();
    let replayed = http.post("/api/uc/v1/usage/quarantine/replay", json!({"ids": ids})).await;
    assert_eq!((replayed.status, &replayed.json()["accepted"]), (200, &json!(2)), "{}", replayed.text);
    assert_eq!(rows(&database).await, 6);
    server.stop().await;
}

#[tokio::test]
async fn a_stream_that_was_made_anew_is_read_from_its_start() {
    let (deployment, server, http) = ledger().await;
    for _ in 0..3 {
        assert_eq!(http.verdict(json!([record("calls", "r", 1)])).await, (1, 0, vec![]));
    }
    server.stop().await;
    let jetstream = async_nats::jetstream::new(deployment.nats().await);
    jetstream.delete_stream("tm_USAGE").await.unwrap();
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    assert_eq!(http.verdict(json!([record("calls", "r", 1)])).await, (1, 0, vec![]));
    server.stop().await;
}

#[tokio::test]
async fn a_process_that_is_stopped_hands_over_at_once() {
    let deployment = Deployment::new().await;
    units(&deployment).await;
    let (mut one, two) = (deployment.spawn_ready(&[]).await, deployment.serve().await);
    let http = two.http().key(API_KEY);
    assert_eq!(http.verdict(json!([record("calls", "r", 1)])).await, (1, 0, vec![]), "by whoever has the shard");
    one.signal(Signal::SIGTERM);
    assert_eq!(one.ended().await.0, Some(0));
    eventually("the other writes", async || {
        let answer = http.post(RECORDS, json!([record("calls", "r", 1)])).await;
        (answer.status == 200).then_some(())
    })
    .await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_on_the_wire_when_a_connection_broke_is_read_again() {
    let deployment = Deployment::new().await;
    units(&deployment).await;
    let proxy = Proxy::before(&deployment.nats_url).await;
    let server = deployment.serve_behind(&proxy).await;
    let nats = deployment.nats().await;
    let database = deployment.database().await;
    let mut published = Published::default();
    for round in 1..=10 {
        // Nothing comes after them that would show the gap.
        for _ in 0..50 {
            published.records += 1;
            published.sum += round;
            publish(&nats, "usage.a.default", &[], record("calls", "r", round).to_string().into()).await;
        }
        proxy.cut();
        eventually("the round is written", async || (rows(&database).await == published.records).then_some(())).await;
    }
    settled(&database, HashMap::from([("a".to_owned(), published)])).await;
    server.stop().await;
}

#[tokio::test]
async fn with_fewer_shards_what_waits_in_the_others_is_written_too() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.usage.shards = 8).await;
    server.http().unit("calls", "gauge").await;
    let database = deployment.database().await;
    eventually("every shard has its row", async || {
        let shards: i64 = sqlx::query_scalar("select count(*) from usage_shards").fetch_one(&database).await.unwrap();
        (shards == 9).then_some(())
    })
    .await;
    server.stop().await;
    // Acknowledged while nobody writes, over all eight.
    let nats = deployment.nats().await;
    for tenant in 0..40 {
        let subject = format!("usage.tenant-{tenant}.default");
        publish(&nats, &subject, &[], record("calls", "r", 1).to_string().into()).await;
    }
    let server = deployment.serve_with(|config| config.usage.shards = 2).await;
    eventually("all are written", async || (rows(&database).await == 40).then_some(())).await;
    // And from now on by two.
    for tenant in 0..40 {
        let subject = format!("usage.tenant-{tenant}.default");
        publish(&nats, &subject, &[], record("calls", "r", 1).to_string().into()).await;
    }
    eventually("all are written again", async || (rows(&database).await == 80).then_some(())).await;
    server.stop().await;
}

/// Speaks to the server as no library would.
async fn publish_raw(deployment: &Deployment, publish: &[u8]) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let url: url::Url = deployment.nats_url.parse().unwrap();
    let mut stream = tokio::net::TcpStream::connect((url.host_str().unwrap(), url.port().unwrap())).await.unwrap();
    let user =
        json!({"user": url.username(), "pass": url.password(), "verbose": false, "pedantic": false, "headers": true});
    let hello = format!("CONNECT {user}\r\n");
    stream.write_all(&[hello.as_bytes(), publish, b"PING\r\n"].concat()).await.unwrap();
    let mut heard = Vec::new();
    while !heard.windows(4).any(|window| window == b"PONG") {
        assert!(stream.read_buf(&mut heard).await.unwrap() > 0, "{}", String::from_utf8_lossy(&heard));
    }
}

#[tokio::test]
async fn messages_that_no_client_would_send_go_to_quarantine_and_block_nobody() {
    let (deployment, server, _) = ledger().await;
    let database = deployment.database().await;
    let body = record("calls", "r", 1).to_string();
    let length = body.len();
    let raw = |head: &[u8], block: &[u8]| [head, b"\r\n", block, body.as_bytes(), b"\r\n"].concat();
    let headers = |subject: &str, block: &[u8]| {
        raw(format!("HPUB {subject} {} {}", block.len(), block.len() + length).as_bytes(), block)
    };
    let long = "x".repeat(3000);
    let poison = [
        // A name that is a wildcard, which the stream can't rewrite.
        raw(format!("PUB usage.default.* {length}").as_bytes(), b""),
        raw(format!("PUB usage.default.> {length}").as_bytes(), b""),
        // A name that is longer than any index takes, and one with a NUL.
        raw(format!("PUB usage.default.{long} {length}").as_bytes(), b""),
        raw(format!("PUB usage.default.a\0b {length}").as_bytes(), b""),
        // Headers that are none.
        headers("usage.default.default", b"NATS/1.0\r\nno colon here\r\n\r\n"),
        headers("usage.default.default", b"NATS/1.0\r\nX: \xff\xfe\r\n\r\n"),
    ];
    for (count, poison) in (1..).zip(&poison) {
        publish_raw(&deployment, poison).await;
        eventually(&format!("it is set aside: {}", String::from_utf8_lossy(&poison[..60])), async || {
            let refused: i64 =
                sqlx::query_scalar("select count(*) from usage_quarantine").fetch_one(&database).await.unwrap();
            (refused == count).then_some(())
        })
        .await;
    }
    let nats = deployment.nats().await;
    publish(&nats, "usage.default.default", &[], body.clone().into()).await;
    eventually("the next is written", async || (rows(&database).await == 1).then_some(())).await;
    eventually("nothing is left behind", async || (stream(&nats).await.messages == 0).then_some(())).await;
    server.stop().await;
}

#[tokio::test]
async fn a_stream_that_was_put_back_to_an_older_state_is_read_again() {
    let (deployment, server, http) = ledger().await;
    assert_eq!(http.verdict(json!([record("calls", "r", 1)])).await, (1, 0, vec![]));
    server.stop().await;
    let database = deployment.database().await;
    // The ledger has come further than the stream.
    sqlx::query("update usage_shards set position = 1000").execute(&database).await.unwrap();
    let nats = deployment.nats().await;
    publish(&nats, "usage.default.default", &[], record("calls", "r", 1).to_string().into()).await;
    let server = deployment.serve().await;
    eventually("it is written", async || (rows(&database).await == 2).then_some(())).await;
    server.stop().await;
}
