//! Pages of the ledger by event time.

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use tidemark::{
    api::usage::{Amendment, Deprecation, FeedRequest, RecordId, RecordQuery},
    clock::Clock,
    error::Code,
};
use uuid::Uuid;

use crate::{
    support::{API_KEY, Deployment, Http, eventually, time},
    usage::{RECORDS, ledger, record, with},
};

/// A moment some seconds after a fixed one of today.
fn at(seconds: i64) -> DateTime<Utc> {
    let hour = (Utc::now() - TimeDelta::hours(2)).timestamp() / 3600 * 3600;
    DateTime::from_timestamp(hour + seconds, 0).unwrap()
}

fn stamp(moment: DateTime<Utc>) -> String {
    moment.to_rfc3339_opts(chrono::SecondsFormat::Micros, true)
}

/// A record of a moment.
fn of(seconds: i64, resource: &str) -> Value {
    with(record("calls", resource, 1), "event_timestamp", json!(at(seconds)))
}

fn keys(page: &Value) -> Vec<(DateTime<Utc>, String, i64)> {
    let key = |record: &Value| {
        let text = |member: &str| record[member].as_str().unwrap();
        (time(text("event_timestamp")), text("id").to_owned(), record["revision"].as_i64().unwrap())
    };
    page["records"].as_array().unwrap_or_else(|| panic!("{page}")).iter().map(key).collect()
}

impl Http {
    pub async fn page(&self, query: &str) -> Value {
        let answer = self.get(&format!("{RECORDS}?{query}")).await;
        assert_eq!(answer.status, 200, "{query}: {}", answer.text);
        answer.json()
    }

    /// All pages of a query.
    pub async fn all(&self, query: &str) -> Vec<Value> {
        let (mut all, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = self.page(&format!("{query}{cursor}")).await;
            all.extend(page["records"].as_array().unwrap().iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return all,
            }
        }
    }

    /// The code and the field of a refusal.
    async fn refusal(&self, query: &str) -> (u16, String, String) {
        let answer = self.get(&format!("{RECORDS}?{query}")).await;
        let error = answer.json();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (answer.status, text(&error["code"]), text(&error["message"]))
    }
}

#[tokio::test]
async fn pages_are_in_order_whole_and_filtered() {
    let (deployment, _server, http) = ledger().await;
    // Many of the same moment, and some under keys that are no UUIDs.
    let mut sent: Vec<Value> = (0..25).map(|n| of(n / 5, &format!("r{}", n % 3))).collect();
    sent.extend((0..5).map(|n| with(of(n, "r9"), "idempotency_key", format!("key {n}"))));
    sent.push(with(with(with(of(7, "u"), "user_id", "ann"), "resource_type", "vm"), "metadata", json!({"a": [1]})));
    sent.push(with(record("bytes", "b", "12.50"), "event_timestamp", json!(at(8))));
    assert_eq!(http.verdict(json!(sent)).await, (32, 0, vec![]));

    let all = http.all("page_size=7").await;
    let mut sorted = keys(&json!({ "records": all }));
    assert_eq!(sorted.len(), 32);
    let found = sorted.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(found, sorted, "in order, each once");

    let one = &http.page("user_id=ann").await["records"][0];
    assert_eq!(
        (&one["user_id"], &one["resource_type"], &one["metadata"]),
        (&json!("ann"), &json!("vm"), &json!({"a": [1]}))
    );
    assert_eq!((&one["status"], &one["revision"], &one["tenant_id"]), (&json!("active"), &json!(1), &json!("default")));
    assert_eq!(
        (&one["source_id"], &one["metric_kind"], &one["lineage"]),
        (&json!("default"), &json!("gauge"), &Value::Null)
    );
    assert_eq!(http.page("usage_type=bytes").await["records"][0]["value"], "12.5");
    let by_id = http.get(&format!("{RECORDS}/{}", one["id"].as_str().unwrap())).await;
    assert_eq!((by_id.status, &by_id.json()), (200, one));
    for (query, count) in [
        ("resource_id=r9", 5),
        ("resource_type=vm", 1),
        ("source_id=default", 32),
        ("source_id=other", 0),
        ("usage_type=calls&resource_id=r0", 9),
        ("include_archived=true&include_deprecated=true", 32),
    ] {
        assert_eq!(http.all(query).await.len(), count, "{query}");
    }
    // From is included, to is not.
    let range = format!("from={}&to={}&page_size=3", stamp(at(1)), stamp(at(3)));
    let found = http.all(&range).await;
    assert_eq!(found.len(), 12);
    let moments: Vec<DateTime<Utc>> =
        found.iter().map(|one| one["event_timestamp"].as_str().unwrap().parse().unwrap()).collect();
    assert_eq!((moments.first(), moments.last()), (Some(&at(1)), Some(&at(2))));

    // The same over NATS.
    let client = deployment.client().await;
    let tenant = "default".parse().unwrap();
    let query = RecordQuery { page_size: Some(20), ..RecordQuery::default() };
    let first = client.query_records(&tenant, &query).await.unwrap();
    let query = RecordQuery { cursor: first.next_cursor.clone(), ..query };
    let second = client.query_records(&tenant, &query).await.unwrap();
    let ids: Vec<String> = first.records.iter().chain(&second.records).map(|one| one.id.to_string()).collect();
    let expected: Vec<&str> = all.iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert_eq!((ids, second.next_cursor), (expected.into_iter().map(str::to_owned).collect(), None));
}

#[tokio::test]
async fn a_bad_query_is_told_what_is_wrong() {
    let (_deployment, _server, http) = ledger().await;
    let (early, late) = (stamp(at(0)), stamp(at(60)));
    let far = stamp(at(0) + TimeDelta::days(367));
    for (query, problem) in [
        (format!("from={late}&to={early}"), "to: must lie after from"),
        (format!("from={early}&to={early}"), "to: must lie after from"),
        (format!("from={early}&to={far}"), "from: must not lie more than 366 days"),
        ("from=yesterday".to_owned(), "from"),
        ("to=0001-01-01T00:00:00Z".to_owned(), "to: must lie between"),
        ("page_size=0".to_owned(), "page_size: must lie between 1 and 1000"),
        ("page_size=1001".to_owned(), "page_size: must lie between 1 and 1000"),
        ("page_size=many".to_owned(), "page_size"),
        ("colour=red".to_owned(), "colour"),
        ("tenant_id=other".to_owned(), "tenant_id"),
        ("usage_type=".to_owned(), "usage_type: must have 1 to 255"),
        ("resource_id=a%00b".to_owned(), "resource_id: must not contain NUL"),
        ("include_archived=perhaps".to_owned(), "include_archived"),
        ("cursor=abc".to_owned(), "cursor: is none of ours"),
        ("cursor=".to_owned(), "cursor: is none of ours"),
    ] {
        let (status, code, message) = http.refusal(&query).await;
        assert_eq!((status, code.as_str()), (400, "validation_error"), "{query}: {message}");
        assert!(message.contains(problem), "{query}: {message}");
    }
    let answer = http.get(&format!("{RECORDS}/nonsense")).await;
    assert_eq!(answer.status, 400, "{}", answer.text);
    let answer = http.get(&format!("{RECORDS}/{}", Uuid::nil())).await;
    assert_eq!((answer.status, &answer.json()["code"]), (404, &json!("not_found")));
}

#[tokio::test]
async fn paging_goes_on_while_rows_come_before_and_after() {
    let (_deployment, _server, http) = ledger().await;
    let sent: Vec<Value> = (0..60).map(|n| of(100 + n, "r")).collect();
    http.verdict(json!(sent)).await;
    let mut seen = Vec::new();
    let mut page = http.page("usage_type=calls&page_size=10").await;
    for n in 0.. {
        seen.extend(keys(&page));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        let cursor = cursor.to_owned();
        // One long before, one right before the cursor's place, one right after it, and one at the end.
        let here = seen.last().unwrap().0;
        let beside = |micros: i64| {
            with(record("calls", "beside", 1), "event_timestamp", json!(here + TimeDelta::microseconds(micros)))
        };
        let late = with(of(300 + n, "ahead"), "value", 2);
        http.verdict(json!([of(n, "behind"), beside(-1), beside(1), late])).await;
        page = http.page(&format!("usage_type=calls&page_size=10&cursor={cursor}")).await;
        if n > 60 {
            panic!("it never ends");
        }
    }
    let mut sorted = seen.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(seen, sorted, "in order, none twice");
    let all = http.all("usage_type=calls&page_size=1000").await;
    let originals = all.iter().filter(|one| one["resource_id"] == "r").map(|one| one["id"].as_str().unwrap());
    let seen: Vec<&str> = seen.iter().map(|(_, id, _)| id.as_str()).collect();
    for id in originals {
        assert!(seen.contains(&id), "{id} was there all the time and was not shown");
    }
    let ahead = all.iter().filter(|one| one["resource_id"] == "ahead").map(|one| one["id"].as_str().unwrap());
    let shown = ahead.filter(|id| seen.contains(id)).count();
    assert!(shown > 0, "what came ahead of the cursor is shown");
}

#[tokio::test]
async fn a_cursor_is_good_for_its_own_query_and_for_a_while() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-05-01T12:00:00Z"));
    let server = deployment.serve_by(&clock).await;
    let http = server.http().key(API_KEY);
    http.unit_with("calls", "gauge", json!({ "allowed_sources": ["default"] })).await;
    let other = http.with_new_key(json!({ "tenant": "globex", "roles": ["usage"] })).await;
    let sent: Vec<Value> = (0..10).map(|n| of(n, "r")).collect();
    assert_eq!(http.verdict(json!(sent)).await, (10, 0, vec![]));
    let cursor = http.page("page_size=2").await["next_cursor"].as_str().unwrap().to_owned();
    // Another page size is fine.
    let rest = http.page(&format!("page_size=100&cursor={cursor}")).await;
    assert_eq!((keys(&rest).len(), &rest["next_cursor"]), (8, &Value::Null));

    let (status, code, message) = http.refusal(&format!("usage_type=calls&cursor={cursor}")).await;
    assert_eq!((status, code.as_str()), (400, "validation_error"));
    assert!(message.contains("cursor: was made for other filters"), "{message}");
    for query in ["include_deprecated=true", "from=2026-01-01T00:00:00Z", "resource_id=r", "user_id=x"] {
        assert_eq!(http.refusal(&format!("{query}&cursor={cursor}")).await.0, 400, "{query}");
    }
    assert_eq!(other.refusal(&format!("cursor={cursor}")).await.0, 400, "a stranger's");
    for index in 0..cursor.len() {
        let mut bytes = cursor.clone().into_bytes();
        bytes[index] = if bytes[index] == b'A' { b'Q' } else { b'A' };
        let tampered = String::from_utf8(bytes).unwrap();
        let (status, code, _) = http.refusal(&format!("cursor={tampered}")).await;
        assert_eq!((status, code.as_str()), (400, "validation_error"), "{tampered}");
    }
    clock.set(time("2026-05-02T12:00:01Z"));
    assert_eq!(keys(&http.page(&format!("cursor={cursor}")).await).len(), 8, "still good after a day");
    clock.set(time("2026-05-04T12:00:01Z"));
    let (status, code, message) = http.refusal(&format!("cursor={cursor}")).await;
    assert_eq!((status, code.as_str()), (410, "cursor_expired"));
    assert!(message.contains("cursor"), "{message}");
    // A cursor outlives the instance that made it.
    let cursor = http.page("page_size=2").await["next_cursor"].as_str().unwrap().to_owned();
    server.stop().await;
    let http = deployment.serve_by(&clock).await.http().key(API_KEY);
    assert_eq!(keys(&http.page(&format!("cursor={cursor}")).await).len(), 8);
}

#[tokio::test]
async fn large_records_make_shorter_pages() {
    let (deployment, _server, http) = ledger().await;
    let blob = "x".repeat(8000);
    let sent: Vec<Value> = (0..100).map(|n| with(of(n, "r"), "metadata", json!({ "blob": blob }))).collect();
    for part in sent.chunks(50) {
        assert_eq!(http.verdict(json!(part)).await, (50, 0, vec![]));
    }
    for part in sent.chunks(50) {
        let again: Vec<Value> =
            part.iter().map(|one| with(one.clone(), "idempotency_key", Uuid::now_v7().to_string())).collect();
        assert_eq!(http.verdict(json!(again)).await, (50, 0, vec![]));
    }
    // It all has to fit into a message.
    let client = deployment.client().await;
    let tenant = "default".parse().unwrap();
    let query = RecordQuery { page_size: Some(1000), ..RecordQuery::default() };
    let first = client.query_records(&tenant, &query).await.unwrap();
    assert!((50..200).contains(&first.records.len()) && first.next_cursor.is_some(), "{}", first.records.len());
    assert_eq!(http.all("page_size=1000").await.len(), 200);
    let request = FeedRequest { limit: Some(10_000), ..FeedRequest::default() };
    let page = client.read_feed(&tenant, &request).await.unwrap();
    assert!((50..200).contains(&page.records.len()), "{}", page.records.len());
}

#[tokio::test]
async fn nobody_reaches_another_tenants_records() {
    let (deployment, _server, http) = ledger().await;
    let other = http.with_new_key(json!({ "tenant": "globex", "roles": ["usage", "admin"] })).await;
    http.verdict(record("calls", "r", 1)).await;
    let id = http.page("").await["records"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(other.page("").await["records"], json!([]));
    let path = format!("{RECORDS}/{id}");
    for answer in [
        other.get(&path).await,
        other.get(&format!("{path}/history")).await,
        other.amend(&id, json!({ "value": 2, "reason": "mine now" })).await,
        other.deprecate(&id, json!({ "reason": "mine now" })).await,
    ] {
        assert_eq!((answer.status, &answer.json()["code"]), (404, &json!("not_found")), "{}", answer.text);
    }
    let fed = other.get(&format!("{RECORDS}/feed")).await.json();
    assert_eq!((&fed["records"], &fed["next_position"]), (&json!([]), &json!("0-0")));
    // Over NATS the subject says who asks, and finds no more.
    let client = deployment.client().await;
    let tenant = "globex".parse().unwrap();
    let id: Uuid = id.parse().unwrap();
    let missing = [
        client.get_record(&tenant, &RecordId { id }).await.map(drop).unwrap_err(),
        client.record_history(&tenant, &RecordId { id }).await.map(drop).unwrap_err(),
        client
            .amend_record(&tenant, &Amendment { id, value: Some(json!(2)), reason: "x".into(), ..Amendment::default() })
            .await
            .map(drop)
            .unwrap_err(),
        client
            .deprecate_record(&tenant, &Deprecation { id, reason: "x".into(), revision: None })
            .await
            .map(drop)
            .unwrap_err(),
    ];
    assert!(missing.iter().all(|error| error.code == Code::NotFound), "{missing:?}");
    // A caller without a key gets nothing at all.
    let stranger = Http::new(http.url());
    for path in [RECORDS.to_owned(), format!("{RECORDS}/feed"), path] {
        assert_eq!(stranger.get(&path).await.status, 401, "{path}");
    }
    eventually("nothing has changed", async || (http.page("").await["records"][0]["value"] == "1").then_some(())).await;
}
