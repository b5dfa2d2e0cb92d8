//! The usage ledger as callers see it: records in, verdicts out.

use std::time::Duration;

use chrono::{TimeDelta, Utc};
use reqwest::Method;
use serde_json::{Value, json};
use tidemark::config::Config;
use uuid::Uuid;

use crate::support::{ADMIN_TOKEN, API_KEY, Deployment, Http, Running, eventually};

pub const RECORDS: &str = "/api/uc/v1/usage/records";
pub const UNITS: &str = "/api/uc/v1/admin/units";
pub const METADATA: &str = "/api/uc/v1/usage/metadata";

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

/// A time so many minutes ago.
pub fn ago(minutes: i64) -> Value {
    json!(Utc::now() - TimeDelta::minutes(minutes))
}

impl Http {
    /// Registers a unit that the source `default` may send.
    pub async fn unit(&self, name: &str, kind: &str) {
        self.unit_with(name, kind, json!({})).await;
    }

    pub async fn unit_with(&self, name: &str, kind: &str, more: Value) {
        let mut unit = json!({
            "name": name, "metric_kind": kind, "base_unit": "one", "schema": {"type": "object"},
            "allowed_sources": ["default"],
        });
        unit.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let made = self.clone().admin().post(UNITS, unit).await;
        assert_eq!(made.status, 201, "{}", made.text);
    }

    /// An API key for a tenant, and a caller with it.
    pub async fn with_new_key(&self, key: Value) -> Http {
        let made = self.clone().admin().post("/v1/admin/keys", key).await;
        assert_eq!(made.status, 201, "{}", made.text);
        Http::new(self.url()).key(made.json()["key"].as_str().unwrap())
    }

    /// Sends records and expects a verdict: accepted, duplicates, and the codes of what was rejected.
    pub async fn verdict(&self, records: Value) -> (u64, u64, Vec<String>) {
        let answer = self.post(RECORDS, records).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        verdict(&answer.json())
    }

    /// What came in all minutes: emitted, accepted, duplicates, rejected.
    pub async fn reconciled(&self) -> [u64; 4] {
        let metadata = self.get(METADATA).await.json();
        let minutes = metadata["reconciliation"].as_array().unwrap();
        ["emitted", "accepted", "duplicates", "rejected"]
            .map(|field| minutes.iter().map(|minute| minute[field].as_u64().unwrap()).sum())
    }
}

pub fn verdict(answer: &Value) -> (u64, u64, Vec<String>) {
    let codes = answer["rejected"].as_array().unwrap_or_else(|| panic!("{answer}")).iter();
    let codes = codes.map(|rejection| rejection["reason"]["code"].as_str().unwrap().to_owned()).collect();
    (answer["accepted"].as_u64().unwrap(), answer["duplicates"].as_u64().unwrap(), codes)
}

/// A deployment with a gauge `calls` and a counter `bytes`, and a caller of its default tenant.
pub async fn ledger() -> (Deployment, Running, Http) {
    ledger_with(|_| {}).await
}

pub async fn ledger_with(change: impl FnOnce(&mut Config)) -> (Deployment, Running, Http) {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(change).await;
    let http = server.http().key(API_KEY);
    http.unit("calls", "gauge").await;
    http.unit("bytes", "counter").await;
    (deployment, server, http)
}

/// What the stream of usage has.
pub async fn stream(nats: &async_nats::Client) -> async_nats::jetstream::stream::State {
    let jetstream = async_nats::jetstream::new(nats.clone());
    jetstream.get_stream("tm_USAGE").await.unwrap().cached_info().state.clone()
}

/// For tests in which a verdict may not come.
pub fn hurried(config: &mut Config) {
    config.usage.answer_within = Duration::from_secs(1);
}

/// Publishes into the stream and waits for its acknowledgement.
pub async fn publish(nats: &async_nats::Client, subject: &str, headers: &[(&str, &str)], body: Vec<u8>) {
    let mut map = async_nats::HeaderMap::new();
    headers.iter().for_each(|(name, value)| map.insert(*name, *value));
    let jetstream = async_nats::jetstream::new(nats.clone());
    jetstream.publish_with_headers(subject.to_owned(), map, body.into()).await.unwrap().await.unwrap();
}

pub async fn rows(database: &sqlx::PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from usage_records").fetch_one(database).await.unwrap()
}

#[tokio::test]
async fn records_are_accepted_once_and_repeats_are_success() {
    let (deployment, server, http) = ledger().await;
    let (one, two) = (record("calls", "r1", 1), record("calls", "r2", "2.50"));
    assert_eq!(http.verdict(json!([one, two])).await, (2, 0, vec![]));
    assert_eq!(http.verdict(json!({"records": [two, one]})).await, (0, 2, vec![]));
    assert_eq!(
        http.verdict(with(two.clone(), "value", 2.5)).await,
        (0, 1, vec![]),
        "the same value, written otherwise"
    );
    let three = record("calls", "r3", "12345678901234567890.12345678");
    let three = with(with(three, "user_id", "ann"), "lineage", json!(["org", "project"]));
    let three = with(with(three, "resource_type", "vm"), "metadata", json!({"b": 1, "a": {"c": [true]}}));
    assert_eq!(http.verdict(json!([three, three])).await, (1, 1, vec![]), "twice in one request");
    let database = deployment.database().await;
    let columns = "select tenant_id, source_id, resource_id, value::text, metric_kind, status, idempotency_key
         from usage_records order by resource_id";
    let rows: Vec<(String, String, String, String, String, String, String)> =
        sqlx::query_as(columns).fetch_all(&database).await.unwrap();
    let row = |record: &Value, value: &str| {
        let text = |member: &str| record[member].as_str().unwrap().to_owned();
        let [tenant, source, kind, status] = ["default", "default", "gauge", "active"].map(str::to_owned);
        (tenant, source, text("resource_id"), value.to_owned(), kind, status, text("idempotency_key"))
    };
    assert_eq!(rows, [row(&one, "1"), row(&two, "2.5"), row(&three, "12345678901234567890.12345678")]);
    let more: (String, String, Value, Value) = {
        let (user, kind, lineage, metadata): (String, String, String, String) = sqlx::query_as(
            "select user_id, resource_type, lineage::text, metadata::text from usage_records where resource_id = 'r3'",
        )
        .fetch_one(&database)
        .await
        .unwrap();
        (user, kind, serde_json::from_str(&lineage).unwrap(), serde_json::from_str(&metadata).unwrap())
    };
    assert_eq!(more, ("ann".into(), "vm".into(), json!(["org", "project"]), json!({"b": 1, "a": {"c": [true]}})));
    let metadata = http.get(METADATA).await.json();
    assert_eq!((&metadata["total_records"], &metadata["sources"]["default"]), (&json!(3), &json!(3)));
    assert_eq!(http.reconciled().await, [7, 3, 4, 0]);
    // What is in the ledger leaves the stream.
    let nats = deployment.nats().await;
    eventually("the stream is empty", async || {
        let state = stream(&nats).await;
        (state.messages == 0 && state.last_sequence == 4).then_some(())
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn published_events_arrive_too() {
    let (deployment, server, http) = ledger().await;
    let nats = deployment.nats().await;
    let json = json!([record("calls", "a", 1), with(record("calls", "b", 2), "event_timestamp", ago(60))]);
    publish(&nats, "usage.default.default", &[], json.to_string().into()).await;
    let packed = rmp_serde::to_vec_named(&record("calls", "c", 3.5)).unwrap();
    for _ in 0..2 {
        let headers = [("Content-Type", "application/msgpack"), ("Nats-Msg-Id", "default.default.1")];
        publish(&nats, "usage.default.default", &headers, packed.clone()).await;
    }
    let database = deployment.database().await;
    eventually("three rows", async || {
        let sum: Option<String> =
            sqlx::query_scalar("select sum(value)::text from usage_records").fetch_one(&database).await.unwrap();
        (sum.as_deref() == Some("6.5")).then_some(())
    })
    .await;
    assert_eq!(http.reconciled().await, [3, 3, 0, 0], "a repeated message is not even read");
    server.stop().await;
}

#[tokio::test]
async fn the_same_over_nats_with_tenant_and_source_from_the_subject() {
    let (deployment, server, http) = ledger().await;
    http.with_new_key(json!({"tenant": "acme", "source": "api", "roles": ["usage"]})).await;
    http.unit_with("jobs", "gauge", json!({"allowed_sources": ["api"]})).await;
    let nats = deployment.nats().await;
    let ask = async |subject: &str, body: Value| {
        let reply = nats.request(subject.to_owned(), body.to_string().into()).await.unwrap();
        let code = reply.headers.as_ref().and_then(|headers| headers.get("Nats-Service-Error-Code"));
        (code.map(|code| code.to_string()), serde_json::from_slice::<Value>(&reply.payload).unwrap(), reply.headers)
    };
    let one = record("jobs", "r", 1);
    let (code, answer, headers) = ask("tm.usage.ingest.acme.api", json!([one])).await;
    assert_eq!((code, verdict(&answer)), (None, (1, 0, vec![])));
    assert_eq!(headers.unwrap().get("X-RateLimit-Limit").unwrap().as_str(), "10000");
    let (code, answer, _) = ask("tm.usage.ingest.acme.other", one.clone()).await;
    assert_eq!((code.as_deref(), &answer["code"]), (Some("403"), &json!("source_not_authorized")));
    // Another tenant's record with the same key is another record.
    let (code, answer, _) = ask("tm.usage.ingest.globex.api", json!({"records": [one]})).await;
    assert_eq!((code, verdict(&answer)), (None, (1, 0, vec![])));
    let claimed = with(record("jobs", "r", 1), "tenant_id", "globex");
    let (code, answer, _) = ask("tm.usage.ingest.acme.api", claimed).await;
    assert_eq!((code.as_deref(), &answer["code"]), (Some("400"), &json!("validation_error")));
    let (code, answer, _) = ask("tm.usage.ingest.acme.api", json!("x")).await;
    assert_eq!((code.as_deref(), &answer["code"]), (Some("400"), &json!("validation_error")));
    server.stop().await;
}

#[tokio::test]
async fn every_reason_to_reject_alone_and_in_a_batch() {
    let (deployment, server, http) = ledger().await;
    http.with_new_key(json!({"tenant": "default", "source": "api", "roles": ["usage"]})).await;
    http.unit_with("foreign", "gauge", json!({"allowed_sources": ["api"]})).await;
    let schema =
        json!({"type": "object", "properties": {"metadata": {"required": ["region"]}}, "required": ["metadata"]});
    http.unit_with("strict", "gauge", json!({"schema": schema})).await;
    let taken = record("calls", "taken", 1);
    assert_eq!(http.verdict(json!([taken, record("bytes", "c", 10)])).await, (2, 0, vec![]));
    let cases = [
        (400, "validation_error", record("calls", "r", "many")),
        (400, "validation_error", with(record("calls", "r", 1), "metadata", json!({"x": "y".repeat(9000)}))),
        (400, "validation_error", with(record("calls", "r", 1), "metadata", json!({"x": "y".repeat(17_000)}))),
        (400, "validation_error", with(record("calls", "r", 1), "metric_kind", "counter")),
        (400, "validation_error", with(record("calls", "r", 1), "resource_id", "a\0b")),
        (400, "validation_error", with(record("calls", "r", 1), "tenant_id", "other")),
        (400, "validation_error", with(record("calls", "r", 1), "colour", "red")),
        (400, "validation_error", with(record("calls", "r", 1), "event_timestamp", ago(-6))),
        (400, "validation_error", record("strict", "r", 1)),
        (400, "grace_period_exceeded", with(record("calls", "r", 1), "event_timestamp", ago(24 * 60 + 1))),
        (404, "type_not_found", record("unheard", "r", 1)),
        (403, "source_not_authorized", record("foreign", "r", 1)),
        (409, "duplicate_record", with(taken.clone(), "value", 2)),
        (422, "counter_violation", record("bytes", "c", 9)),
        (422, "counter_violation", record("bytes", "n", -1)),
        (400, "validation_error", json!([])),
        (
            400,
            "validation_error",
            json!(["calls", "r", 1, ago(0), "in order", null, null, null, null, null, null, null]),
        ),
    ];
    for (status, code, record) in &cases {
        let answer = http.post(RECORDS, json!([record])).await;
        assert_eq!(
            (answer.status, answer.json()["code"].as_str()),
            (*status, Some(*code)),
            "{record}: {}",
            answer.text
        );
        assert!(answer.json()["message"].is_string() && answer.headers.contains_key("x-ratelimit-remaining"));
    }
    // All together, with good ones between them: what is wrong with one harms no other.
    let mut batch: Vec<Value> = Vec::new();
    for (.., record) in &cases {
        batch.extend([super::usage::record("calls", "good", 1), record.clone()]);
    }
    let answer = http.post(RECORDS, json!(batch)).await.json();
    let expected = cases.iter().map(|(_, code, _)| code.to_string()).collect();
    assert_eq!(verdict(&answer), (cases.len() as u64, 0, expected));
    for (number, rejection) in answer["rejected"].as_array().unwrap().iter().enumerate() {
        assert_eq!(rejection["index"], number * 2 + 1);
        assert_eq!(rejection["idempotency_key"], cases[number].2["idempotency_key"]);
    }
    let conflict = &answer["rejected"][12]["reason"];
    assert_eq!(conflict["details"]["fields"], json!(["value"]));
    assert!(conflict["message"].as_str().unwrap().contains("another value"), "{conflict}");
    // Not a number: MessagePack has it, and only its own record is refused.
    let packed = rmp_serde::to_vec_named(&json!([record("calls", "x", 1), record("calls", "y", "NAN")])).unwrap();
    let at = packed.windows(4).position(|window| window == b"\xa3NAN").unwrap();
    let nan = [&packed[..at], b"\xca\x7f\xc0\x00\x00", &packed[at + 4..]].concat();
    let answer = http.clone().header("content-type", "application/msgpack").header("accept", "application/json");
    let answer = answer.send(Method::POST, RECORDS, Some(nan)).await;
    assert_eq!(verdict(&answer.json()), (1, 0, vec!["validation_error".into()]), "{}", answer.text);
    // Everything that came is somewhere.
    let database = deployment.database().await;
    let [emitted, accepted, duplicates, rejected] = http.reconciled().await;
    assert_eq!(emitted, accepted + duplicates + rejected);
    assert_eq!(accepted, rows(&database).await as u64);
    let quarantined: i64 =
        sqlx::query_scalar("select count(*) from usage_quarantine").fetch_one(&database).await.unwrap();
    assert_eq!(rejected, quarantined as u64);
    server.stop().await;
}

#[tokio::test]
async fn what_is_refused_as_a_whole() {
    let (_deployment, server, http) = ledger().await;
    let many: Vec<Value> = (0..1001).map(|_| record("calls", "r", 1)).collect();
    for (body, problem) in [
        ("nonsense".to_owned(), "must be JSON"),
        ("{\"records\": 1}".to_owned(), "records: must be a list"),
        ("[]".to_owned(), "records: is empty"),
        ("[{]".to_owned(), "is not JSON"),
        (String::new(), "body: is missing"),
        (json!(many).to_string(), "records: has 1001, more than 1000"),
        (format!("[\"{}\"]", "x".repeat(1_048_577)), "more than 1048576"),
    ] {
        let answer = http.send(Method::POST, RECORDS, Some(body.into_bytes())).await;
        assert_eq!((answer.status, answer.json()["code"].as_str()), (400, Some("validation_error")), "{}", answer.text);
        assert!(answer.text.contains(problem), "{problem}: {}", answer.text);
    }
    let packed = http.clone().header("content-type", "application/msgpack").header("accept", "application/json");
    let answer = packed.send(Method::POST, RECORDS, Some(b"\xc1".to_vec())).await;
    assert!(answer.status == 400 && answer.text.contains("is not MessagePack"), "{}", answer.text);
    let strange = http.post("/api/uc/v1/usage/records?tenant=other", json!([record("calls", "r", 1)])).await;
    assert!(strange.status == 400 && strange.text.contains("tenant"), "{}", strange.text);
    server.stop().await;
}

#[tokio::test]
async fn who_may_write_as_whom() {
    let (deployment, server, http) = ledger().await;
    let stranger = Http::new(&server.url);
    assert_eq!(stranger.post(RECORDS, json!([record("calls", "r", 1)])).await.status, 401);
    let mint = http.with_new_key(json!({"tenant": "default", "source": "default", "roles": ["mint"]})).await;
    assert_eq!(mint.post(RECORDS, json!([record("calls", "r", 1)])).await.status, 403);
    let sourceless = http.with_new_key(json!({"tenant": "default", "roles": ["usage"]})).await;
    let refused = sourceless.post(RECORDS, json!([record("calls", "r", 1)])).await;
    assert_eq!((refused.status, refused.json()["code"].as_str()), (403, Some("source_not_authorized")));
    // The admin token writes as the default tenant's default source.
    let admin = Http::new(&server.url).header("authorization", &format!("Bearer {ADMIN_TOKEN}"));
    assert_eq!(admin.verdict(json!([record("calls", "r", 1)])).await, (1, 0, vec![]));
    let ann =
        http.with_new_key(json!({"tenant": "acme", "source": "default", "user": "ann", "roles": ["usage"]})).await;
    let bobs = with(record("calls", "r", 1), "user_id", "bob");
    assert_eq!(
        ann.verdict(json!([record("calls", "r", 1), bobs])).await,
        (1, 0, vec!["attribution_not_authorized".into()])
    );
    let alone = ann.post(RECORDS, bobs).await;
    assert_eq!((alone.status, alone.json()["code"].as_str()), (403, Some("attribution_not_authorized")));
    let database = deployment.database().await;
    let whose: Vec<(String, Option<String>)> =
        sqlx::query_as("select tenant_id, user_id from usage_records order by tenant_id")
            .fetch_all(&database)
            .await
            .unwrap();
    assert_eq!(whose, [("acme".to_owned(), Some("ann".to_owned())), ("default".to_owned(), None)]);
    // Each sees its own.
    assert_eq!(ann.get(METADATA).await.json()["total_records"], 1);
    assert_eq!(ann.get("/api/uc/v1/usage/quarantine").await.json()["records"].as_array().unwrap().len(), 2);
    assert_eq!(http.get("/api/uc/v1/usage/quarantine").await.json()["records"], json!([]));
    server.stop().await;
}

#[tokio::test]
async fn an_answer_without_the_verdict() {
    let (deployment, server, http) = ledger().await;
    let hurried = http.clone().header("prefer", "respond-async");
    let answer = hurried.post(RECORDS, json!([record("calls", "r", 1), record("calls", "r", "x")])).await;
    assert_eq!((answer.status, answer.json()), (202, json!({"status": "buffered", "records": 2})));
    let database = deployment.database().await;
    eventually("the row", async || (rows(&database).await == 1).then_some(())).await;
    let entries = http.get("/api/uc/v1/usage/quarantine").await.json();
    assert_eq!(entries["records"][0]["reason"]["code"], "validation_error", "what was refused later is found");
    server.stop().await;
}

#[tokio::test]
async fn keys_of_any_kind_are_identities_for_ever() {
    let (deployment, server, http) = ledger().await;
    let old = "00000000-0001-7000-8000-000000000000";
    let future = "ffffffff-ffff-7fff-bfff-ffffffffffff";
    let keys = ["order-7", "0", "ключ", old, future, &Uuid::new_v4().to_string()];
    let batch: Vec<Value> = keys.iter().map(|key| with(record("calls", "r", 1), "idempotency_key", *key)).collect();
    assert_eq!(http.verdict(json!(batch)).await, (6, 0, vec![]));
    assert_eq!(http.verdict(json!(batch)).await, (0, 6, vec![]));
    // The same key for another resource, type or source is another record.
    let other = with(batch[0].clone(), "resource_id", "other");
    assert_eq!(http.verdict(json!([other])).await, (1, 0, vec![]));
    // What was good once stays a duplicate, even when it would be refused today.
    let database = deployment.database().await;
    let database = &database;
    let ids = "update usage_records set created_at = now() - interval '400 days'";
    sqlx::query(ids).execute(database).await.unwrap();
    let change = json!({"allowed_sources": ["other"]});
    http.with_new_key(json!({"tenant": "default", "source": "other", "roles": ["usage"]})).await;
    let changed = http.clone().admin().put_json(&format!("{UNITS}/calls"), change).await;
    assert_eq!(changed.status, 200, "{}", changed.text);
    eventually("the unit is bound elsewhere", async || {
        let answer = http.post(RECORDS, record("calls", "r", 1)).await;
        (answer.status == 403).then_some(())
    })
    .await;
    assert_eq!(http.verdict(json!(batch)).await, (0, 6, vec![]), "a repeat is a duplicate, whatever has changed since");
    // Edge partitions have what has no week of its own.
    let edges: Vec<(String, i64)> =
        sqlx::query_as("select tableoid::regclass::text, count(*) from usage_records group by 1 order by 1")
            .fetch_all(database)
            .await
            .unwrap();
    assert_eq!(edges, [("usage_records_future".to_owned(), 1), ("usage_records_past".to_owned(), 6)]);
    server.stop().await;
}

#[tokio::test]
async fn a_partition_takes_over_what_waited_in_the_edge() {
    let (deployment, server, http) = ledger().await;
    let database = deployment.database().await;
    // Far ahead of the partitions that there are.
    let at = Utc::now() + TimeDelta::weeks(9);
    let key = Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, at.timestamp() as u64, 0));
    let early = with(record("calls", "r", 1), "idempotency_key", key.to_string());
    assert_eq!(http.verdict(json!([early])).await, (1, 0, vec![]));
    let place = "select tableoid::regclass::text from usage_records";
    let edge: String = sqlx::query_scalar(place).fetch_one(&database).await.unwrap();
    assert_eq!(edge, "usage_records_future");
    let made: i32 = sqlx::query_scalar("select usage_extend_partitions(now() + interval '10 weeks')")
        .fetch_one(&database)
        .await
        .unwrap();
    assert_eq!(made, 6);
    let dated: String = sqlx::query_scalar(place).fetch_one(&database).await.unwrap();
    assert!(dated.starts_with("usage_records_2"), "{dated}");
    assert_eq!(http.verdict(json!([early, record("calls", "r", 2)])).await, (1, 1, vec![]));
    server.stop().await;
}

#[tokio::test]
async fn units_without_a_registry_entry_are_found_by_other_instances_at_once() {
    let deployment = Deployment::new().await;
    let (one, two) = (deployment.serve().await, deployment.serve().await);
    for number in 0..20 {
        let unit = format!("unit.{number}");
        one.http().unit(&unit, "gauge").await;
        let http = two.http().key(API_KEY);
        assert_eq!(http.verdict(json!([record(&unit, "r", 1)])).await, (1, 0, vec![]), "{unit}");
    }
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn grace_and_tolerance_by_unit_and_by_tenant() {
    let (_deployment, server, http) = ledger_with(|config| config.usage.grace_period = Duration::from_secs(3600)).await;
    http.unit_with("slow", "gauge", json!({"grace_period": "3h", "future_tolerance": "1h"})).await;
    let at = |unit: &str, minutes| with(record(unit, "r", 1), "event_timestamp", ago(minutes));
    let late = vec!["grace_period_exceeded".to_owned()];
    assert_eq!(http.verdict(json!([at("calls", 59), at("calls", 61)])).await, (1, 0, late.clone()));
    assert_eq!(http.verdict(json!([at("slow", 179), at("slow", -59), at("slow", 181)])).await, (2, 0, late.clone()));
    let set =
        http.put_json("/api/uc/v1/admin/limits/default", json!({"grace_period": "2h", "future_tolerance": "0s"})).await;
    assert_eq!(set.status, 200, "{}", set.text);
    let early = vec!["validation_error".to_owned()];
    assert_eq!(http.verdict(json!([at("calls", 119), at("calls", -1)])).await, (1, 0, early));
    assert_eq!(
        http.verdict(json!([at("slow", 179), at("slow", 181)])).await,
        (1, 0, late),
        "the unit's own counts first"
    );
    server.stop().await;
}

#[tokio::test]
async fn the_audit_has_every_change() {
    let (deployment, server, http) = ledger().await;
    http.put_json("/api/uc/v1/admin/limits/acme", json!({"sustained_rate": 5})).await;
    http.clone().admin().post("/api/uc/v1/admin/sources", json!({"name": "api"})).await;
    let database = deployment.database().await;
    let entries: Vec<(String, String, Option<String>, String)> =
        sqlx::query_as("select operation, actor, tenant_id, outcome from usage_audit order by id")
            .fetch_all(&database)
            .await
            .unwrap();
    let entry = |operation: &str, actor: &str, tenant: Option<&str>| {
        (operation.to_owned(), actor.to_owned(), tenant.map(str::to_owned), "done".to_owned())
    };
    assert_eq!(
        entries,
        [
            entry("unit-register", "key of default, source default", None),
            entry("unit-register", "key of default, source default", None),
            entry("limits-set", "key of default, source default", Some("acme")),
            entry("source-register", "key of default, source default", None),
        ]
    );
    server.stop().await;
}
