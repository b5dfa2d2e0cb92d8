//! The usage ledger as callers see it: records in, verdicts out.

use chrono::{TimeDelta, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{API_KEY, Deployment, Http, eventually};

pub const RECORDS: &str = "/api/uc/v1/usage/records";
pub const UNITS: &str = "/api/uc/v1/admin/units";

/// A record that is good in every way.
pub fn record(usage_type: &str, resource: &str, value: impl Into<Value>) -> Value {
    json!({
        "usage_type": usage_type,
        "resource_id": resource,
        "value": value.into(),
        "event_timestamp": Utc::now(),
        "idempotency_key": Uuid::now_v7().to_string(),
    })
}

pub fn with(mut record: Value, member: &str, value: impl Into<Value>) -> Value {
    record[member] = value.into();
    record
}

impl Http {
    /// Registers a unit that the source `default` may send.
    pub async fn unit(&self, name: &str, kind: &str) {
        let unit = json!({
            "name": name, "metric_kind": kind, "base_unit": "one", "schema": {"type": "object"},
            "allowed_sources": ["default"],
        });
        let made = self.clone().admin().post(UNITS, unit).await;
        assert_eq!(made.status, 201, "{}", made.text);
    }

    /// Sends records and expects a verdict: accepted, duplicates, and the codes of what was rejected.
    pub async fn verdict(&self, records: Value) -> (u64, u64, Vec<String>) {
        let answer = self.post(RECORDS, records).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let answer = answer.json();
        let codes = answer["rejected"].as_array().unwrap().iter();
        let codes = codes.map(|rejection| rejection["reason"]["code"].as_str().unwrap().to_owned()).collect();
        (answer["accepted"].as_u64().unwrap(), answer["duplicates"].as_u64().unwrap(), codes)
    }
}

#[tokio::test]
async fn records_are_accepted_once_and_repeats_are_success() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    http.unit("calls", "gauge").await;
    let (one, two) = (record("calls", "r1", 1), record("calls", "r2", "2.50"));
    assert_eq!(http.verdict(json!([one, two])).await, (2, 0, vec![]));
    assert_eq!(http.verdict(json!({"records": [two, one]})).await, (0, 2, vec![]));
    assert_eq!(
        http.verdict(with(two.clone(), "value", 2.5)).await,
        (0, 1, vec![]),
        "the same value, written otherwise"
    );
    let database = deployment.database().await;
    let rows: Vec<(String, String, String, String)> =
        sqlx::query_as("select tenant_id, source_id, resource_id, value::text from usage_records order by resource_id")
            .fetch_all(&database)
            .await
            .unwrap();
    let row = |resource: &str, value: &str| ("default".into(), "default".into(), resource.into(), value.into());
    assert_eq!(rows, [row("r1", "1"), row("r2", "2.5")]);
    let metadata = http.get("/api/uc/v1/usage/metadata").await.json();
    assert_eq!(metadata["total_records"], 2);
    let sum = |field: &str| {
        let minutes = metadata["reconciliation"].as_array().unwrap().iter();
        minutes.map(|minute| minute[field].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!((sum("emitted"), sum("accepted"), sum("duplicates"), sum("rejected")), (5, 2, 3, 0));
    // What is in the ledger leaves the stream.
    eventually("the stream is empty", async || {
        let jetstream = async_nats::jetstream::new(deployment.nats().await);
        let state = jetstream.get_stream("tm_USAGE").await.unwrap().cached_info().state.clone();
        (state.messages == 0 && state.last_sequence == 3).then_some(())
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn published_events_arrive_too() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    server.http().unit("calls", "gauge").await;
    let jetstream = async_nats::jetstream::new(deployment.nats().await);
    let old = Utc::now() - TimeDelta::hours(1);
    let json = json!([record("calls", "a", 1), with(record("calls", "b", 2), "event_timestamp", json!(old))]);
    jetstream.publish("usage.default.default", json.to_string().into()).await.unwrap().await.unwrap();
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Content-Type", "application/msgpack");
    headers.insert("Nats-Msg-Id", "default.default.1");
    let packed = rmp_serde::to_vec_named(&record("calls", "c", 3.5)).unwrap();
    for _ in 0..2 {
        let sent = jetstream.publish_with_headers("usage.default.default", headers.clone(), packed.clone().into());
        sent.await.unwrap().await.unwrap();
    }
    let database = deployment.database().await;
    eventually("three rows", async || {
        let sum: Option<String> =
            sqlx::query_scalar("select sum(value)::text from usage_records").fetch_one(&database).await.unwrap();
        (sum.as_deref() == Some("6.5")).then_some(())
    })
    .await;
    server.stop().await;
}
