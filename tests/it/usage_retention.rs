//! How long usage is kept, and what goes when.

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use tidemark::clock::Clock;
use uuid::{NoContext, Timestamp, Uuid};

use crate::{
    support::{ADMIN_TOKEN, API_KEY, Deployment, Http},
    usage::{METADATA, record, rows, with},
    usage_backfill::tallies_match,
};

pub const RETENTION: &str = "/api/uc/v1/admin/retention";

pub fn ago(days: i64) -> DateTime<Utc> {
    Utc::now() - TimeDelta::days(days)
}

/// A record of so many days ago, under a key of that time.
pub fn old(usage_type: &str, resource: &str, days: i64) -> Value {
    let at = ago(days);
    let key = Uuid::new_v7(Timestamp::from_unix(NoContext, at.timestamp() as u64, rand::random_range(0..1_000_000)));
    let old = with(record(usage_type, resource, 1), "event_timestamp", json!(at));
    with(old, "idempotency_key", key.to_string())
}

impl Http {
    /// Writes records of another day.
    pub async fn write_old(&self, usage_type: &str, events: Vec<Value>) {
        let days: Vec<DateTime<Utc>> =
            events.iter().map(|one| one["event_timestamp"].as_str().unwrap().parse().unwrap()).collect();
        let from = *days.iter().min().unwrap();
        let request = json!({
            "usage_type": usage_type, "replacement_events": events, "mode": "non_blocking", "reason": "old ones",
            "time_range": { "from": from, "to": *days.iter().max().unwrap() + TimeDelta::seconds(1) },
        });
        let done = self.post("/api/uc/v1/usage/backfill", request).await;
        assert_eq!(done.status, 201, "{}", done.text);
    }

    pub async fn keep_for(&self, what: &str, days: i64) -> Value {
        let answer = self.put_json(&format!("{RETENTION}/{what}"), json!({ "retention_days": days })).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    }

    pub async fn apply_retention(&self) -> Value {
        let answer = self.post(&format!("{RETENTION}/run"), json!({})).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    }
}

async fn serve() -> (Deployment, Clock, Http, Http) {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(Utc::now());
    let http = deployment.serve_by(&clock).await.http().key(API_KEY);
    http.unit("calls", "gauge").await;
    http.unit("bytes", "counter").await;
    let admin = http.clone().admin();
    (deployment, clock, http, admin)
}

#[tokio::test]
async fn what_is_set_for_a_type_goes_over_what_is_set_for_its_tenant() {
    let (deployment, _clock, http, admin) = serve().await;
    http.unit_with("traces", "gauge", json!({ "retention_days": 20 })).await;
    let key = json!({ "tenant": "globex", "source": "default", "roles": ["usage", "admin"] });
    let other = http.with_new_key(key).await;
    let own_key = |one: Value| with(one, "idempotency_key", Uuid::new_v4().to_string());
    // Some in dated partitions, some under keys that have no date.
    http.write_old("calls", vec![old("calls", "a", 40), own_key(old("calls", "b", 40)), old("calls", "c", 10)]).await;
    http.write_old("bytes", vec![old("bytes", "a", 40), old("bytes", "b", 10)]).await;
    http.write_old("traces", vec![old("traces", "a", 40), old("traces", "b", 25), old("traces", "c", 10)]).await;
    other.write_old("calls", vec![old("calls", "a", 40)]).await;

    let kept = async |what: &str| {
        let answer = admin.get(&format!("{RETENTION}/{what}")).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        (answer.json()["retention_days"].as_i64().unwrap(), answer.json()["set"].as_i64())
    };
    assert_eq!(kept("default/calls").await, (2555, None));
    assert_eq!(admin.keep_for("default/*", 30).await["set"], 30);
    admin.keep_for("default/bytes", 60).await;
    for (what, expected) in [
        ("default/calls", (30, None)),
        ("default/bytes", (60, Some(60))),
        ("default/*", (30, Some(30))),
        ("default/traces", (20, None)),
        ("globex/calls", (2555, None)),
        ("*/*", (2555, None)),
    ] {
        assert_eq!(kept(what).await, expected, "{what}");
    }
    // It is told before it goes.
    let report = admin.get(RETENTION).await.json();
    let told: Vec<(Value, Value, Value)> = report["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["tenant_id"].clone(), one["usage_type"].clone(), one["records"].clone()))
        .collect();
    let expected = [("calls", 2), ("traces", 2)].map(|(name, count)| (json!("default"), json!(name), json!(count)));
    assert_eq!((told, &report["done"]), (expected.to_vec(), &json!(false)));
    assert_eq!(rows(&deployment.database().await).await, 9);

    let done = admin.apply_retention().await;
    assert_eq!((&done["done"], done["records"].as_array().unwrap().len()), (&json!(true), 2), "{done}");
    let mut left: Vec<(Value, Value)> = http
        .all("page_size=1000")
        .await
        .iter()
        .map(|one| (one["usage_type"].clone(), one["resource_id"].clone()))
        .collect();
    left.sort_by_key(|(a, b)| (a.to_string(), b.to_string()));
    let expected = [("bytes", "a"), ("bytes", "b"), ("calls", "c"), ("traces", "c")];
    assert_eq!(left, expected.map(|(a, b)| (json!(a), json!(b))));
    assert_eq!(other.all("").await.len(), 1, "the other tenant's is kept");
    let metadata = http.get(METADATA).await.json();
    assert_eq!(metadata["total_records"], 4);
    tallies_match(&deployment.database().await).await;
    // The feed passes over what is gone.
    let page = http.fed("limit=100").await;
    assert_eq!(page["records"].as_array().unwrap().len(), 4);
    let end = page["next_position"].as_str().unwrap();
    assert_eq!(http.fed(&format!("position={end}")).await["records"], json!([]));
    // Nobody who would wait for news waits where only what is gone comes next.
    let walk = async {
        let (mut position, mut seen) = ("0-0".to_owned(), 0);
        while position != end {
            let page = http.fed(&format!("position={position}&limit=1&wait=25")).await;
            seen += page["records"].as_array().unwrap().len();
            position = page["next_position"].as_str().unwrap().to_owned();
        }
        seen
    };
    assert_eq!(tokio::time::timeout(std::time::Duration::from_secs(20), walk).await, Ok(4));
    assert_eq!(admin.apply_retention().await["records"], json!([]), "nothing more");
    // A counter goes on where it was.
    for days in [6, 2556, -1] {
        let answer = admin.put_json(&format!("{RETENTION}/default/calls"), json!({ "retention_days": days })).await;
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("retention_out_of_bounds")), "{days}");
    }
    let unknown = admin.put_json(&format!("{RETENTION}/default/nonsense"), json!({ "retention_days": 9 })).await;
    assert_eq!((unknown.status, &unknown.json()["code"]), (404, &json!("type_not_found")));
    let strange = admin.put_json(&format!("{RETENTION}/a%20b/calls"), json!({ "retention_days": 9 })).await;
    assert_eq!((strange.status, &strange.json()["code"]), (400, &json!("validation_error")), "{}", strange.text);
    let missing = admin.put_json(&format!("{RETENTION}/default/calls"), json!({})).await;
    assert_eq!(missing.status, 400, "{}", missing.text);
    // It is the operator's.
    for answer in [other.get(RETENTION).await, other.get(&format!("{RETENTION}/globex/calls")).await] {
        assert_eq!(answer.status, 403, "{}", answer.text);
    }
    assert!(!ADMIN_TOKEN.is_empty());
}

#[tokio::test]
async fn whole_partitions_go_in_an_instant_and_leave_no_hole() {
    let (deployment, clock, http, admin) = serve().await;
    let database = deployment.database().await;
    let many: Vec<Value> = (0..50).map(|n| old("calls", "a", 45 + n % 2)).collect();
    http.write_old("calls", many).await;
    http.write_old("bytes", vec![old("bytes", "x", 60), old("bytes", "x", 45)]).await;
    http.write_old("calls", vec![old("calls", "young", 3)]).await;
    admin.keep_for("*/*", 30).await;
    let partitions = async || -> (i64, i64) {
        sqlx::query_as(
            "select count(*) filter (where not dropped), count(*) filter (where dropped) from usage_partitions",
        )
        .fetch_one(&database)
        .await
        .unwrap()
    };
    // They were accepted just now: whole partitions wait, their rows need not.
    let before = partitions().await;
    let report = admin.get(RETENTION).await.json();
    let empty = |one: &Value| one["latest_event"].is_null();
    assert!(report["partitions"].as_array().unwrap().iter().all(empty), "{report}");
    // As if it were later.
    clock.set(Utc::now() + TimeDelta::days(31));
    admin.keep_for("*/calls", 40).await;
    let report = admin.get(RETENTION).await.json();
    clock.set(Utc::now() + TimeDelta::days(42));
    let live = async {
        for n in 0..20 {
            assert_eq!(http.verdict(record("calls", "live", n)).await, (1, 0, vec![]));
        }
    };
    let (done, ()) = tokio::join!(admin.apply_retention(), live);
    let dropped: i64 = done["partitions"].as_array().unwrap().iter().map(|one| one["records"].as_i64().unwrap()).sum();
    assert!(dropped >= 50, "{done}\n{report}");
    let after = partitions().await;
    // One empty table takes the place of neighbours; a partition that was in use may stand between.
    assert!(after.1 >= 1 && after.0 + after.1 < before.0, "{before:?} {after:?}");
    tallies_match(&database).await;
    // What comes late for a week that is gone has a place all the same.
    http.write_old("calls", vec![old("calls", "late", 45), old("calls", "later", 60)]).await;
    let placed: i64 = sqlx::query_scalar(
        "select count(*) from usage_records where tableoid::regclass::text like '%usage_records_gone%'",
    )
    .fetch_one(&database)
    .await
    .unwrap();
    assert_eq!(placed, 2);
    tallies_match(&database).await;
    // And is not lost when more weeks go.
    clock.set(Utc::now() + TimeDelta::days(60));
    admin.keep_for("*/*", 2555).await;
    admin.keep_for("*/calls", 55).await;
    admin.apply_retention().await;
    assert!(partitions().await.1 <= after.1);
    tallies_match(&database).await;
}
