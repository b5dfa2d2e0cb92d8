//! Replacing ranges of the ledger.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use futures::{FutureExt, StreamExt, future::join_all};
use serde_json::{Value, json};
use sqlx::PgPool;
use tidemark::{
    api::usage::{BackfillAnswer, BackfillId, BackfillMode, BackfillRequest, TimeRange},
    config::Config,
    error::Code,
    jetstream::round_trip,
};
use tokio::time::timeout;
use uuid::Uuid;

use crate::{
    support::{Answer, Barrier, Http, eventually},
    usage::{METADATA, RECORDS, ledger, ledger_with, publish, record, rows, with},
};

const BACKFILL: &str = "/api/uc/v1/usage/backfill";

/// A moment of an hour that has passed.
fn at(minutes: i64) -> DateTime<Utc> {
    let hour = (Utc::now() - TimeDelta::hours(3)).timestamp() / 3600 * 3600;
    DateTime::from_timestamp(hour + minutes * 60, 0).unwrap()
}

fn of(usage_type: &str, resource: &str, minutes: i64, value: i64) -> Value {
    with(record(usage_type, resource, value), "event_timestamp", json!(at(minutes)))
}

fn request(usage_type: &str, minutes: (i64, i64), events: Vec<Value>) -> Value {
    json!({
        "usage_type": usage_type, "time_range": { "from": at(minutes.0), "to": at(minutes.1) },
        "replacement_events": events, "mode": "blocking", "reason": "a meter was wrong",
    })
}

impl Http {
    async fn submit(&self, request: Value) -> Answer {
        self.post(BACKFILL, request).await
    }

    async fn status(&self, id: &Value) -> Value {
        let answer = self.get(&format!("{BACKFILL}/{}", id.as_str().unwrap())).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    }

    async fn revert(&self, id: &Value) -> Answer {
        self.post(&format!("{BACKFILL}/{}/revert", id.as_str().unwrap()), json!({ "reason": "it was right" })).await
    }

    /// Resources and values that are active.
    async fn active(&self, query: &str) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mut found: Vec<_> = (self.all(&format!("page_size=1000&{query}")).await.iter())
            .map(|one| (text(&one["resource_id"]), text(&one["value"])))
            .collect();
        found.sort();
        found
    }
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(resource, value)| (resource.to_string(), value.to_string())).collect()
}

/// Tallies are what the ledger has.
pub async fn tallies_match(database: &PgPool) {
    let (tallied, kept): (i64, i64) = sqlx::query_as(
        "select (select coalesce(sum(records), 0)::bigint from usage_tallies), (select count(*) from usage_records)",
    )
    .fetch_one(database)
    .await
    .unwrap();
    assert_eq!(tallied, kept, "the tallies");
}

/// And heads are the latest active readings, and nothing is left behind.
async fn is_consistent(database: &PgPool) {
    tallies_match(database).await;
    let strange: i64 = sqlx::query_scalar(
        "select count(*) from counter_heads head full join (
             select distinct on (series) series, event_timestamp, value from usage_records
             where series is not null and status = 'active' order by series, event_timestamp desc, value desc
         ) latest using (series)
         where (head.event_timestamp, head.value) is distinct from (latest.event_timestamp, latest.value)",
    )
    .fetch_one(database)
    .await
    .unwrap();
    assert_eq!(strange, 0, "the heads");
    let parked: i64 = sqlx::query_scalar("select count(*) from usage_parked").fetch_one(database).await.unwrap();
    let ranges: i64 = sqlx::query_scalar("select count(*) from backfill_ranges").fetch_one(database).await.unwrap();
    let events: i64 = sqlx::query_scalar("select count(*) from backfill_events").fetch_one(database).await.unwrap();
    assert_eq!((parked, ranges, events), (0, 0, 0), "nothing is left behind");
}

#[tokio::test]
async fn a_range_is_archived_and_replaced_and_can_be_taken_back() {
    let (deployment, _server, http) = ledger().await;
    let sent =
        json!([of("calls", "a", 10, 1), of("calls", "b", 20, 2), of("calls", "c", 30, 3), of("bytes", "d", 15, 9)]);
    assert_eq!(http.verdict(sent).await, (4, 0, vec![]));
    let replacement =
        vec![of("calls", "a", 10, 5), with(of("calls", "new", 25, 7), "metadata", json!({ "by": "hand" }))];
    let wanted = request("calls", (0, 30), replacement);
    let nats = deployment.nats().await;
    let mut news = nats.subscribe("tm.event.usage.default.backfill").await.unwrap();
    round_trip(&nats).await.unwrap();
    let mut told = async || {
        let event = timeout(Duration::from_secs(20), news.next()).await.expect("it is told").unwrap();
        serde_json::from_slice::<Value>(&event.payload).unwrap()
    };

    let preview = http.submit(with(wanted.clone(), "dry_run", true)).await;
    assert_eq!(preview.status, 200, "{}", preview.text);
    let preview = preview.json();
    assert_eq!(
        (&preview["events_archived"], &preview["events_added"], &preview["dry_run"]),
        (&json!(2), &json!(2), &json!(true))
    );
    let a = preview["resources"].as_array().unwrap().iter().find(|one| one["resource_id"] == "a").unwrap();
    assert_eq!((&a["value_archived"], &a["value_added"]), (&json!("1"), &json!("5")));
    assert_eq!(http.active("usage_type=calls").await, pairs(&[("a", "1"), ("b", "2"), ("c", "3")]));

    let mut feed = http.fed("limit=100").await["next_position"].as_str().unwrap().to_owned();
    let marked = http.clone().admin().put_json("/api/uc/v1/admin/invoiced/default", json!({ "until": at(5) })).await;
    assert_eq!(marked.status, 200, "{}", marked.text);
    let done = http.submit(wanted).await;
    assert_eq!(done.status, 201, "{}", done.text);
    let done = done.json();
    for (field, expected) in [
        ("tenant_id", json!("default")),
        ("usage_type", json!("calls")),
        ("range_start", json!(at(0))),
        ("range_end", json!(at(30))),
        ("mode", json!("blocking")),
        ("status", json!("completed")),
        ("reason", json!("a meter was wrong")),
        ("events_added", json!(2)),
        ("events_archived", json!(2)),
        ("affects_invoiced_period", json!(true)),
        ("audit_record_id", done["id"].clone()),
        ("error", Value::Null),
        ("progress", Value::Null),
        ("reverted_at", Value::Null),
    ] {
        assert_eq!(done[field], expected, "{field}");
    }
    assert!(done["operator_id"].as_str().unwrap().contains("default") && done["completed_at"].is_string(), "{done}");
    assert_eq!(http.status(&done["id"]).await, done);
    assert_eq!(told().await, done);
    assert_eq!(
        http.active("usage_type=calls").await,
        pairs(&[("a", "5"), ("c", "3"), ("new", "7")]),
        "the end is not included"
    );
    assert_eq!(http.all("include_archived=true").await.len(), 6);
    let archived = http.all("include_archived=true&resource_id=b").await;
    assert_eq!((&archived[0]["status"], &archived[0]["backfill_operation_id"]), (&json!("archived"), &done["id"]));
    assert_eq!(http.get(METADATA).await.json()["total_records"], 6);
    let page = http.fed(&format!("position={feed}")).await;
    let seen: Vec<(Value, Value)> = page["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["resource_id"].clone(), one["status"].clone()))
        .collect();
    let expected = [("a", "archived"), ("b", "archived"), ("a", "active"), ("new", "active")];
    assert_eq!(seen, expected.map(|(a, b)| (json!(a), json!(b))));
    feed = page["next_position"].as_str().unwrap().to_owned();

    let reverted = http.revert(&done["id"]).await;
    assert_eq!(reverted.status, 200, "{}", reverted.text);
    assert_eq!(reverted.json()["revert_reason"], "it was right");
    assert_eq!(told().await, reverted.json());
    assert_eq!(http.active("usage_type=calls").await, pairs(&[("a", "1"), ("b", "2"), ("c", "3")]));
    let page = http.fed(&format!("position={feed}")).await;
    assert_eq!(page["records"].as_array().unwrap().len(), 4);
    let again = http.revert(&done["id"]).await;
    assert_eq!((again.status, &again.json()["code"]), (409, &json!("backfill_conflict")), "{}", again.text);
    is_consistent(&deployment.database().await).await;

    // The same over NATS, with records of another source.
    let (client, tenant, source) = (deployment.client().await, "default".parse().unwrap(), "default".parse().unwrap());
    let request = BackfillRequest {
        usage_type: "calls".into(),
        time_range: TimeRange { from: at(0), to: at(60) },
        replacement_events: vec![],
        mode: BackfillMode::NonBlocking,
        reason: "all of it was wrong".into(),
        dry_run: false,
        staged: false,
    };
    let BackfillAnswer::Operation(done) = client.submit_backfill(&tenant, &source, &request).await.unwrap() else {
        panic!("no operation")
    };
    assert_eq!((done.events_archived, done.events_added), (Some(3), Some(0)));
    assert_eq!(client.get_backfill(&tenant, &BackfillId { id: done.id }).await.unwrap(), *done);
    assert!(http.active("usage_type=calls").await.is_empty());
}

#[tokio::test]
async fn bad_backfills_change_nothing() {
    let (deployment, _server, http) = ledger().await;
    http.verdict(of("calls", "a", 10, 1)).await;
    let good = |events: Vec<Value>| request("calls", (0, 30), events);
    let range =
        |from: DateTime<Utc>, to: DateTime<Utc>| with(good(vec![]), "time_range", json!({ "from": from, "to": to }));
    let day = TimeDelta::days(1);
    for (request, status, code, problem) in [
        (range(at(30), at(0)), 400, "validation_error", "time_range.to: must lie after"),
        (range(at(0) - day * 367, at(0)), 400, "backfill_window_exceeded", "time_range.from"),
        (
            range(at(0) - day * 91, at(0)),
            400,
            "backfill_window_exceeded",
            "time_range.from: lies more than 90 days back",
        ),
        (range(at(0), Utc::now() + day), 400, "validation_error", "time_range.to: lies in the future"),
        (with(good(vec![]), "mode", "sometimes"), 400, "validation_error", "mode"),
        (with(good(vec![]), "reason", ""), 400, "validation_error", "reason"),
        (with(good(vec![]), "usage_type", "nonsense"), 404, "type_not_found", "usage_type"),
        (with(good(vec![]), "colour", "red"), 400, "validation_error", "colour"),
        (
            good(vec![of("calls", "a", 5, 1), of("calls", "a", 30, 1)]),
            400,
            "validation_error",
            "replacement_events[1]: event_timestamp: lies outside",
        ),
        (good(vec![of("bytes", "a", 5, 1)]), 400, "validation_error", "replacement_events[0]: usage_type"),
        (
            good(vec![with(of("calls", "a", 5, 1), "source_id", "other")]),
            403,
            "source_not_authorized",
            "replacement_events[0]",
        ),
        (good(vec![with(of("calls", "a", 5, 1), "tenant_id", "other")]), 400, "validation_error", "tenant_id"),
        (good(vec![json!(7)]), 400, "validation_error", "replacement_events[0]"),
        (good(vec![json!([])]), 400, "validation_error", "replacement_events[0]: a record must be an object"),
        (good(vec![json!({})]), 400, "validation_error", "usage_type"),
        (with(good(vec![]), "replacement_events", "all"), 400, "validation_error", "replacement_events"),
        (with(with(good(vec![]), "dry_run", true), "staged", true), 400, "validation_error", "dry_run"),
        (
            request("bytes", (0, 30), vec![of("bytes", "x", 5, 9), of("bytes", "x", 6, 8)]),
            422,
            "counter_violation",
            "x of default would go down",
        ),
    ] {
        let poor = http.with_new_key(json!({ "tenant": "default", "source": "default", "roles": ["usage"] })).await;
        let answer = poor.submit(request.clone()).await;
        assert_eq!(
            (answer.status, answer.json()["code"].as_str().unwrap()),
            (status, code),
            "{request}: {}",
            answer.text
        );
        assert!(answer.json()["message"].as_str().unwrap().contains(problem), "{request}: {}", answer.text);
    }
    // The role opens what is further back, and no other role does.
    let key = |roles| json!({ "tenant": "default", "source": "default", "roles": roles });
    let admin = http.with_new_key(key(json!(["usage", "admin"]))).await;
    let answer = admin.submit(range(at(0) - day * 300, at(0) - day * 100)).await;
    assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("backfill_window_exceeded")), "{}", answer.text);
    let elevated = http.with_new_key(key(json!(["usage", "elevated"]))).await;
    let answer = elevated.submit(range(at(0) - day * 300, at(0) - day * 100)).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let old = answer.json()["id"].clone();
    let answer = admin.revert(&old).await;
    assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("backfill_window_exceeded")), "{}", answer.text);
    assert_eq!(elevated.revert(&old).await.status, 200);
    let answer = elevated.submit(range(at(0) - day * 367, at(0))).await;
    assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("validation_error")), "{}", answer.text);

    let unknown = json!(Uuid::now_v7().to_string());
    assert_eq!(http.get(&format!("{BACKFILL}/{}", unknown.as_str().unwrap())).await.status, 404);
    assert_eq!(http.revert(&unknown).await.status, 404);
    let other =
        http.with_new_key(json!({ "tenant": "globex", "source": "default", "roles": ["usage", "admin"] })).await;
    let done = http.submit(good(vec![])).await.json()["id"].clone();
    for path in ["", "/revert", "/commit", "/cancel", "/events"] {
        let path = format!("{BACKFILL}/{}{path}", done.as_str().unwrap());
        let answer = match path.ends_with(done.as_str().unwrap()) {
            true => other.get(&path).await,
            false if path.ends_with("events") => {
                other.post(&path, json!({ "records": [of("calls", "a", 1, 1)] })).await
            }
            false if path.ends_with("revert") => other.post(&path, json!({ "reason": "x" })).await,
            false => other.post(&path, json!({})).await,
        };
        assert_eq!(answer.status, 404, "{path}: {}", answer.text);
    }
    let invoiced = other.get("/api/uc/v1/admin/invoiced/default").await;
    assert_eq!(invoiced.status, 404, "{}", invoiced.text);
    assert_eq!(http.revert(&done).await.status, 200);
    assert_eq!(http.active("").await, pairs(&[("a", "1")]));
    is_consistent(&deployment.database().await).await;
}

/// Begins a backfill whose records are to come.
async fn staged(http: &Http, request: Value) -> Value {
    let begun = http.submit(with(request, "staged", true)).await;
    assert_eq!(begun.status, 202, "{}", begun.text);
    assert_eq!((&begun.json()["status"], &begun.json()["progress"]["phase"]), (&json!("pending"), &json!("receiving")));
    begun.json()["id"].clone()
}

async fn send(http: &Http, id: &Value, records: Vec<Value>) -> Answer {
    http.post(&format!("{BACKFILL}/{}/events", id.as_str().unwrap()), json!({ "records": records })).await
}

async fn commit(http: &Http, id: &Value) -> Answer {
    http.post(&format!("{BACKFILL}/{}/commit", id.as_str().unwrap()), json!({})).await
}

#[tokio::test]
async fn records_may_come_in_parts() {
    let (deployment, _server, http) = ledger().await;
    http.verdict(of("calls", "a", 10, 1)).await;
    let id = staged(&http, request("calls", (0, 30), vec![of("calls", "first", 1, 1)])).await;
    let (one, two) = (of("calls", "one", 2, 1), of("calls", "two", 3, 1));
    let received = send(&http, &id, vec![one.clone(), two.clone(), one.clone()]).await;
    assert_eq!((received.status, received.json()), (200, json!({ "accepted": 2, "duplicates": 1, "rejected": [] })));
    let received =
        send(&http, &id, vec![two.clone(), of("calls", "three", 4, 1), of("calls", "late", 31, 1)]).await.json();
    assert_eq!((&received["accepted"], &received["duplicates"]), (&json!(1), &json!(1)));
    assert_eq!(
        (&received["rejected"][0]["index"], &received["rejected"][0]["reason"]["code"]),
        (&json!(2), &json!("validation_error"))
    );
    let other = send(&http, &id, vec![with(one, "value", 9)]).await;
    assert_eq!((other.status, &other.json()["accepted"]), (200, &json!(0)), "{}", other.text);
    assert_eq!(other.json()["rejected"][0]["reason"]["code"], "duplicate_record", "{}", other.text);
    assert_eq!(http.status(&id).await["progress"]["total"], 4);
    assert_eq!(http.active("").await, pairs(&[("a", "1")]), "nothing is changed yet");
    let done = commit(&http, &id).await;
    assert_eq!((done.status, &done.json()["events_added"]), (201, &json!(4)), "{}", done.text);
    assert_eq!(http.active("").await, pairs(&[("first", "1"), ("one", "1"), ("three", "1"), ("two", "1")]));
    for answer in [commit(&http, &id).await, send(&http, &id, vec![two]).await] {
        assert_eq!((answer.status, &answer.json()["details"]["status"]), (409, &json!("completed")), "{}", answer.text);
    }
    let id = staged(&http, request("calls", (0, 30), vec![])).await;
    let canceled = http.post(&format!("{BACKFILL}/{}/cancel", id.as_str().unwrap()), json!({})).await;
    assert_eq!((canceled.status, &canceled.json()["status"]), (200, &json!("failed")), "{}", canceled.text);
    assert_eq!(http.active("").await.len(), 4);
    is_consistent(&deployment.database().await).await;
}

#[tokio::test]
async fn of_a_commit_and_a_cancel_at_once_each_is_answered_truly() {
    let (deployment, _server, http) = ledger().await;
    for _ in 0..5 {
        let id = staged(&http, request("calls", (0, 30), vec![of("calls", "a", 1, 1)])).await;
        let path = format!("{BACKFILL}/{}/cancel", id.as_str().unwrap());
        let cancel = || http.post(&path, json!({})).boxed();
        let answers = [commit(&http, &id).boxed(), cancel(), cancel()];
        let [committed, canceled @ ..] = <[Answer; 3]>::try_from(join_all(answers).await).ok().unwrap();
        let ended = http.status(&id).await["status"].clone();
        assert_eq!(committed.status == 201, ended == "completed", "{ended}: {}", committed.text);
        let successes = canceled.iter().filter(|answer| answer.status == 200);
        assert_eq!(successes.count(), usize::from(ended == "failed"), "{ended}: {canceled:?}");
        for refused in canceled.iter().chain([&committed]).filter(|answer| answer.status == 409) {
            assert_ne!(refused.json()["details"]["status"], "pending", "{}", refused.text);
        }
    }
    is_consistent(&deployment.database().await).await;
}

#[tokio::test]
async fn a_closed_range_refuses_requests_and_lets_published_records_wait() {
    let (deployment, _server, http) = ledger().await;
    let (nats, database) = (deployment.nats().await, deployment.database().await);
    http.verdict(json!([of("bytes", "disk", 1, 1), of("bytes", "disk", 10, 100), of("calls", "a", 10, 1)])).await;
    let id = staged(&http, request("bytes", (5, 30), vec![of("bytes", "disk", 12, 150)])).await;
    // Requests learn it at once, and nothing is kept.
    let refused = http.post(RECORDS, json!([of("calls", "b", 10, 1), of("bytes", "disk", 20, 200)])).await;
    let error = refused.json();
    assert_eq!((refused.status, &error["code"]), (409, &json!("BACKFILL_IN_PROGRESS")), "{}", refused.text);
    assert!(error["details"]["retry_after_ms"].as_u64().unwrap() >= 1000, "{error}");
    assert_eq!(error["details"]["locked_range"], json!({ "from": at(5), "to": at(30) }));
    let (before, after) = (of("bytes", "disk", 4, 50), of("calls", "c", 10, 1));
    assert_eq!(http.verdict(json!([before, after])).await, (2, 0, vec![]), "another type, or another time");
    let corrected = http
        .amend(http.all("resource_id=disk").await[2]["id"].as_str().unwrap(), json!({ "value": 99, "reason": "x" }))
        .await;
    assert_eq!(
        (corrected.status, &corrected.json()["code"]),
        (409, &json!("BACKFILL_IN_PROGRESS")),
        "{}",
        corrected.text
    );
    // Published ones wait, and later ones of the same counter behind them.
    let put = async |record: &Value| {
        publish(&nats, "usage.default.default", &[], serde_json::to_vec(record).unwrap()).await;
    };
    let (inside, behind, beside) =
        (of("bytes", "disk", 20, 200), of("bytes", "disk", 40, 300), of("bytes", "other", 40, 5));
    for record in [&inside, &behind, &beside] {
        put(record).await;
    }
    eventually("what may be written is", async || {
        let parked: i64 = sqlx::query_scalar("select count(*) from usage_parked").fetch_one(&database).await.unwrap();
        let other = http.active("resource_id=other").await;
        (parked == 2 && other.len() == 1).then_some(())
    })
    .await;
    let watermark: DateTime<Utc> = eventually("every shard has said how far it is", async || {
        http.fed("limit=1000").await["watermark"].as_str().map(|watermark| watermark.parse().unwrap())
    })
    .await;
    let parked_at: DateTime<Utc> =
        sqlx::query_scalar("select min(came_at) from usage_parked").fetch_one(&database).await.unwrap();
    assert!(watermark <= parked_at, "the feed does not claim what waits");
    // A second one on a part of the range has to wait, one beside it has not.
    let overlapping = http.submit(request("bytes", (29, 50), vec![])).await;
    let error = overlapping.json();
    assert_eq!((overlapping.status, &error["code"]), (409, &json!("BACKFILL_RANGE_OVERLAP")), "{}", overlapping.text);
    assert_eq!((&error["details"]["locked_range"]["from"], &error["details"]["backfill_id"]), (&json!(at(5)), &id));
    let beside = http.submit(request("calls", (0, 50), vec![])).await;
    assert_eq!(beside.status, 201, "{}", beside.text);
    let beside = http.submit(request("bytes", (30, 35), vec![])).await;
    assert_eq!(beside.status, 201, "{}", beside.text);

    let done = commit(&http, &id).await;
    assert_eq!(done.status, 201, "{}", done.text);
    let expected = pairs(&[("disk", "1"), ("disk", "150"), ("disk", "200"), ("disk", "300"), ("disk", "50")]);
    eventually("what waited is written", async || (http.active("resource_id=disk").await == expected).then_some(()))
        .await;
    assert_eq!(http.reconciled().await, [10, 8, 0, 2], "each is counted once, and those that were refused");
    is_consistent(&database).await;
    // Sent again, they are duplicates.
    assert_eq!(http.verdict(json!([inside, behind])).await, (0, 2, vec![]));
}

#[tokio::test]
async fn a_part_of_a_replayed_message_that_waits_is_not_lost() {
    const QUARANTINE: &str = "/api/uc/v1/usage/quarantine";
    let (deployment, _server, http) = ledger().await;
    let (nats, database) = (deployment.nats().await, deployment.database().await);
    let left = async || http.get(QUARANTINE).await.json()["records"].as_array().unwrap().clone();
    // Two records with a header that is none of a caller's: one entry.
    let message = json!([of("calls", "a", 10, 1), of("bytes", "disk", 20, 200)]).to_string();
    publish(&nats, "usage.default.default", &[("Tidemark-Replay", "1")], message.into()).await;
    let entry = eventually("it is refused", async || left().await.first().cloned()).await;
    let id = staged(&http, request("bytes", (5, 30), vec![of("bytes", "disk", 12, 500)])).await;
    let replayed = async { http.post(&format!("{QUARANTINE}/replay"), json!({ "ids": [entry["id"]] })).await };
    let meanwhile = async {
        eventually("one is taken", async || (http.active("resource_id=a").await.len() == 1).then_some(())).await;
        assert_eq!(left().await, [] as [Value; 0], "what waits is no business of quarantine");
        // The backfill makes it a counter that falls.
        assert_eq!(commit(&http, &id).await.status, 201);
        let refused = eventually("it is refused for itself", async || left().await.first().cloned()).await;
        assert_ne!(refused["id"], entry["id"]);
        let told = (&refused["reason"]["code"], &refused["record"]["resource_id"]);
        assert_eq!(told, (&json!("counter_violation"), &json!("disk")));
    };
    // Whoever asked for it waits for both.
    let (replayed, ()) = tokio::join!(replayed, meanwhile);
    assert!([200, 202].contains(&replayed.status), "{}", replayed.text);
    is_consistent(&database).await;
}

#[tokio::test]
async fn whoever_begins_and_goes_away_loses_the_range() {
    let (deployment, _server, http) = ledger_with(|config| config.usage.backfill_lease = Duration::from_secs(1)).await;
    http.verdict(of("calls", "a", 10, 1)).await;
    let id = staged(&http, request("calls", (0, 30), vec![of("calls", "b", 10, 1)])).await;
    publish(
        &deployment.nats().await,
        "usage.default.default",
        &[],
        serde_json::to_vec(&of("calls", "w", 11, 1)).unwrap(),
    )
    .await;
    eventually("the lease ends", async || (http.status(&id).await["status"] == "failed").then_some(())).await;
    assert!(http.status(&id).await["error"]["message"].as_str().unwrap().contains("lease"));
    let late = send(&http, &id, vec![of("calls", "c", 10, 1)]).await;
    assert_eq!(late.status, 409, "{}", late.text);
    assert_eq!(commit(&http, &id).await.status, 409);
    eventually("what waited is written", async || {
        (http.active("").await == pairs(&[("a", "1"), ("w", "1")])).then_some(())
    })
    .await;
    is_consistent(&deployment.database().await).await;
}

/// Live traffic of one counter and one gauge per resource while `during` goes on; what was sent.
async fn live(http: &Http, nats: &async_nats::Client, during: impl Future<Output = ()>) -> Vec<Value> {
    let stop = tokio_util::sync::CancellationToken::new();
    let mut sent = Vec::new();
    let traffic = async {
        let mut round = 0;
        while !stop.is_cancelled() {
            round += 1;
            for resource in ["r0", "r1", "r2"] {
                // Some in the range, some not; by request and published.
                let gauge = of("calls", resource, round % 60, round);
                let counter =
                    with(record("bytes", resource, round), "event_timestamp", json!(at(0) + TimeDelta::seconds(round)));
                match round % 2 {
                    0 => {
                        let body = serde_json::to_vec(&json!([gauge, counter])).unwrap();
                        publish(nats, "usage.default.default", &[], body).await;
                        sent.extend([gauge, counter]);
                    }
                    _ => {
                        let answer = http.post(RECORDS, json!([gauge, counter])).await;
                        match answer.status {
                            200 => {
                                assert_eq!(answer.json()["accepted"], 2, "{}", answer.text);
                                sent.extend([gauge, counter]);
                            }
                            202 => sent.extend([gauge, counter]),
                            status => assert_eq!(status, 409, "{}", answer.text),
                        }
                    }
                }
            }
        }
    };
    tokio::join!(traffic, async {
        during.await;
        stop.cancel();
    });
    sent
}

#[tokio::test]
async fn live_traffic_and_backfills_in_both_modes_add_up() {
    // A request whose record waits for the range hears nothing for as long as this.
    let (deployment, _server, http) = ledger_with(|config| config.usage.answer_within = Duration::from_secs(5)).await;
    let (nats, database) = (deployment.nats().await, deployment.database().await);
    let mut all = live(&http, &nats, async {
        eventually("some", async || (rows(&database).await > 60).then_some(())).await;
    })
    .await;
    let mut added = Vec::new();
    for (number, mode) in ["blocking", "non_blocking", "blocking", "non_blocking"].into_iter().enumerate() {
        let replacement =
            vec![of("calls", &format!("b{number}"), 5, 1000), of("calls", &format!("b{number}"), 35, 1000)];
        added.extend(replacement.iter().cloned());
        let wanted = with(request("calls", (0, 60), vec![]), "mode", mode);
        let sent = live(&http, &nats, async {
            let id = staged(&http, wanted).await;
            let seen = rows(&database).await;
            eventually("traffic beside it", async || (rows(&database).await > seen + 20).then_some(())).await;
            assert_eq!(send(&http, &id, replacement).await.status, 200);
            let done = commit(&http, &id).await;
            assert_eq!(done.status, 201, "{}", done.text);
            let seen = rows(&database).await;
            eventually("traffic after it", async || (rows(&database).await > seen + 20).then_some(())).await;
        })
        .await;
        all.extend(sent);
    }
    let expected = (all.len() + added.len()) as i64;
    eventually("all is written", async || (rows(&database).await >= expected).then_some(())).await;
    let found = http.all("page_size=1000&include_archived=true").await;
    assert_eq!(found.len() as i64, expected);
    for sent in all.iter().chain(&added) {
        let count = found.iter().filter(|one| one["idempotency_key"] == sent["idempotency_key"]).count();
        assert_eq!(count, 1, "{sent}");
    }
    // Counters were left alone. Of the gauges the last replacement stands, with what came since.
    let counters = all.iter().filter(|one| one["usage_type"] == "bytes").count();
    assert_eq!(http.all("usage_type=bytes&page_size=1000").await.len(), counters);
    let replaced = http.active("resource_id=b3").await;
    assert_eq!(replaced, pairs(&[("b3", "1000"), ("b3", "1000")]));
    for number in 0..3 {
        assert!(http.active(&format!("resource_id=b{number}")).await.is_empty(), "{number}");
    }
    is_consistent(&database).await;
}

#[tokio::test]
async fn disjoint_backfills_run_side_by_side() {
    let (deployment, _server, http) = ledger().await;
    let sent: Vec<Value> = (0..60).map(|minute| of("bytes", "disk", minute, minute)).collect();
    http.verdict(json!(sent)).await;
    let replace = |part: i64| {
        let events = (part * 10..part * 10 + 10).map(|minute| of("bytes", "disk", minute, minute)).collect();
        let (http, request) = (http.clone(), request("bytes", (part * 10, part * 10 + 10), events));
        async move { http.submit(request).await }
    };
    for answer in join_all((0..6).map(replace)).await {
        assert_eq!(answer.status, 201, "{}", answer.text);
    }
    let found = http.all("usage_type=bytes").await;
    assert_eq!(found.len(), 60);
    assert!(found.iter().all(|one| one["added_by"].is_string() && one["backfill_operation_id"].is_null()));
    is_consistent(&deployment.database().await).await;
}

#[tokio::test]
async fn a_crash_in_the_middle_leaves_all_or_nothing() {
    let (deployment, server, http) = ledger().await;
    let database = deployment.database().await;
    let before: Vec<Value> = (0..30).map(|minute| of("bytes", "disk", minute, minute)).collect();
    http.verdict(json!(before)).await;
    server.stop().await;
    let settings = [("TIDEMARK__USAGE__BACKFILL_LEASE", "1s")];
    // At each of these the transaction stands still, and the process is killed there.
    for (table, when, written) in [
        ("usage_records", "after update", false),
        ("usage_records", "after insert", false),
        ("counter_heads", "after update", false),
        ("usage_tallies", "after update", false),
        ("usage_feed", "after insert", false),
        ("backfill_ranges", "after delete", true),
    ] {
        let mut doomed = deployment.spawn_with(&settings);
        let http = doomed.http().await.key(crate::support::API_KEY);
        doomed.is_ready().await;
        let events = (0..30).map(|minute| of("bytes", "disk", minute, minute + 1)).collect();
        let id = staged(&http, request("bytes", (0, 60), events)).await;
        let trigger =
            format!("create trigger barrier {when} on {table} for each statement execute function wait_here()");
        let barrier = Barrier::at(&database, table, &trigger).await;
        let (caller, path) = (http.clone(), format!("{BACKFILL}/{}/commit", id.as_str().unwrap()));
        let call = tokio::spawn(async move { caller.post(&path, json!({})).await });
        barrier.reached().await;
        doomed.kill();
        call.abort();
        barrier.lift().await;
        let server = deployment.serve_with(lease).await;
        let http = server.http().key(crate::support::API_KEY);
        let ended = eventually("it is ended", async || {
            let status = http.status(&id).await;
            status["progress"].is_null().then_some(status)
        })
        .await;
        let expected = if written { "completed" } else { "failed" };
        assert_eq!(ended["status"], expected, "{table} {when}: {ended}");
        let sum: i64 = http
            .all("usage_type=bytes")
            .await
            .iter()
            .map(|one| one["value"].as_str().unwrap().parse::<i64>().unwrap())
            .sum();
        assert_eq!(sum, (0..30).sum::<i64>() + if written { 30 } else { 0 }, "{table} {when}");
        is_consistent(&database).await;
        server.stop().await;
    }
}

fn lease(config: &mut Config) {
    config.usage.backfill_lease = Duration::from_secs(1);
}

#[tokio::test]
async fn what_was_corrected_since_can_not_be_reverted() {
    let (deployment, _server, http) = ledger().await;
    http.verdict(of("calls", "a", 10, 1)).await;
    let done = http.submit(request("calls", (0, 30), vec![of("calls", "b", 10, 2)])).await.json()["id"].clone();
    let id = http.all("").await[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(http.amend(&id, json!({ "value": 3, "reason": "x" })).await.status, 200);
    let refused = http.revert(&done).await;
    assert_eq!((refused.status, &refused.json()["code"]), (409, &json!("backfill_conflict")), "{}", refused.text);
    assert_eq!(http.active("").await, pairs(&[("b", "3")]));
    is_consistent(&deployment.database().await).await;
    // A backfill over it takes the amendment's place, and the one below can't be reverted any more.
    let over = http.submit(request("calls", (0, 30), vec![])).await.json()["id"].clone();
    assert_eq!(http.revert(&done).await.status, 409);
    assert_eq!(http.revert(&over).await.status, 200);
    assert_eq!(http.active("").await, pairs(&[("b", "3")]));
    // One that was replaced and put back can be reverted as before.
    let below = http.submit(request("bytes", (0, 30), vec![of("bytes", "x", 10, 2)])).await.json()["id"].clone();
    let above = http.submit(request("bytes", (0, 30), vec![of("bytes", "y", 10, 2)])).await.json()["id"].clone();
    assert_eq!(http.revert(&below).await.status, 409, "something lies above it");
    for id in [&above, &below] {
        assert_eq!(http.revert(id).await.status, 200);
    }
    assert!(http.active("usage_type=bytes").await.is_empty());
    let error = deployment
        .client()
        .await
        .get_backfill(&"globex".parse().unwrap(), &BackfillId { id: over.as_str().unwrap().parse().unwrap() })
        .await
        .unwrap_err();
    assert_eq!(error.code, Code::NotFound);
    is_consistent(&deployment.database().await).await;
}

#[tokio::test]
async fn a_repeat_does_not_wait_for_a_backfill_that_changes_it() {
    let (deployment, _server, http) = ledger().await;
    let database = deployment.database().await;
    let known = of("calls", "a", 10, 1);
    http.verdict(known.clone()).await;
    // The backfill has archived the row, and stands still before its commit.
    let mut holding = database.acquire().await.unwrap();
    sqlx::raw_sql(
        "create function stand_still() returns trigger language plpgsql as $$
         begin perform pg_advisory_xact_lock(7, 7); return null; end $$;
         create trigger stand_still after update on usage_records for each statement execute function stand_still();
         select pg_advisory_lock(7, 7);",
    )
    .execute(&mut *holding)
    .await
    .unwrap();
    let wanted = with(request("calls", (0, 30), vec![of("calls", "b", 10, 2)]), "mode", "non_blocking");
    let id = staged(&http, wanted).await;
    let committing = commit(&http, &id);
    let repeating = async {
        eventually("it stands still", async || {
            let waiting: i64 = sqlx::query_scalar(
                "select count(*) from pg_locks where locktype = 'advisory' and classid = 7 and not granted",
            )
            .fetch_one(&database)
            .await
            .unwrap();
            (waiting > 0).then_some(())
        })
        .await;
        let verdict = http.verdict(json!([known, of("calls", "other", 40, 1)])).await;
        sqlx::raw_sql("select pg_advisory_unlock(7, 7)").execute(&mut *holding).await.unwrap();
        verdict
    };
    let (done, verdict) = tokio::join!(committing, repeating);
    assert_eq!(verdict, (1, 1, vec![]), "a verdict, while the backfill was at work");
    assert!([201, 202].contains(&done.status), "{}", done.text);
    eventually("it is done", async || (http.status(&id).await["status"] == "completed").then_some(())).await;
    assert_eq!(http.active("usage_type=calls").await, pairs(&[("b", "2"), ("other", "1")]));
}

#[tokio::test]
async fn nobody_has_too_many_backfills_at_once() {
    let (_deployment, _server, http) = ledger().await;
    for minute in 0..10 {
        staged(&http, request("calls", (minute, minute + 1), vec![])).await;
    }
    let refused = http.submit(request("calls", (20, 21), vec![])).await;
    assert_eq!((refused.status, &refused.json()["code"]), (429, &json!("rate_limited")), "{}", refused.text);
}

#[tokio::test]
async fn backfills_have_a_pace_of_their_own() {
    let (_deployment, _server, http) = ledger_with(|config| config.usage.backfill_rate = 1).await;
    // A pause has saved up ten thousand.
    let id = staged(&http, request("calls", (0, 30), vec![])).await;
    let event = of("calls", "a", 1, 1);
    let many =
        |count: usize| -> Vec<Value> {
            (0..count).map(|n| json!({
            "usage_type": "calls", "resource_id": "a", "value": 1, "event_timestamp": event["event_timestamp"],
            "idempotency_key": n.to_string(),
        }))
        .collect()
        };
    assert_eq!(send(&http, &id, many(9_000)).await.status, 200);
    let refused = send(&http, &id, many(9_000)).await;
    assert_eq!((refused.status, &refused.json()["code"]), (429, &json!("rate_limited")), "{}", refused.text);
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(commit(&http, &id).await.json()["events_added"], 9000);
}
