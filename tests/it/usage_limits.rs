//! How fast records may come, and what happens when more come than can be written.

use std::time::{Duration, Instant};

use futures::{StreamExt, future::join_all};
use serde_json::{Value, json};

use crate::{
    support::{API_KEY, Deployment, Http, eventually},
    usage::{RECORDS, ledger, ledger_with, publish, record, rows, stream, with},
};

const LIMITS: &str = "/api/uc/v1/admin/limits";

fn records(count: usize) -> Value {
    json!((0..count).map(|_| record("calls", "r", 1)).collect::<Vec<_>>())
}

#[tokio::test]
async fn limits_are_read_and_set_field_by_field() {
    let (deployment, server, http) = ledger().await;
    let shown = http.get(&format!("{LIMITS}/default")).await.json();
    assert_eq!(
        (&shown["sustained_rate"], &shown["burst_size"], &shown["updated_at"]),
        (&json!(5000), &json!(25000), &Value::Null)
    );
    let set = http.put_json(&format!("{LIMITS}/default/default"), json!({"burst_size": 7})).await;
    assert_eq!(set.status, 200, "{}", set.text);
    let shown = http.get(&format!("{LIMITS}/default/default")).await.json();
    assert_eq!((&shown["sustained_rate"], &shown["burst_size"]), (&json!(2000), &json!(7)), "the rest is inherited");
    assert_eq!(shown["overrides"], json!({"burst_size": 7}));
    assert!(shown["updated_at"].is_string());
    let reply = deployment.nats().await.request("tm.usage.source-limits.default.default", "".into()).await.unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&reply.payload).unwrap(), shown);
    for (field, value) in [("sustained_rate", 0), ("max_batch_size", 1001), ("max_record_bytes", 20_000)] {
        let refused = http.put_json(&format!("{LIMITS}/default"), json!({ field: value })).await;
        assert!(refused.status == 400 && refused.text.contains(field), "{}", refused.text);
    }
    let refused = http.put_json(&format!("{LIMITS}/default/default"), json!({"grace_period": "1h"})).await;
    assert!(refused.status == 400 && refused.text.contains("grace_period"), "{}", refused.text);
    // An administrator of a tenant reaches his own; of others he does not even learn that they exist.
    let admin = http.with_new_key(json!({"tenant": "acme", "source": "api", "roles": ["admin"]})).await;
    assert_eq!(admin.get(&format!("{LIMITS}/acme")).await.status, 200);
    assert_eq!(admin.put_json(&format!("{LIMITS}/acme/api"), json!({"burst_size": 9})).await.status, 200);
    assert_eq!(admin.get(&format!("{LIMITS}/default")).await.status, 404);
    assert_eq!(admin.put_json(&format!("{LIMITS}/default"), json!({})).await.status, 404);
    let plain = http.with_new_key(json!({"tenant": "acme", "source": "api", "roles": ["usage"]})).await;
    assert_eq!(plain.get(&format!("{LIMITS}/acme")).await.status, 403);
    server.stop().await;
}

#[tokio::test]
async fn four_dimensions_at_two_levels() {
    let (_deployment, server, http) = ledger().await;
    let second = http.with_new_key(json!({"tenant": "default", "source": "second", "roles": ["usage"]})).await;
    http.put_json("/api/uc/v1/admin/units/calls", json!({"allowed_sources": ["default", "second"]})).await;
    // So slow that nothing comes back while the test runs.
    http.put_json(&format!("{LIMITS}/default/default"), json!({"sustained_rate": 1, "burst_size": 10})).await;
    http.put_json(&format!("{LIMITS}/default"), json!({"sustained_rate": 1, "burst_size": 15})).await;
    let answer = http.post(RECORDS, records(6)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let header = |name: &str| answer.headers[name].to_str().unwrap().to_owned();
    assert_eq!([header("x-ratelimit-limit"), header("x-ratelimit-remaining")], ["10", "4"]);
    let reset: i64 = answer.headers["x-ratelimit-reset"].to_str().unwrap().parse().unwrap();
    assert!((1..=8).contains(&(reset - chrono::Utc::now().timestamp())), "{reset}");
    let refused = http.post(RECORDS, records(8)).await;
    assert_eq!((refused.status, refused.json()["code"].as_str()), (429, Some("rate_limited")));
    let wait: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((2..=4).contains(&wait), "{wait}");
    assert_eq!(refused.json()["details"]["dimension"], "sustained_rate");
    assert!(refused.text.contains("source default of tenant default"), "{}", refused.text);
    assert!(refused.headers.contains_key("x-ratelimit-remaining"));
    // What the source was refused the tenant has not lost: nine are left of its fifteen.
    assert_eq!(second.post(RECORDS, records(9)).await.status, 200);
    let refused = second.post(RECORDS, records(5)).await;
    assert!(refused.status == 429 && refused.text.contains("tenant default:"), "{}", refused.text);
    // What is refused with its request is accounted for.
    eventually("refusals are counted", async || {
        let [emitted, accepted, _, rejected] = http.reconciled().await;
        ((emitted, accepted, rejected) == (28, 15, 13)).then_some(())
    })
    .await;
    // Records and bytes of one request, bytes of a second.
    let acme = http.with_new_key(json!({"tenant": "acme", "source": "default", "roles": ["usage"]})).await;
    http.put_json(&format!("{LIMITS}/acme"), json!({"max_batch_size": 3, "max_record_bytes": 300})).await;
    let refused = acme.post(RECORDS, records(4)).await;
    assert!(
        refused.status == 400 && refused.text.contains("records: has 4, more than this source's 3"),
        "{}",
        refused.text
    );
    let large = with(record("calls", "r", 1), "metadata", json!({"x": "y".repeat(300)}));
    assert_eq!(acme.verdict(json!([large, record("calls", "r", 1)])).await, (1, 0, vec!["validation_error".into()]));
    http.put_json(
        &format!("{LIMITS}/acme"),
        json!({"max_bytes_per_sec": 1000, "sustained_rate": 100, "burst_size": 100}),
    )
    .await;
    eventually("bytes are limited", async || {
        let refused = acme.post(RECORDS, records(4)).await;
        (refused.status == 429 && refused.json()["details"]["dimension"] == "max_bytes_per_sec").then_some(())
    })
    .await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_holds_for_all_instances_together_and_changes_everywhere() {
    let deployment = Deployment::new().await;
    let servers = [deployment.serve().await, deployment.serve().await];
    let callers = servers.each_ref().map(|server| server.http().key(API_KEY));
    callers[0].unit("calls", "gauge").await;
    let (rate, burst) = (40, 20);
    callers[0].put_json(&format!("{LIMITS}/default"), json!({"sustained_rate": rate, "burst_size": burst})).await;
    eventually("the other instance knows", async || {
        let shown = callers[1].get(&format!("{LIMITS}/default")).await.json();
        (shown["sustained_rate"] == rate).then_some(())
    })
    .await;
    let began = Instant::now();
    let flood = callers.iter().cycle().take(8).map(async |http: &Http| {
        let mut passed = 0;
        while began.elapsed() < Duration::from_secs(4) {
            if http.post(RECORDS, records(2)).await.status == 200 {
                passed += 2;
            }
        }
        passed
    });
    let passed: i32 = join_all(flood).await.into_iter().sum();
    let allowed = f64::from(burst) + f64::from(rate) * began.elapsed().as_secs_f64();
    assert!(f64::from(passed) <= allowed * 1.1, "{passed} of {allowed}");
    assert!(
        f64::from(passed) >= allowed * 0.6,
        "{passed} of {allowed}: a busy machine asks less, but not so much less"
    );
    let [one, two] = servers;
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn warnings_come_at_three_quarters_and_nine_tenths() {
    let (deployment, server, http) = ledger().await;
    http.put_json(&format!("{LIMITS}/default"), json!({"sustained_rate": 1, "burst_size": 100})).await;
    let mut heard = deployment.client().await.follow("usage.default.limit").await.unwrap();
    for count in [70, 10, 5, 10] {
        assert_eq!(http.post(RECORDS, records(count)).await.status, 200);
    }
    for percent in [75, 90] {
        let fact = tokio::time::timeout(Duration::from_secs(10), heard.next()).await.unwrap().unwrap();
        let fact: Value = serde_json::from_slice(&fact.payload).unwrap();
        assert_eq!(
            (&fact["percent"], &fact["tenant_id"], &fact["source_id"]),
            (&json!(percent), &json!("default"), &Value::Null)
        );
    }
    let metrics = http.get("/metrics").await.text;
    assert!(metrics.contains("tidemark_usage_limit_warnings_total"), "{metrics}");
    server.stop().await;
}

/// A transaction that holds every shard's row, so that no sink can write.
pub async fn stalled(deployment: &Deployment) -> sqlx::Transaction<'static, sqlx::Postgres> {
    let database = deployment.database().await;
    eventually("every shard has its writer", async || {
        let mut held = database.begin().await.unwrap();
        let shards = sqlx::query("select * from usage_shards for update").fetch_all(&mut *held).await.unwrap();
        // Four, and what the stream can't rewrite.
        (shards.len() == 5).then_some(held)
    })
    .await
}

#[tokio::test]
async fn the_least_important_is_shed_first() {
    const BUDGET: i64 = 1 << 20;
    let (deployment, server, http) = ledger_with(|config| config.usage.backlog_bytes = BUDGET).await;
    for priority in ["low", "medium", "high", "critical"] {
        http.unit_with(priority, "gauge", json!({"priority": priority})).await;
    }
    let held = stalled(&deployment).await;
    let hurried = http.clone().header("prefer", "respond-async");
    let nats = deployment.nats().await;
    let fill_to = async |share: f64| {
        loop {
            let missing = BUDGET as f64 * share - stream(&nats).await.bytes as f64;
            if missing <= 0.0 {
                return;
            }
            let filler =
                with(record("calls", "r", 1), "metadata", json!({"x": "y".repeat((missing as usize).clamp(50, 7000))}));
            publish(&nats, "usage.default.filler", &[], filler.to_string().into()).await;
        }
    };
    for (share, shed) in [(0.5, 0), (0.72, 1), (0.87, 2), (0.96, 3)] {
        fill_to(share).await;
        eventually(&format!("{shed} are shed at {share}"), async || {
            let mut statuses = Vec::new();
            for priority in ["low", "medium", "high", "critical"] {
                let answer = hurried.post(RECORDS, json!([record(priority, "r", 1)])).await;
                if answer.status == 429 {
                    assert!(
                        answer.headers.contains_key("retry-after") && answer.text.contains("backlog"),
                        "{}",
                        answer.text
                    );
                }
                statuses.push(answer.status);
            }
            let expected: Vec<u16> = (0..4).map(|index| if index < shed { 429 } else { 202 }).collect();
            (statuses == expected).then_some(())
        })
        .await;
    }
    // One important record carries its request.
    let mixed = hurried.post(RECORDS, json!([record("low", "r", 1), record("critical", "r", 1)])).await;
    assert_eq!(mixed.status, 202, "{}", mixed.text);
    let health = http.get(crate::usage::METADATA).await.json()["storage_health"].clone();
    assert!(health["status"] == "behind" && health["oldest_unpersisted_seconds"].as_f64().unwrap() > 0.0, "{health}");
    let metrics = http.get("/metrics").await.text;
    for name in ["backlog_messages", "backlog_bytes", "oldest_unpersisted_seconds", "drain_seconds", "shed_total"] {
        assert!(metrics.contains(&format!("tidemark_usage_{name}")), "{name}");
    }
    drop(held);
    eventually("all pass again", async || {
        (http.post(RECORDS, json!([record("low", "r", 1)])).await.status == 200).then_some(())
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn a_source_that_floods_is_refused_and_others_are_not() {
    let (deployment, server, http) = ledger_with(|config| config.usage.backlog_per_source = 5).await;
    let held = stalled(&deployment).await;
    let jetstream = async_nats::jetstream::new(deployment.nats().await);
    let send = async |subject: &str| {
        let message = record("calls", "r", 1).to_string();
        jetstream.publish(subject.to_owned(), message.into()).await.unwrap().await.map(drop)
    };
    for _ in 0..5 {
        send("usage.default.default").await.unwrap();
    }
    let refused = send("usage.default.default").await.unwrap_err();
    assert!(refused.to_string().contains("per subject"), "the server says so: {refused}");
    send("usage.default.other").await.unwrap();
    let by_request = http.post(RECORDS, json!([record("calls", "r", 1)])).await;
    assert!(by_request.status == 429 && by_request.text.contains("backlog"), "{}", by_request.text);
    drop(held);
    let database = deployment.database().await;
    eventually("what was acknowledged is written", async || (rows(&database).await == 5).then_some(())).await;
    eventually("the source may go on", async || send("usage.default.default").await.ok()).await;
    server.stop().await;
}

#[tokio::test]
async fn a_source_over_its_own_limit_costs_the_tenant_nothing() {
    let (_deployment, server, http) = ledger().await;
    let second = http.with_new_key(json!({"tenant": "default", "source": "second", "roles": ["usage"]})).await;
    http.put_json("/api/uc/v1/admin/units/calls", json!({"allowed_sources": ["default", "second"]})).await;
    http.put_json(&format!("{LIMITS}/default/default"), json!({"sustained_rate": 1, "burst_size": 10})).await;
    http.put_json(&format!("{LIMITS}/default"), json!({"sustained_rate": 1, "burst_size": 100})).await;
    assert_eq!(http.post(RECORDS, records(10)).await.status, 200);
    for _ in 0..30 {
        assert_eq!(http.post(RECORDS, records(10)).await.status, 429);
    }
    assert_eq!(second.post(RECORDS, records(90)).await.status, 200, "the tenant's other sources are not the poorer");
    server.stop().await;
}
