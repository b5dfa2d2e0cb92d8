//! Worker ids: leased, fenced, used again; minted with here and in the client.

use std::{collections::HashSet, time::Duration};

use chrono::Utc;
use serde_json::{Value, json};
use tidemark::{
    api::ids::{LeaseRequest, ReleaseRequest, RenewRequest, SnowflakeIds, SnowflakeRequest},
    clock::Clock,
    config::Config,
    error::Code,
};

use crate::support::{API_KEY, Deployment, Http, eventually, name, time};

const BASE: i64 = 1_700_000_000_000;

/// A key with a few worker ids.
async fn make(http: &Http, key: &str, worker_bits: u8) {
    let sizes = json!({
        "key": key, "base_ts": BASE, "ts_size": 41, "worker_id_size": worker_bits, "seq_size": 22 - worker_bits,
    });
    http.configure("snowflake", sizes).await;
}

async fn lease(http: &Http, owner: &str) -> Value {
    http.data(&format!("/v1/id/snowflake?key=s&owner={owner}")).await
}

#[tokio::test]
async fn leases_are_given_renewed_lost_and_used_again() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-11-16T12:00:00Z"));
    let server = deployment.serve_by(&clock).await;
    let http = server.http().key(API_KEY);
    make(&server.http(), "s", 1).await;

    let a = lease(&http, "a").await;
    assert_eq!((&a["worker_id"], &a["expires_at"]), (&json!(0), &json!("2026-11-16T13:00:00Z")));
    assert_eq!(lease(&http, "a").await["epoch"], a["epoch"], "an owner that asks again has the same lease");
    clock.set(time("2026-11-16T12:10:00Z"));
    let b = lease(&http, "b").await;
    assert_eq!(b["worker_id"], json!(1), "one that nobody had comes first");
    let full = http.get("/v1/id/snowflake?key=s&owner=c").await;
    assert_eq!((full.status, &full.json()["code"]), (503, &json!(4003)), "{}", full.text);
    assert_eq!(server.http().admin().data("/v1/config/snowflake?key=s").await["active_workers"], 2);

    // a renews, b does not.
    clock.set(time("2026-11-16T12:30:00Z"));
    let renewed = http.post("/v1/id/snowflake/renew", json!({"key": "s", "owner": "a", "epoch": a["epoch"]})).await;
    assert_eq!(renewed.json()["data"]["expires_at"], "2026-11-16T13:30:00Z", "{}", renewed.text);
    clock.set(time("2026-11-16T13:10:00Z"));
    let c = lease(&http, "c").await;
    assert_eq!(c["worker_id"], b["worker_id"], "the one that ended goes to the next");
    assert_ne!(c["epoch"], b["epoch"]);
    assert_eq!(c["not_before"], b["expires_at"], "and begins where it ended");
    let lost = http.post("/v1/id/snowflake/renew", json!({"key": "s", "owner": "b", "epoch": b["epoch"]})).await;
    assert_eq!((lost.status, &lost.json()["code"]), (409, &json!(1001)), "{}", lost.text);

    // Given back with its last timestamp, it is free from the moment after.
    let last = time("2026-11-16T13:09:00Z").timestamp_millis();
    let release = json!({"key": "s", "owner": "a", "epoch": a["epoch"], "last_timestamp": last});
    assert_eq!(http.post("/v1/id/snowflake/release", release.clone()).await.json()["data"], json!({"released": true}));
    assert_eq!(http.post("/v1/id/snowflake/release", release).await.status, 409, "it is not a's any more");
    let d = lease(&http, "d").await;
    assert_eq!((&d["worker_id"], &d["not_before"]), (&json!(0), &json!("2026-11-16T13:09:00.001Z")));

    // The layout holds from the first lease on; the name may change.
    let change = |ts_size: u8, seq_size: u8| json!({"key": "s", "name": "S", "base_ts": BASE, "ts_size": ts_size, "worker_id_size": 1, "seq_size": seq_size});
    let refused = server.http().admin().post("/v1/config/snowflake", change(40, 22)).await;
    assert!(refused.status == 400 && refused.text.contains("layout"), "{}", refused.text);
    assert_eq!(server.http().configure("snowflake", change(41, 21)).await["name"], "S");
    server.stop().await;
}

#[tokio::test]
async fn callers_without_a_name_take_a_new_lease_each_time() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-11-16T12:00:00Z"));
    let server = deployment.serve_by(&clock).await;
    let http = server.http().key(API_KEY);
    make(&server.http(), "s", 4).await;
    let (first, second) = (http.data("/v1/id/snowflake?key=s").await, http.data("/v1/id/snowflake?key=s").await);
    assert_eq!((&first["worker_id"], &second["worker_id"]), (&json!(0), &json!(1)));
    assert_eq!(first["expires_at"], "2026-12-16T12:00:00Z", "thirty days");
    assert_ne!(first["owner"], second["owner"]);
    let once = http.clone().header("idempotency-key", "restart-1");
    let kept = once.data("/v1/id/snowflake?key=s").await;
    let again = once.data("/v1/id/snowflake?key=s").await;
    assert_eq!((&again["worker_id"], &again["epoch"]), (&kept["worker_id"], &kept["epoch"]));
    let release = json!({"key": "s", "owner": kept["owner"], "epoch": kept["epoch"]});
    assert_eq!(http.post("/v1/id/snowflake/release", release).await.status, 200);
    let after = once.data("/v1/id/snowflake?key=s").await;
    assert_ne!(after["epoch"], kept["epoch"], "a lease that was given back does not come again");
    for (query, mentions) in [("owner=", "owner"), (&*format!("owner={}", "o".repeat(65)), "owner")] {
        let refused = http.get(&format!("/v1/id/snowflake?key=s&{query}")).await;
        assert!(refused.status == 400 && refused.text.contains(mentions), "{}", refused.text);
    }
    server.stop().await;
}

#[tokio::test]
async fn the_service_mints_for_those_who_cant_hold_a_lease() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    make(&server.http(), "s", 10).await;
    let client = deployment.client().await;
    let request = SnowflakeRequest { size: Some(1000), strings: false };
    let key = name("s");
    let answers = futures::future::join_all((0..20).map(|_| client.next_snowflakes(&key, &request))).await;
    let mut seen = HashSet::new();
    for answer in answers {
        let SnowflakeIds::Numbers { id } = answer.unwrap() else { panic!("numbers were asked for") };
        assert!(id.is_sorted_by(|a, b| a < b));
        id.into_iter().for_each(|id| assert!(seen.insert(id), "{id} came twice"));
    }
    assert_eq!(seen.len(), 20_000);
    let http = server.http().key(API_KEY);
    let strings = http.data("/v1/id/snowflake/next?key=s&strings=true").await;
    assert!(strings["id"][0].as_str().unwrap().parse::<u64>().is_ok(), "{strings}");
    let once = http.header("idempotency-key", "x");
    assert_eq!(once.data("/v1/id/snowflake/next?key=s").await, once.data("/v1/id/snowflake/next?key=s").await);
    tokio::join!(server.stop(), other.stop());

    // A clean stop gives the worker ids back.
    let server = deployment.serve().await;
    assert_eq!(server.http().admin().data("/v1/config/snowflake?key=s").await["active_workers"], 0);
    server.stop().await;
}

#[tokio::test]
async fn an_instance_whose_lease_ended_takes_another_and_repeats_nothing() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-11-16T12:00:00Z"));
    let server = deployment.serve_by(&clock).await;
    make(&server.http(), "s", 1).await;
    let http = server.http().key(API_KEY);
    let next = async || http.data("/v1/id/snowflake/next?key=s").await["id"][0].as_u64().unwrap();
    let first = next().await;
    clock.set(time("2026-11-16T15:00:00Z"));
    let second = next().await;
    assert!(second > first);
    assert_eq!(server.http().admin().data("/v1/config/snowflake?key=s").await["active_workers"], 1);
    server.stop().await;
}

#[tokio::test]
async fn the_client_mints_by_itself_and_gives_its_lease_back() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    make(&server.http(), "s", 1).await;
    let client = deployment.client().await;
    let key = name("s");
    let (one, two) = (client.snowflakes(&key).await.unwrap(), client.snowflakes(&key).await.unwrap());
    assert_eq!(client.snowflakes(&key).await.err().unwrap().code, Code::Exhausted);
    let mut seen = HashSet::new();
    for _ in 0..5000 {
        assert!(seen.insert(one.next().await.unwrap()) && seen.insert(two.next_blocking().unwrap()));
    }
    for id in one.take(100).await.unwrap() {
        assert!(seen.insert(id));
        assert_eq!(one.layout().parse(id).1, one.lease().worker_id);
    }
    let worker = one.lease().worker_id;
    one.stop().await.unwrap();
    let three = client.snowflakes(&key).await.unwrap();
    assert_eq!(three.lease().worker_id, worker, "free again at once");
    for _ in 0..1000 {
        assert!(seen.insert(three.next().await.unwrap()));
    }
    server.stop().await;
}

#[tokio::test]
async fn the_client_renews_in_the_background_and_stops_when_it_has_lost_its_lease() {
    let deployment = Deployment::new().await;
    let brief = |config: &mut Config| config.ids.lease_ttl = Duration::from_secs(3);
    let server = deployment.serve_with(brief).await;
    make(&server.http(), "s", 0).await;
    let client = deployment.client().await;
    let key = name("s");
    let snowflakes = client.snowflakes(&key).await.unwrap();
    let first_end = snowflakes.lease().expires_at;
    eventually("it mints beyond the lease that it began with", async || {
        let id = snowflakes.next().await.ok()?;
        let minted = BASE + snowflakes.layout().parse(id).0 as i64;
        (minted > first_end.timestamp_millis() + 500).then_some(())
    })
    .await;

    // Nobody can renew while the service is away. When it is back, and nobody else has the lease, it goes on.
    server.stop().await;
    eventually("it stops at the end of its lease", async || snowflakes.next().await.err()).await;
    let server = deployment.serve_with(brief).await;
    eventually("it goes on", async || snowflakes.next().await.ok()).await;

    // Somebody takes it away: it stops when it hears of it, long before the end.
    let lease = snowflakes.lease();
    let renew = RenewRequest { owner: lease.owner.clone(), epoch: lease.epoch };
    let ends = client.renew_snowflake(&key, &renew).await.unwrap().expires_at;
    let release = ReleaseRequest { owner: lease.owner.clone(), epoch: lease.epoch, last_timestamp: None };
    client.release_snowflake(&key, &release).await.unwrap();
    let refused = eventually("nothing is minted with it any more", async || snowflakes.next().await.err()).await;
    assert!(Utc::now() < ends, "only its end stopped it");
    let taken = eventually("the next one gets the worker id", async || {
        client.lease_snowflake(&key, &LeaseRequest { owner: Some("next".into()) }).await.ok()
    })
    .await;
    assert!(refused.code == Code::Unavailable && refused.message.contains("lease"), "{refused}");
    assert!(taken.epoch > lease.epoch && taken.worker_id == lease.worker_id);
    server.stop().await;
}
