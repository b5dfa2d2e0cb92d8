//! Units, sources, and who may register them.

use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    support::{API_KEY, Deployment, Http},
    usage::{UNITS, ledger, record, with},
};

const SOURCES: &str = "/api/uc/v1/admin/sources";

fn unit(name: &str) -> Value {
    json!({
        "name": name, "metric_kind": "gauge", "base_unit": "one", "schema": {"type": "object"},
        "allowed_sources": ["default"],
    })
}

#[tokio::test]
async fn a_unit_is_registered_once_and_listed() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    let full = json!({
        "name": "compute.cpu", "metric_kind": "counter", "base_unit": "seconds", "priority": "critical",
        "schema": {"type": "object", "required": ["user_id"]}, "allowed_sources": ["default"],
        "storage_backend": "postgresql", "retention_days": 2555, "grace_period": "2days", "future_tolerance": "1m",
    });
    let made = http.post(UNITS, full.clone()).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let made = made.json();
    for (member, value) in full.as_object().unwrap() {
        assert_eq!(&made[member], value, "{member}");
    }
    assert_eq!(http.post(UNITS, unit("plain")).await.json()["priority"], "medium");
    let names = |listed: Value| -> Vec<Value> {
        listed["units"].as_array().unwrap().iter().map(|unit| unit["name"].clone()).collect()
    };
    // Any key with the role lists, over both transports; only the operator registers.
    let reader = http.with_new_key(json!({"tenant": "acme", "source": "api", "roles": ["usage", "admin"]})).await;
    assert_eq!(names(reader.get(UNITS).await.json()), [json!("compute.cpu"), json!("plain")]);
    let reply = deployment.nats().await.request("tm.usage.units.acme", "".into()).await.unwrap();
    assert_eq!(names(serde_json::from_slice(&reply.payload).unwrap()).len(), 2);
    assert_eq!(reader.post(UNITS, unit("mine")).await.status, 403);
    assert_eq!(Http::new(&server.url).get(UNITS).await.status, 401);
    let body = unit("over_nats").to_string();
    let reply = deployment.nats().await.request("tm.usage.unit-register", body.into()).await.unwrap();
    assert!(reply.headers.is_none(), "{reply:?}");
    server.stop().await;
}

#[tokio::test]
async fn the_seven_rules() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    assert_eq!(http.post(UNITS, unit("taken")).await.status, 201);
    for (member, value, status, code) in [
        ("name", json!("taken"), 409, "unit_name_conflict"),
        ("name", json!("with space"), 400, "validation_error"),
        ("name", json!(""), 400, "validation_error"),
        ("metric_kind", json!("Histogram"), 400, "invalid_metric_kind"),
        ("metric_kind", json!("Counter"), 400, "invalid_metric_kind"),
        ("schema", json!({"type": "nonsense"}), 400, "invalid_schema"),
        ("schema", json!({"type": "object", "properties": 7}), 400, "invalid_schema"),
        ("schema", json!("text"), 400, "invalid_schema"),
        ("schema", json!({"type": "array"}), 400, "invalid_schema"),
        ("schema", json!({"$ref": "http://example.com/schema.json"}), 400, "invalid_schema"),
        ("allowed_sources", json!([]), 400, "allowed_sources_empty"),
        ("allowed_sources", json!(["default", "unheard"]), 404, "source_not_found"),
        ("storage_backend", json!("clickhouse"), 404, "storage_backend_not_found"),
        ("retention_days", json!(6), 400, "retention_out_of_bounds"),
        ("retention_days", json!(2556), 400, "retention_out_of_bounds"),
        ("retention_days", json!(-1), 400, "retention_out_of_bounds"),
        ("priority", json!("urgent"), 400, "validation_error"),
        ("base_unit", json!(""), 400, "validation_error"),
        ("grace_period", json!("soon"), 400, "validation_error"),
        ("colour", json!("red"), 400, "validation_error"),
    ] {
        let answer = http.post(UNITS, with(unit("new"), member, value)).await;
        assert_eq!((answer.status, answer.json()["code"].as_str()), (status, Some(code)), "{member}: {}", answer.text);
        assert!(answer.text.contains(member), "the field is named: {}", answer.text);
    }
    let missing = http.send(Method::POST, UNITS, Some(b"{}".to_vec())).await;
    assert!(missing.status == 400 && missing.text.contains("name"), "{}", missing.text);
    assert_eq!(http.post(UNITS, unit("new")).await.status, 201, "none of them left anything behind");
    server.stop().await;
}

#[tokio::test]
async fn a_schema_is_over_the_record_as_it_was_sent() {
    let (_deployment, server, http) = ledger().await;
    let schema = json!({
        "type": "object",
        "properties": {
            "value": {"type": "number", "maximum": 100},
            "metadata": {"type": "object", "properties": {"region": {"enum": ["eu", "us"]}}, "required": ["region"]},
        },
        "required": ["metadata"],
    });
    http.unit_with("shaped", "gauge", json!({"schema": schema})).await;
    let shaped = |value: Value, region: &str| with(record("shaped", "r", value), "metadata", json!({"region": region}));
    let verdict = http.verdict(json!([
        shaped(json!(100), "eu"),
        shaped(json!(101), "eu"),
        shaped(json!("7"), "eu"),
        shaped(json!(7), "mars"),
        record("shaped", "r", 7),
    ]));
    assert_eq!(verdict.await, (1, 0, vec!["validation_error".to_owned(); 4]));
    let alone = http.post(crate::usage::RECORDS, shaped(json!(7), "mars")).await;
    assert!(alone.text.contains("/metadata/region"), "the place is named: {}", alone.text);
    server.stop().await;
}

#[tokio::test]
async fn sources_are_registered_by_name_or_by_a_key() {
    let (_deployment, server, http) = ledger().await;
    assert_eq!(http.post(SOURCES, json!({"name": "api"})).await.status, 201);
    assert_eq!(http.post(SOURCES, json!({"name": "api"})).await.status, 200, "again");
    assert_eq!(http.post(SOURCES, json!({"name": "a b"})).await.status, 400);
    let jobs = http.with_new_key(json!({"tenant": "acme", "source": "jobs", "roles": ["usage"]})).await;
    let listed = http.get(SOURCES).await.json();
    let names: Vec<_> = listed["sources"].as_array().unwrap().iter().map(|source| source["name"].clone()).collect();
    assert_eq!(names, [json!("api"), json!("jobs")]);
    assert_eq!(jobs.get(SOURCES).await.status, 403);
    // Bound by a change, and usable at once.
    assert_eq!(jobs.post(crate::usage::RECORDS, record("calls", "r", 1)).await.status, 403);
    let changed = http.put_json(&format!("{UNITS}/calls"), json!({"allowed_sources": ["jobs", "api"]})).await;
    assert_eq!((changed.status, &changed.json()["metric_kind"]), (200, &json!("gauge")), "{}", changed.text);
    assert_eq!(jobs.verdict(json!([record("calls", "r", 1)])).await, (1, 0, vec![]));
    assert_eq!(http.put_json(&format!("{UNITS}/nothing"), json!({"priority": "low"})).await.status, 404);
    let emptied = http.put_json(&format!("{UNITS}/calls"), json!({"allowed_sources": []})).await;
    assert_eq!(emptied.json()["code"], "allowed_sources_empty");
    server.stop().await;
}
