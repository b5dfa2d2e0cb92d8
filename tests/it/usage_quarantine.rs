//! What was refused is kept, told, and can be sent again.

use std::time::Duration;

use chrono::{TimeDelta, Utc};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::{
    support::{Http, eventually},
    usage::{ledger, publish, record, rows, with},
};

const QUARANTINE: &str = "/api/uc/v1/usage/quarantine";
const REPLAY: &str = "/api/uc/v1/usage/quarantine/replay";

async fn entries(http: &Http, query: &str) -> Vec<Value> {
    http.get(&format!("{QUARANTINE}{query}")).await.json()["records"].as_array().unwrap().clone()
}

#[tokio::test]
async fn poison_is_kept_and_told_and_blocks_nobody() {
    let (deployment, server, http) = ledger().await;
    let nats = deployment.nats().await;
    let mut told = nats.subscribe("usage-rejected.default.*").await.unwrap();
    nats.flush().await.unwrap();
    let good = record("calls", "r", 1);
    type Headers = &'static [(&'static str, &'static str)];
    let poison: [(&str, Headers, Vec<u8>); 7] = [
        ("validation_error", &[], b"not json at all".to_vec()),
        ("validation_error", &[("Content-Type", "application/msgpack")], vec![0xc1, 0, 0xff]),
        ("validation_error", &[], json!(vec![good.clone(); 1001]).to_string().into()),
        ("unsafe_message_id", &[("Nats-Msg-Id", "whatever")], good.to_string().into()),
        ("unsafe_message_id", &[("Nats-Msg-Id", "acme.default.1")], json!([good]).to_string().into()),
        ("validation_error", &[], json!([7]).to_string().into()),
        ("validation_error", &[("Tidemark-Replay", "true")], good.to_string().into()),
    ];
    for (code, headers, body) in &poison {
        publish(&nats, "usage.default.default", headers, body.clone()).await;
        let fact = tokio::time::timeout(Duration::from_secs(10), told.next()).await.unwrap().unwrap();
        assert_eq!(fact.subject.as_str(), "usage-rejected.default.default");
        let fact: Value = serde_json::from_slice(&fact.payload).unwrap();
        assert_eq!(fact["reason"]["code"], *code, "{fact}");
        let listed = entries(&http, "?limit=1").await;
        assert_eq!((&listed[0]["id"], &listed[0]["reason"]), (&fact["id"], &fact["reason"]));
    }
    publish(&nats, "usage.default.default", &[("Nats-Msg-Id", "default.default.7")], good.to_string().into()).await;
    let database = deployment.database().await;
    eventually("the good one is written", async || (rows(&database).await == 1).then_some(())).await;
    assert_eq!(http.reconciled().await, [8, 1, 0, 7]);
    let text = &entries(&http, "").await[6];
    assert_eq!((&text["record"], &text["source_id"]), (&json!("not json at all"), &json!("default")));
    server.stop().await;
}

#[tokio::test]
async fn lists_filter_and_page() {
    let (_deployment, server, http) = ledger().await;
    let batch: Vec<Value> = (0..5).flat_map(|_| [record("unheard", "r", 1), record("bytes", "r", -1)]).collect();
    http.verdict(json!(batch)).await;
    assert_eq!(entries(&http, "?code=type_not_found").await.len(), 5);
    assert_eq!(entries(&http, "?source_id=other").await.len(), 0);
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = http.get(&format!("{QUARANTINE}?limit=3{cursor}")).await.json();
        seen.extend(page["records"].as_array().unwrap().iter().map(|entry| entry["idempotency_key"].clone()));
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    let newest_first: Vec<Value> = batch.iter().rev().map(|record| record["idempotency_key"].clone()).collect();
    assert_eq!(seen, newest_first);
    for (query, field) in [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?cursor=x", "cursor"),
        ("?colour=red", "colour"),
        ("?code=%00", "code"),
        ("?source_id=%00", "source_id"),
    ] {
        let refused = http.get(&format!("{QUARANTINE}{query}")).await;
        assert!(refused.status == 400 && refused.text.contains(field), "{}", refused.text);
    }
    server.stop().await;
}

#[tokio::test]
async fn what_is_mended_is_replayed_once_as_of_the_time_it_came() {
    let (deployment, server, http) = ledger().await;
    let late = with(record("unheard", "a", 1), "event_timestamp", json!(Utc::now() - TimeDelta::hours(23)));
    let verdict = http.verdict(json!([late, record("unheard", "b", "x"), record("unheard", "c", 3)])).await;
    assert_eq!(verdict.2, ["type_not_found", "validation_error", "type_not_found"]);
    let mut listed = entries(&http, "").await;
    listed.reverse();
    let ids: Vec<&Value> = listed.iter().map(|entry| &entry["id"]).collect();
    // The cause is still there.
    let again = http.post(REPLAY, json!({"ids": [ids[0]]})).await;
    assert_eq!((again.status, again.json()["code"].as_str()), (404, Some("type_not_found")), "{}", again.text);
    http.unit("unheard", "gauge").await;
    // Two days have passed since; the record came in time, and is not late now.
    let database = deployment.database().await;
    sqlx::query("update usage_quarantine set received_at = received_at - interval '2 days'")
        .execute(&database)
        .await
        .unwrap();
    let shifted =
        "update usage_quarantine set payload = convert_to(replace(convert_from(payload, 'utf8'), $1, $2), 'utf8')";
    let (at, before) = (late["event_timestamp"].as_str().unwrap(), json!(Utc::now() - TimeDelta::hours(71)));
    sqlx::query(shifted).bind(at).bind(before.as_str().unwrap()).execute(&database).await.unwrap();
    sqlx::query(
        "update usage_quarantine set payload = convert_to(jsonb_set(convert_from(payload, 'utf8')::jsonb,
             '{event_timestamp}', to_jsonb(now() - interval '2 days'))::text, 'utf8') where idempotency_key <> $1",
    )
    .bind(late["idempotency_key"].as_str().unwrap())
    .execute(&database)
    .await
    .unwrap();
    let replayed = http.post(REPLAY, json!({"ids": ids})).await;
    assert_eq!(replayed.status, 200, "{}", replayed.text);
    let replayed = replayed.json();
    assert_eq!((&replayed["accepted"], &replayed["duplicates"]), (&json!(2), &json!(0)), "{replayed}");
    assert_eq!(replayed["rejected"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&replayed["rejected"][0]["index"], &replayed["rejected"][0]["reason"]["code"]),
        (&json!(1), &json!("validation_error"))
    );
    assert_eq!(rows(&database).await, 2);
    let left = entries(&http, "").await;
    assert_eq!((left.len(), &left[0]["id"]), (1, ids[1]));
    assert_eq!(entries(&http, "?include_replayed=true").await.len(), 3);
    // Replayed twice it is gone, and a replay counts as newly emitted.
    let gone = http.post(REPLAY, json!({"ids": [ids[0]]})).await;
    assert_eq!(gone.status, 404, "{}", gone.text);
    assert_eq!(http.reconciled().await, [7, 2, 0, 5]);
    // Nobody replays another tenant's.
    let acme = http.with_new_key(json!({"tenant": "acme", "source": "default", "roles": ["usage"]})).await;
    assert_eq!(acme.post(REPLAY, json!({"ids": [ids[1]]})).await.status, 404);
    let nats = deployment.nats().await;
    let forged = json!([{"id": ids[1], "index": 0}]).to_string();
    publish(&nats, "usage.acme.default", &[("Tidemark-Replay", "true")], forged.into()).await;
    publish(&nats, "usage.acme.default", &[], record("calls", "r", 1).to_string().into()).await;
    eventually("the next message is written", async || (rows(&database).await == 3).then_some(())).await;
    assert_eq!(entries(&http, "").await.len(), 1, "still there");
    for (body, problem) in [(json!({"ids": []}), "ids"), (json!({"ids": ["x"]}), "ids"), (json!({}), "ids")] {
        let refused = http.post(REPLAY, body).await;
        assert!(refused.status == 400 && refused.text.contains(problem), "{}", refused.text);
    }
    server.stop().await;
}
