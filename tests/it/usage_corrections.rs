//! Amending and withdrawing records.

use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tidemark::api::usage::{Amendment, RecordId};

use crate::{
    support::{Answer, Http},
    usage::{METADATA, RECORDS, ago, ledger, record, rows, with},
};

impl Http {
    pub async fn amend(&self, id: &str, change: Value) -> Answer {
        self.send(Method::PATCH, &format!("{RECORDS}/{id}"), Some(change.to_string().into_bytes())).await
    }

    pub async fn deprecate(&self, id: &str, change: Value) -> Answer {
        self.post(&format!("{RECORDS}/{id}/deprecate"), change).await
    }

    /// Sends a record and returns its id.
    pub async fn keep(&self, record: Value) -> String {
        assert_eq!(self.verdict(record.clone()).await, (1, 0, vec![]));
        let key = record["idempotency_key"].as_str().unwrap();
        let found = self.all("page_size=1000&include_archived=true").await;
        let found = found.iter().find(|one| one["idempotency_key"] == key).unwrap_or_else(|| panic!("no {key}"));
        found["id"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn an_amended_record_has_a_history() {
    let (deployment, _server, http) = ledger().await;
    let original = with(with(record("calls", "r", 1), "user_id", "ann"), "metadata", json!({ "a": 1 }));
    let id = http.keep(original.clone()).await;
    let amended = http.amend(&id, json!({ "value": "2.50", "reason": "misread", "revision": 1 })).await;
    assert_eq!(amended.status, 200, "{}", amended.text);
    let amended = amended.json();
    assert_eq!(
        (&amended["value"], &amended["revision"], &amended["status"]),
        (&json!("2.5"), &json!(2), &json!("active"))
    );
    assert_eq!((&amended["user_id"], &amended["metadata"]), (&json!("ann"), &json!({ "a": 1 })));
    // What is given as null is taken away.
    let again =
        http.amend(&id, json!({ "metadata": null, "user_id": "bob", "resource_type": "vm", "reason": "x" })).await;
    assert_eq!(again.status, 200, "{}", again.text);
    let again = again.json();
    assert_eq!((&again["value"], &again["metadata"], &again["user_id"]), (&json!("2.5"), &Value::Null, &json!("bob")));

    let shown = http.all("").await;
    assert_eq!((shown.len(), &shown[0]), (1, &again));
    let revisions: Vec<Value> =
        http.all("include_deprecated=true").await.iter().map(|one| one["revision"].clone()).collect();
    assert_eq!(revisions, [1, 2, 3]);
    let history = http.get(&format!("{RECORDS}/{id}/history")).await.json();
    let versions: Vec<(Value, Value)> = history["versions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["value"].clone(), one["status"].clone()))
        .collect();
    let expected = [("1", "deprecated"), ("2.5", "deprecated"), ("2.5", "active")].map(|(a, b)| (json!(a), json!(b)));
    assert_eq!(versions, expected);
    let changes = history["changes"].as_array().unwrap();
    assert_eq!(
        (changes.len(), &changes[0]["reason"], &changes[0]["action"]),
        (2, &json!("misread"), &json!("amended"))
    );
    assert!(changes[0]["actor"].as_str().unwrap().contains("default"), "{history}");

    // The original sent again is a duplicate; another body is a conflict.
    assert_eq!(http.verdict(original.clone()).await, (0, 1, vec![]));
    assert_eq!(http.post(RECORDS, with(original, "value", "2.50")).await.status, 409);
    // The tallies count every row.
    assert_eq!(http.get(METADATA).await.json()["total_records"], 3);
    assert_eq!(rows(&deployment.database().await).await, 3);

    let stale = http.amend(&id, json!({ "value": 9, "reason": "late", "revision": 2 })).await;
    assert_eq!((stale.status, &stale.json()["details"]["revision"]), (409, &json!(3)), "{}", stale.text);
    let stale = http.deprecate(&id, json!({ "reason": "late", "revision": 1 })).await;
    assert_eq!(stale.status, 409, "{}", stale.text);
    let gone = http.deprecate(&id, json!({ "reason": "never happened", "revision": 3 })).await;
    assert_eq!((gone.status, &gone.json()["status"]), (200, &json!("deprecated")), "{}", gone.text);
    assert!(http.all("").await.is_empty());
    assert_eq!(http.all("include_deprecated=true").await.len(), 3);
    for answer in [
        http.deprecate(&id, json!({ "reason": "again" })).await,
        http.amend(&id, json!({ "value": 1, "reason": "again" })).await,
    ] {
        assert_eq!((answer.status, &answer.json()["details"]["status"]), (409, &json!("deprecated")));
    }
    // The same over NATS.
    let id = http.keep(record("calls", "n", 5)).await.parse().unwrap();
    let (client, tenant) = (deployment.client().await, "default".parse().unwrap());
    let amendment = Amendment { id, value: Some(json!(6)), reason: "by NATS".into(), ..Amendment::default() };
    assert_eq!(client.amend_record(&tenant, &amendment).await.unwrap().value, "6");
    let history = client.record_history(&tenant, &RecordId { id }).await.unwrap();
    assert_eq!((history.versions.len(), history.changes[0].reason.as_str()), (2, "by NATS"));
}

#[tokio::test]
async fn bad_corrections_change_nothing() {
    let (_deployment, _server, http) = ledger().await;
    http.unit_with("strict", "gauge", json!({ "schema": {
        "type": "object", "properties": { "metadata": { "type": "object", "required": ["region"] } }, "required": ["metadata"],
    } }))
    .await;
    let id = http.keep(record("calls", "r", 1)).await;
    for (change, problem) in [
        (json!({ "value": 2 }), "reason"),
        (json!({ "value": 2, "reason": " " }), "reason: must have"),
        (json!({ "value": 2, "reason": "x".repeat(1001) }), "reason: must have"),
        (json!({ "value": 2, "reason": "a\0" }), "reason: must not contain NUL"),
        (json!({ "reason": "x" }), "nothing is to be changed"),
        (json!({ "value": "many", "reason": "x" }), "value: must be a number"),
        (json!({ "value": null, "reason": "x" }), "nothing is to be changed"),
        (json!({ "value": 0.12345678901234567, "reason": "x" }), "value: has too many digits"),
        (json!({ "value": 1e20, "reason": "x" }), "value: has too many digits"),
        (json!({ "metadata": [1], "reason": "x" }), "metadata: must be an object"),
        (json!({ "metadata": { "a": "x".repeat(9000) }, "reason": "x" }), "metadata: has"),
        (json!({ "user_id": "", "reason": "x" }), "user_id: must have"),
        (json!({ "value": 2, "reason": "x", "tenant_id": "other" }), "tenant_id"),
        (json!({ "value": 2, "reason": "x", "event_timestamp": "2026-01-01T00:00:00Z" }), "event_timestamp"),
        (json!({ "value": 2, "reason": "x", "revision": "one" }), "revision"),
    ] {
        let answer = http.amend(&id, change.clone()).await;
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("validation_error")), "{change}");
        assert!(answer.json()["message"].as_str().unwrap().contains(problem), "{change}: {}", answer.text);
    }
    assert_eq!(http.deprecate(&id, json!({})).await.status, 400);
    assert_eq!(http.page("").await["records"][0]["revision"], 1);

    let strict = http.keep(with(record("strict", "r", 1), "metadata", json!({ "region": "eu" }))).await;
    let refused = http.amend(&strict, json!({ "metadata": {}, "reason": "x" })).await;
    assert_eq!((refused.status, &refused.json()["code"]), (400, &json!("validation_error")), "{}", refused.text);
    assert_eq!(http.amend(&strict, json!({ "metadata": { "region": "us" }, "reason": "x" })).await.status, 200);
    // A sender with a user speaks for that user only.
    let bound = json!({ "tenant": "default", "source": "default", "roles": ["usage"], "user": "ann" });
    let bound = http.with_new_key(bound).await;
    let refused = bound.amend(&id, json!({ "user_id": "bob", "reason": "x" })).await;
    assert_eq!((refused.status, &refused.json()["code"]), (403, &json!("attribution_not_authorized")));
    // Nor does it touch what is another's, or what is all users'.
    let bobs = http.keep(with(record("calls", "r", 1), "user_id", "bob")).await;
    let range = json!({ "from": ago(60), "to": ago(0) });
    let backfill = json!({
        "usage_type": "calls", "time_range": range, "mode": "blocking", "reason": "x", "replacement_events": [],
    });
    for refused in [
        bound.amend(&bobs, json!({ "value": 7, "reason": "x" })).await,
        bound.amend(&bobs, json!({ "user_id": "ann", "reason": "x" })).await,
        bound.deprecate(&bobs, json!({ "reason": "x" })).await,
        bound.post("/api/uc/v1/usage/backfill", backfill).await,
    ] {
        assert_eq!((refused.status, &refused.json()["code"]), (403, &json!("attribution_not_authorized")));
    }
    let anns = bound.keep(record("calls", "r", 1)).await;
    assert_eq!(bound.amend(&anns, json!({ "value": 7, "reason": "x" })).await.status, 200);
    assert_eq!(bound.deprecate(&anns, json!({ "reason": "x" })).await.status, 200);
}

#[tokio::test]
async fn a_counter_stays_one_when_its_readings_are_corrected() {
    let (_deployment, _server, http) = ledger().await;
    let reading = |minutes: i64, value: i64| with(record("bytes", "disk", value), "event_timestamp", ago(minutes));
    let mut ids = Vec::new();
    for (minutes, value) in [(30, 10), (20, 20), (10, 30)] {
        ids.push(http.keep(reading(minutes, value)).await);
    }
    for (id, value) in [(&ids[1], 9), (&ids[1], 31), (&ids[0], 21), (&ids[2], 19), (&ids[0], -1)] {
        let refused = http.amend(id, json!({ "value": value, "reason": "x" })).await;
        assert_eq!((refused.status, &refused.json()["code"]), (422, &json!("counter_violation")), "{value}");
    }
    // The latest reading is another now, and so is what may come after it.
    assert_eq!(http.amend(&ids[2], json!({ "value": 25, "reason": "x" })).await.status, 200);
    assert_eq!(http.post(RECORDS, reading(5, 24)).await.status, 422);
    http.keep(reading(5, 26)).await;
    // Without the readings in between, the gap is open.
    assert_eq!(http.post(RECORDS, reading(15, 12)).await.status, 422);
    assert_eq!(http.deprecate(&ids[1], json!({ "reason": "x" })).await.status, 200);
    http.keep(reading(15, 12)).await;
    // Without any reading, the series begins again.
    let lone = |value: i64| with(record("bytes", "lone", value), "event_timestamp", ago(1));
    let id = http.keep(lone(100)).await;
    assert_eq!(http.post(RECORDS, with(lone(5), "event_timestamp", json!(chrono::Utc::now()))).await.status, 422);
    assert_eq!(http.deprecate(&id, json!({ "reason": "x" })).await.status, 200);
    http.keep(with(lone(5), "event_timestamp", json!(chrono::Utc::now()))).await;
}

#[tokio::test]
async fn of_many_who_amend_at_once_each_sees_the_others() {
    let (deployment, _server, http) = ledger().await;
    let id = http.keep(record("bytes", "r", 50)).await;
    let amend = |value: usize| {
        let (http, id) = (http.clone(), id.clone());
        async move { http.amend(&id, json!({ "value": value, "reason": "race" })).await }
    };
    let answers = join_all((0..20).map(amend)).await;
    assert!(
        answers.iter().all(|answer| answer.status == 200),
        "{:?}",
        answers.iter().map(|a| a.status).collect::<Vec<_>>()
    );
    let history = http.get(&format!("{RECORDS}/{id}/history")).await.json();
    let versions = history["versions"].as_array().unwrap();
    assert_eq!(versions.len(), 21);
    assert!(versions[..20].iter().all(|one| one["status"] == "deprecated") && versions[20]["status"] == "active");
    // Of those who mean the same revision, one wins.
    let id = http.keep(record("calls", "r", 50)).await;
    let amend = |value: usize| {
        let (http, id) = (http.clone(), id.clone());
        async move { http.amend(&id, json!({ "value": value, "reason": "race", "revision": 1 })).await.status }
    };
    let mut statuses = join_all((0..10).map(amend)).await;
    statuses.sort_unstable();
    assert_eq!(statuses, [vec![200], vec![409; 9]].concat());
    // The head is the last reading that counts.
    let head: (rust_decimal::Decimal,) =
        sqlx::query_as("select value from counter_heads").fetch_one(&deployment.database().await).await.unwrap();
    assert_eq!(json!(head.0.to_string()), versions[20]["value"]);
}
