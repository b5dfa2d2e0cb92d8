//! The feed: everything, once, in the order in which it was accepted.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tidemark::api::usage::FeedRequest;

use crate::{
    support::{API_KEY, Deployment, Http, eventually},
    usage::{RECORDS, ago, ledger, publish, record, rows, with},
};

impl Http {
    pub async fn fed(&self, query: &str) -> Value {
        let answer = self.get(&format!("{RECORDS}/feed?{query}")).await;
        assert_eq!(answer.status, 200, "{query}: {}", answer.text);
        answer.json()
    }

    /// Reads on until there is nothing more.
    async fn fed_from(&self, position: &mut String, limit: usize) -> Vec<Value> {
        let mut all = Vec::new();
        loop {
            let page = self.fed(&format!("position={position}&limit={limit}")).await;
            *position = page["next_position"].as_str().unwrap().to_owned();
            match page["records"].as_array().unwrap().as_slice() {
                [] => return all,
                records => all.extend(records.iter().cloned()),
            }
        }
    }
}

fn shown(records: &[Value]) -> Vec<(String, i64, String)> {
    let one = |record: &Value| {
        let text = |member: &str| record[member].as_str().unwrap().to_owned();
        (text("resource_id"), record["revision"].as_i64().unwrap(), text("status"))
    };
    records.iter().map(one).collect()
}

fn expected(records: &[(&str, i64, &str)]) -> Vec<(String, i64, String)> {
    records.iter().map(|(resource, revision, status)| (resource.to_string(), *revision, status.to_string())).collect()
}

#[tokio::test]
async fn records_come_in_the_order_of_acceptance_and_again_when_corrected() {
    let (deployment, _server, http) = ledger().await;
    let empty = http.fed("").await;
    assert_eq!((&empty["records"], &empty["next_position"]), (&json!([]), &json!("0-0")));
    http.verdict(json!([record("calls", "a", 1), record("calls", "b", 1)])).await;
    // Late by event time, last by acceptance.
    http.verdict(with(record("calls", "late", 1), "event_timestamp", ago(600))).await;
    let page = http.fed("limit=2").await;
    assert_eq!(shown(page["records"].as_array().unwrap()), expected(&[("a", 1, "active"), ("b", 1, "active")]));
    let position = page["next_position"].as_str().unwrap();
    assert_eq!(position, "2-0");
    let page = http.fed(&format!("position={position}")).await;
    assert_eq!(shown(page["records"].as_array().unwrap()), expected(&[("late", 1, "active")]));
    let until = http.fed("position=1-0&until=2-0").await;
    assert_eq!(shown(until["records"].as_array().unwrap()), expected(&[("b", 1, "active")]));

    let id = page["records"][0]["id"].as_str().unwrap().to_owned();
    http.amend(&id, json!({ "value": 2, "reason": "x" })).await;
    http.deprecate(&id, json!({ "reason": "x" })).await;
    http.verdict(record("calls", "c", 1)).await;
    let page = http.fed("position=3-0").await;
    let corrected =
        [("c", 1, "active"), ("late", 1, "deprecated"), ("late", 2, "deprecated"), ("late", 2, "deprecated")];
    assert_eq!(
        shown(page["records"].as_array().unwrap()),
        expected(&corrected),
        "new ones first, then what is another now"
    );
    assert_eq!(page["next_position"], "4-3");

    // The watermark passes what has been seen, also when nothing more comes.
    let now = Utc::now();
    eventually("the watermark goes on", async || {
        let page = http.fed("position=4-3").await;
        let watermark: DateTime<Utc> = page["watermark"].as_str()?.parse().unwrap();
        (watermark > now).then_some(())
    })
    .await;
    // The same over NATS.
    let (client, tenant) = (deployment.client().await, "default".parse().unwrap());
    let request = FeedRequest { limit: Some(3), ..FeedRequest::default() };
    let page = client.read_feed(&tenant, &request).await.unwrap();
    assert_eq!((page.records.len(), page.next_position.as_str()), (3, "3-0"));
    // Read on and on: the next page is asked for before this one is worked on, and nothing is left out or told twice.
    let mut feed = client.feed(&tenant, Some("2-0".into()));
    let page = feed.next().await.unwrap();
    assert_eq!((page.records.len(), page.next_position.as_str()), (5, "4-3"));
    http.verdict(record("calls", "d", 1)).await;
    let page = feed.next().await.unwrap();
    assert_eq!((page.records[0].resource_id.as_str(), page.next_position.as_str()), ("d", "5-3"));
    let mut ahead = client.feed(&tenant, Some("99-0".into()));
    for _ in 0..2 {
        assert!(ahead.next().await.unwrap_err().message.contains("is ahead"), "an error does not move it");
    }

    for (query, problem) in [
        ("position=abc", "position: must be"),
        ("position=1", "position: must be"),
        ("position=-1-0", "position: must be"),
        ("position=%2B1-0", "position: must be"),
        ("position=6-0", "position: is ahead"),
        ("position=0-9", "position: is ahead"),
        ("position=99999999999999999999-0", "position: must be"),
        ("until=abc", "until: must be"),
        ("until=6-0", "until: is ahead"),
        ("position=3-0&until=2-3", "until: lies before"),
        ("limit=0", "limit: must lie"),
        ("limit=10001", "limit: must lie"),
        ("wait=26", "wait: must lie"),
        ("wait=-1", "wait: must lie"),
        ("wait=soon", "wait"),
        ("page=1", "page"),
    ] {
        let answer = http.get(&format!("{RECORDS}/feed?{query}")).await;
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("validation_error")), "{query}");
        assert!(answer.json()["message"].as_str().unwrap().contains(problem), "{query}: {}", answer.text);
    }
}

/// The client has several pages on their way, which end where it was told unless their records are larger than those before.
#[tokio::test]
async fn pages_that_are_read_at_once_fit_together() {
    let (deployment, _server, _) = ledger().await;
    let nats = deployment.nats().await;
    const MESSAGES: usize = 40;
    const RECORDS_OF_ONE: usize = 150;
    for message in 0..MESSAGES {
        // A stretch of large ones in the middle.
        let padding = "x".repeat(if (15..25).contains(&message) { 1500 } else { message });
        let one = |number: usize| {
            with(record("calls", &format!("{message}-{number}"), 1), "metadata", json!({ "padding": padding }))
        };
        let body = serde_json::to_vec(&(0..RECORDS_OF_ONE).map(one).collect::<Vec<_>>()).unwrap();
        publish(&nats, "usage.default.default", &[], body).await;
    }
    let all = MESSAGES * RECORDS_OF_ONE;
    let database = deployment.database().await;
    eventually("all are in the ledger", async || (rows(&database).await == all as i64).then_some(())).await;
    let expected: Vec<String> = (0..MESSAGES)
        .flat_map(|message| (0..RECORDS_OF_ONE).map(move |number| format!("{message}-{number}")))
        .collect();
    let client = deployment.client().await;
    let (mut feed, mut seen, mut pages) = (client.feed(&"default".parse().unwrap(), None), Vec::new(), Vec::new());
    while seen.len() < all {
        let page = feed.next().await.unwrap();
        pages.push(page.records.len());
        assert!(!page.records.is_empty(), "{} of {all} are missing; pages of {pages:?}", all - seen.len());
        seen.extend(page.records.into_iter().map(|record| record.resource_id));
    }
    assert!(seen == expected, "each once, in the order of acceptance; pages of {pages:?}");
    assert!((6..15).contains(&pages.len()) && pages.iter().max() > pages.iter().min(), "{pages:?}");
}

#[tokio::test]
async fn whoever_waits_hears_at_once() {
    let (deployment, _server, http) = ledger().await;
    let nats = deployment.nats().await;
    for round in 0..3 {
        let query = format!("position={round}-0&wait=20");
        let waiting = http.fed(&query);
        let publishing = async {
            let body = serde_json::to_vec(&record("calls", "r", round)).unwrap();
            publish(&nats, "usage.default.default", &[], body).await;
        };
        let (page, ()) = tokio::join!(waiting, publishing);
        assert_eq!(page["records"].as_array().unwrap().len(), 1, "{page}");
    }
    // Or that there was nothing.
    let page = http.fed("position=3-0&wait=50ms").await;
    assert_eq!((&page["records"], &page["next_position"]), (&json!([]), &json!("3-0")));
}

#[tokio::test]
async fn whoever_waits_holds_nobody_up() {
    let deployment = Deployment::new().await;
    let mut process = deployment.spawn_with(&[("TIDEMARK__SHUTDOWN__DRAIN_TIMEOUT", "10s")]);
    let http = process.http().await.key(API_KEY);
    process.is_ready().await;
    let Deployment { monitor_url, account, .. } = &deployment;
    let listening = format!("{monitor_url}/subsz?subs=1&acc={account}&test=tm.event.usage.default.fed");
    let stopping = async {
        eventually("it waits", async || {
            let listening: Value = reqwest::get(&listening).await.unwrap().json().await.unwrap();
            listening["subscriptions_list"].as_array().is_some_and(|all| !all.is_empty()).then_some(())
        })
        .await;
        process.signal(Signal::SIGTERM);
        assert_eq!(process.ended().await.0, Some(0));
    };
    // After 10 s it would be cut off.
    let (page, ()) = tokio::join!(http.fed("wait=20"), stopping);
    assert_eq!(page["records"], json!([]));
}

#[tokio::test]
async fn nothing_commits_behind_a_position() {
    let (deployment, _server, http) = ledger().await;
    let database = deployment.database().await;
    // Every transaction that tells the feed something is held for a while between taking its position and its commit.
    sqlx::raw_sql(
        "create function delay() returns trigger language plpgsql as $$
         begin perform pg_sleep(random() * 0.03); return null; end $$;
         create constraint trigger delay after insert on usage_feed deferrable initially deferred
         for each row execute function delay();",
    )
    .execute(&database)
    .await
    .unwrap();
    const SERIES: usize = 6;
    const ROUNDS: usize = 8;
    let write = |series: usize| {
        let (http, resource) = (http.clone(), format!("r{series}"));
        async move {
            for round in 0..ROUNDS {
                let one = record("calls", &resource, round);
                http.verdict(one.clone()).await;
                let query = format!("resource_id={resource}&page_size=1000");
                let found = http.all(&query).await;
                let id = found.iter().find(|found| found["idempotency_key"] == one["idempotency_key"]).unwrap();
                let id = id["id"].as_str().unwrap();
                let changed = match round % 2 {
                    0 => http.amend(id, json!({ "value": 7, "reason": "x" })).await,
                    _ => http.deprecate(id, json!({ "reason": "x" })).await,
                };
                assert_eq!(changed.status, 200, "{}", changed.text);
            }
        }
    };
    let stop = tokio_util::sync::CancellationToken::new();
    let read = async {
        let (mut position, mut all) = ("0-0".to_owned(), Vec::new());
        loop {
            let last = stop.is_cancelled();
            all.extend(http.fed_from(&mut position, 7).await);
            if last {
                return all;
            }
        }
    };
    let writers = async {
        join_all((0..SERIES).map(write)).await;
        stop.cancel();
    };
    let (seen, ()) = tokio::join!(read, writers);
    // Each row as often as it was told, and the record before its correction.
    let mut counts: BTreeMap<(String, i64), usize> = BTreeMap::new();
    for record in &seen {
        let key = (record["id"].as_str().unwrap().to_owned(), record["revision"].as_i64().unwrap());
        if key.1 > 1 {
            assert!(counts.contains_key(&(key.0.clone(), 1)), "a correction came before its record");
        }
        *counts.entry(key).or_default() += 1;
    }
    let rows: Vec<(String, i32, String)> =
        sqlx::query_as("select id::text, revision, status from usage_records").fetch_all(&database).await.unwrap();
    assert_eq!(rows.len(), SERIES * ROUNDS + SERIES * ROUNDS.div_ceil(2));
    for (id, revision, status) in rows {
        // What was withdrawn or replaced was told twice.
        let times = if status == "active" { 1 } else { 2 };
        assert_eq!(counts.get(&(id.clone(), revision.into())), Some(&times), "{id} {revision} {status}");
    }
    assert_eq!(counts.len(), SERIES * ROUNDS + SERIES * ROUNDS.div_ceil(2));
}
