//! The historical database: what is old moves there, and nobody can tell.

use std::collections::{BTreeSet, HashSet};

use chrono::{TimeDelta, Utc};
use serde_json::{Value, json};
use sqlx::PgPool;
use tidemark::{clock::Clock, config::Secret};
use uuid::Uuid;

use crate::{
    support::{API_KEY, Barrier, Deployment, Http, Process, Proxy, Running, eventually, name},
    usage::{METADATA, RECORDS, record, rows, with},
    usage_retention::{RETENTION, ago, old},
};

/// A deployment with two databases.
struct Two {
    deployment: Deployment,
    historical_url: String,
    here: PgPool,
    there: PgPool,
    clock: Clock,
}

const ALL: &str = "page_size=1000&include_archived=true&include_deprecated=true";

impl Two {
    async fn new() -> Self {
        let deployment = Deployment::new().await;
        let historical_url = deployment.another_database().await;
        let (here, there) = (deployment.database().await, PgPool::connect(&historical_url).await.unwrap());
        Self { deployment, historical_url, here, there, clock: Clock::manual(Utc::now()) }
    }

    async fn serve(&self) -> (Running, Http) {
        self.serve_beside(&self.historical_url).await
    }

    async fn serve_beside(&self, historical_url: &str) -> (Running, Http) {
        let url = Some(historical_url).filter(|url| !url.is_empty()).map(Secret::new);
        let server = self.deployment.serve_by_with(&self.clock, |config| config.historical.database_url = url).await;
        let http = server.http().key(API_KEY);
        (server, http)
    }

    async fn spawn(&self) -> (Process, Http) {
        let mut process =
            self.deployment.spawn_with(&[("TIDEMARK__HISTORICAL__DATABASE_URL", self.historical_url.as_str())]);
        let http = process.http().await.key(API_KEY);
        process.is_ready().await;
        (process, http)
    }

    /// Moves all weeks that are over. The names of those that moved.
    async fn move_all(&self, http: &Http) -> Vec<String> {
        self.clock.set(Utc::now() + TimeDelta::days(31));
        let done = http.clone().admin().apply_retention().await;
        self.clock.set(Utc::now());
        let moved = done["moved"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned());
        moved.collect()
    }

    /// The tallies count what is in either, once; heads are the latest readings.
    async fn is_consistent(&self) {
        let mut all: HashSet<(Uuid, i32)> = HashSet::new();
        for database in [&self.here, &self.there] {
            let rows = sqlx::query_as("select id, revision from usage_records").fetch_all(database).await.unwrap();
            all.extend::<Vec<(Uuid, i32)>>(rows);
        }
        let tallied: i64 = sqlx::query_scalar("select coalesce(sum(records), 0)::bigint from usage_tallies")
            .fetch_one(&self.here)
            .await
            .unwrap();
        assert_eq!(tallied as usize, all.len(), "the tallies");
        let strange: i64 = sqlx::query_scalar(
            "select count(*) from counter_heads head full join (
                 select distinct on (series) series, event_timestamp, value from (
                     select series, event_timestamp, value from usage_records where series is not null and status = 'active'
                     union all select series, event_timestamp, value from usage_floors
                 ) reading order by series, event_timestamp desc, value desc
             ) latest using (series)
             where (head.event_timestamp, head.value) is distinct from (latest.event_timestamp, latest.value)",
        )
        .fetch_one(&self.here)
        .await
        .unwrap();
        assert_eq!(strange, 0, "the heads");
    }
}

/// Everything that a caller can read.
async fn all_that_is_read(http: &Http) -> Value {
    let mut feed = Vec::new();
    let mut position = String::new();
    loop {
        let page = http.fed(&format!("limit=7&position={position}")).await;
        let records = page["records"].as_array().unwrap().clone();
        if records.is_empty() {
            break;
        }
        feed.extend(records);
        position = page["next_position"].as_str().unwrap().to_owned();
    }
    let all = http.all(ALL).await;
    let mut histories = Vec::new();
    for id in all.iter().map(|one| one["id"].as_str().unwrap()).collect::<BTreeSet<_>>().into_iter().step_by(2) {
        let (one, history) =
            (http.get(&format!("{RECORDS}/{id}")).await, http.get(&format!("{RECORDS}/{id}/history")).await);
        assert_eq!((one.status, history.status), (200, 200), "{} {}", one.text, history.text);
        histories.push(json!([one.json(), history.json()]));
    }
    let mut metadata = http.get(METADATA).await.json();
    // Neither tells of the ledger, and both change with the time.
    metadata["reconciliation"] = json!(null);
    metadata["storage_health"] = json!(null);
    json!({
        "all": all,
        "by fours": http.all("page_size=4&include_archived=true&include_deprecated=true").await,
        "active": http.all("page_size=3").await,
        "counters": http.all("page_size=3&usage_type=bytes").await,
        "of one": http.all("page_size=2&resource_id=a&include_deprecated=true").await,
        "feed": feed,
        "histories": histories,
        "metadata": metadata,
    })
}

fn id_of(all: &[Value], resource: &str) -> String {
    let found = all.iter().find(|one| one["resource_id"] == resource && one["status"] == "active");
    found.unwrap_or_else(|| panic!("no {resource}"))["id"].as_str().unwrap().to_owned()
}

/// Records of many weeks: gauges, counters, corrected ones, some of today.
async fn fill(http: &Http) {
    http.unit("calls", "gauge").await;
    http.unit("bytes", "counter").await;
    let gauges = (0..30).map(|n| old("calls", ["a", "b", "c"][n as usize % 3], 20 + n * 2)).collect();
    http.write_old("calls", gauges).await;
    let reading = |days: i64, value: i64| with(old("bytes", "disk", days), "value", value);
    http.write_old("bytes", vec![reading(60, 10), reading(50, 20), reading(40, 30), reading(30, 40)]).await;
    // Keys without a time are of no week.
    let without = with(old("calls", "timeless", 45), "idempotency_key", "a key");
    http.write_old("calls", vec![without, old("calls", "amended", 46), old("calls", "withdrawn", 47)]).await;
    let all = http.all(ALL).await;
    let amended = http.amend(&id_of(&all, "amended"), json!({ "value": 7, "reason": "a typo" })).await;
    let withdrawn = http.deprecate(&id_of(&all, "withdrawn"), json!({ "reason": "never happened" })).await;
    assert_eq!((amended.status, withdrawn.status), (200, 200), "{} {}", amended.text, withdrawn.text);
    assert_eq!(http.verdict(json!([record("calls", "a", 1), record("calls", "live", 2)])).await.0, 2);
}

#[tokio::test]
async fn nobody_can_tell_where_a_record_is() {
    let two = Two::new().await;
    let (_server, http) = two.serve().await;
    fill(&http).await;
    let before = all_that_is_read(&http).await;
    let first = http.page("page_size=5").await;
    let there_before = rows(&two.here).await;
    // It is told before it moves.
    two.clock.set(Utc::now() + TimeDelta::days(31));
    let planned = http.clone().admin().get(RETENTION).await.json();
    let moved = two.move_all(&http).await;
    let planned: Vec<&str> =
        planned["moved"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(planned, moved);
    assert!(moved.len() > 5, "{moved:?}");
    let (here, there) = (rows(&two.here).await, rows(&two.there).await);
    assert_eq!(here + there, there_before);
    assert!(here < 8 && there > 25, "{here} here, {there} there");
    assert_eq!(all_that_is_read(&http).await, before);
    two.is_consistent().await;
    // A cursor of before goes on.
    let mut rest = first["records"].as_array().unwrap().clone();
    let cursor = first["next_cursor"].as_str().unwrap();
    rest.extend(http.page(&format!("page_size=5&cursor={cursor}")).await["records"].as_array().unwrap().clone());
    assert_eq!(rest, before["active"].as_array().unwrap()[..10]);
    // Over NATS as well.
    let client = two.deployment.client().await;
    let query =
        serde_json::from_value(json!({ "page_size": 1000, "include_archived": true, "include_deprecated": true }));
    let page = client.query_records(&name("default"), &query.unwrap()).await.unwrap();
    assert_eq!(json!(page.records), before["all"]);
    assert!(two.move_all(&http).await.is_empty(), "once");
    // Others see nothing of it.
    let other = http.with_new_key(json!({ "tenant": "globex", "source": "default", "roles": ["usage"] })).await;
    assert_eq!(other.all("").await, Vec::<Value>::new());
    let id = before["all"][0]["id"].as_str().unwrap();
    assert_eq!(other.get(&format!("{RECORDS}/{id}")).await.status, 404);
    assert_eq!(other.get(&format!("{RECORDS}/{id}/history")).await.status, 404);
    assert_eq!(other.amend(id, json!({ "value": 1, "reason": "mine" })).await.status, 404);
}

#[tokio::test]
async fn what_moved_can_be_corrected() {
    let two = Two::new().await;
    let (_server, http) = two.serve().await;
    fill(&http).await;
    let used = with(record("calls", "used", 1), "idempotency_key", old("calls", "used", 40)["idempotency_key"].clone());
    assert_eq!(http.verdict(used.clone()).await.0, 1);
    two.move_all(&http).await;
    let all = http.all(ALL).await;
    let total = http.get(METADATA).await.json()["total_records"].as_i64().unwrap();
    let (gauge, other) = (id_of(&all, "b"), id_of(&all, "c"));

    let amended = http.amend(&gauge, json!({ "value": 99, "reason": "a typo", "revision": 1 })).await;
    assert_eq!((amended.status, &amended.json()["value"]), (200, &json!("99")), "{}", amended.text);
    let stale = http.amend(&gauge, json!({ "value": 98, "reason": "a typo", "revision": 1 })).await;
    assert_eq!(stale.status, 409, "{}", stale.text);
    assert_eq!(http.deprecate(&other, json!({ "reason": "never happened" })).await.status, 200);
    let shown = http.all("page_size=3").await;
    let of = |id: &str| shown.iter().filter(|one| one["id"] == id).map(|one| one["value"].clone()).collect::<Vec<_>>();
    assert_eq!((of(&gauge), of(&other)), (vec![json!("99")], vec![]));
    let everything = http.all("page_size=3&include_deprecated=true&include_archived=true").await;
    assert_eq!(everything.len(), all.len() + 1, "each revision once");
    assert_eq!(http.get(METADATA).await.json()["total_records"], total + 1);
    let history = http.get(&format!("{RECORDS}/{gauge}/history")).await.json();
    assert_eq!(
        (history["versions"].as_array().unwrap().len(), &history["changes"][0]["reason"]),
        (2, &json!("a typo"))
    );

    // Counters stay counters: they are compared with what is there.
    let readings: Vec<&Value> = all.iter().filter(|one| one["usage_type"] == "bytes").collect();
    let id = |n: usize| readings[n]["id"].as_str().unwrap();
    let too_much = http.amend(id(1), json!({ "value": 31, "reason": "more" })).await;
    assert_eq!((too_much.status, &too_much.json()["code"]), (422, &json!("counter_violation")), "{}", too_much.text);
    assert_eq!(too_much.json()["details"]["after"], "30");
    let too_little = http.amend(id(1), json!({ "value": 9, "reason": "less" })).await;
    assert_eq!(too_little.json()["details"]["before"], "10", "{}", too_little.text);
    // Those that come now are compared with the latest that moved.
    let reading = |minutes: i64, value: i64| {
        with(record("bytes", "disk", value), "event_timestamp", json!(Utc::now() - TimeDelta::minutes(minutes)))
    };
    let refused = async |one: Value| http.post(RECORDS, one).await.json()["code"].clone();
    assert_eq!(refused(reading(1, 39)).await, "counter_violation");
    assert_eq!(http.verdict(json!([reading(1, 50)])).await.0, 1);
    assert_eq!(refused(reading(60, 39)).await, "counter_violation", "also one that comes late");
    assert_eq!(http.verdict(json!([reading(50, 45)])).await.0, 1);
    // And if that is withdrawn, with the one before it.
    assert_eq!(http.deprecate(id(3), json!({ "reason": "a broken meter" })).await.status, 200);
    assert_eq!(refused(reading(60, 29)).await, "counter_violation");
    assert_eq!(http.verdict(json!([reading(61, 31)])).await.0, 1);
    two.is_consistent().await;
    // A key of a week that moved can't be told from one that was used.
    for again in [used.clone(), with(used, "value", 2)] {
        let refused = http.post(RECORDS, again).await;
        let expected = (json!("validation_error"), json!("idempotency_key"));
        assert_eq!(
            (refused.json()["code"].clone(), refused.json()["details"]["field"].clone()),
            expected,
            "{}",
            refused.text
        );
    }
    assert_eq!(http.verdict(with(record("calls", "timeless", 1), "idempotency_key", "another key")).await.0, 1);
    // The feed tells the corrections.
    let page = http.fed("limit=1000").await;
    let told: Vec<(&Value, &Value)> =
        page["records"].as_array().unwrap().iter().map(|one| (&one["id"], &one["revision"])).collect();
    assert!(told.contains(&(&json!(gauge), &json!(2))), "{told:?}");
}

#[tokio::test]
async fn a_backfill_reaches_what_moved() {
    let two = Two::new().await;
    let (_server, http) = two.serve().await;
    fill(&http).await;
    let before = all_that_is_read(&http).await;
    two.move_all(&http).await;
    let replaced = |usage_type: &str, more: Value| {
        let mut request = json!({
            "usage_type": usage_type, "mode": "blocking", "reason": "a gap",
            "time_range": { "from": ago(62), "to": ago(35) },
        });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        http.post("/api/uc/v1/usage/backfill", request)
    };
    let active = before["active"].as_array().unwrap();
    let in_range = |one: &&Value| {
        let at = one["event_timestamp"].as_str().unwrap().parse::<chrono::DateTime<Utc>>().unwrap();
        one["usage_type"] == "calls" && at >= ago(62) && at < ago(35)
    };
    let concerned = active.iter().filter(in_range).count();
    let events = json!([old("calls", "new", 50), old("calls", "new", 40)]);
    let preview = replaced("calls", json!({ "replacement_events": events, "dry_run": true })).await;
    assert_eq!((preview.status, &preview.json()["events_archived"]), (200, &json!(concerned)), "{}", preview.text);
    assert!(rows(&two.here).await < 8, "a look leaves nothing");
    let done = replaced("calls", json!({ "replacement_events": events })).await;
    assert_eq!((done.status, &done.json()["events_archived"]), (201, &json!(concerned)), "{}", done.text);
    let left = http.all("page_size=4&usage_type=calls").await;
    let of_calls = active.iter().filter(|one| one["usage_type"] == "calls").count();
    assert_eq!(left.len(), of_calls - concerned + 2);
    two.is_consistent().await;
    // A counter is compared with its neighbours, which stayed there.
    let reading = |value: i64| json!([with(old("bytes", "disk", 45), "value", value)]);
    let down = replaced("bytes", json!({ "replacement_events": reading(41) })).await;
    assert_eq!((down.status, &down.json()["code"]), (422, &json!("counter_violation")), "{}", down.text);
    let up = replaced("bytes", json!({ "replacement_events": reading(39) })).await;
    assert_eq!(up.status, 201, "{}", up.text);
    two.is_consistent().await;
    // And all of it can be taken back.
    for backfill in [up, done] {
        let path = format!("/api/uc/v1/usage/backfill/{}/revert", backfill.json()["id"].as_str().unwrap());
        let reverted = http.post(&path, json!({ "reason": "it was right" })).await;
        assert_eq!(reverted.status, 200, "{}", reverted.text);
    }
    let mut shown = http.all("page_size=3").await;
    // What it had to do with stays noted.
    shown.iter_mut().for_each(|one| one["backfill_operation_id"] = Value::Null);
    assert_eq!(json!(shown), before["active"]);
    two.is_consistent().await;
}

#[tokio::test]
async fn retention_reaches_what_moved() {
    let two = Two::new().await;
    let (_server, http) = two.serve().await;
    fill(&http).await;
    two.move_all(&http).await;
    let admin = http.clone().admin();
    let all = http.all(ALL).await;
    // Some are in both databases.
    let amended = http.amend(&id_of(&all, "b"), json!({ "value": 5, "reason": "a typo" })).await;
    assert_eq!(amended.status, 200, "{}", amended.text);
    let count = async |query: &str| http.all(query).await.len() as i64;
    two.clock.set(Utc::now() + TimeDelta::days(31));
    admin.keep_for("default/bytes", 75).await;
    let report = admin.get(RETENTION).await.json();
    assert_eq!((&report["records"][0]["usage_type"], &report["records"][0]["records"]), (&json!("bytes"), &json!(2)));
    assert_eq!(count("usage_type=bytes").await, 4, "a report takes nothing");
    let done = admin.apply_retention().await;
    assert_eq!(
        done["records"],
        json!([with(report["records"][0].clone(), "records", 2)])
            .as_array()
            .map(|one| { json!([with(one[0].clone(), "older_than", done["records"][0]["older_than"].clone())]) })
            .unwrap()
    );
    assert_eq!(count("usage_type=bytes").await, 2);
    two.is_consistent().await;
    let earliest = http.get(METADATA).await.json()["earliest_event"].clone();
    assert_eq!(earliest, all[0]["event_timestamp"], "of the other type");
    // Whole weeks, there too, and what had come back from them.
    admin.keep_for("*/*", 90).await;
    let report = admin.get(RETENTION).await.json();
    let done = admin.apply_retention().await;
    let weeks = |report: &Value| -> Vec<Value> {
        let of_there = report["partitions"].as_array().unwrap().iter().filter(|one| one["historical"] == true);
        of_there.map(|one| one["name"].clone()).collect()
    };
    assert!(!weeks(&done).is_empty(), "{done}");
    assert_eq!(weeks(&done), weeks(&report));
    two.is_consistent().await;
    let left = http.all(ALL).await;
    let kept: Vec<&Value> = left
        .iter()
        .filter(|one| one["event_timestamp"].as_str().unwrap().parse::<chrono::DateTime<Utc>>().unwrap() < ago(59))
        .collect();
    assert!(kept.is_empty(), "{kept:?}");
    assert_eq!(http.get(METADATA).await.json()["total_records"], left.len());
    assert_eq!(http.get(METADATA).await.json()["earliest_event"], left[0]["event_timestamp"]);
    // A key of a week that is gone from both is as good as any.
    let forgotten = all.iter().find(|one| one["usage_type"] == "calls").unwrap()["idempotency_key"].clone();
    assert_eq!(http.verdict(with(record("calls", "b", 1), "idempotency_key", forgotten)).await.0, 1);
    assert!(admin.apply_retention().await["records"].as_array().unwrap().is_empty());
    two.is_consistent().await;
}

#[tokio::test]
async fn a_move_that_is_killed_half_way_loses_nothing_and_doubles_nothing() {
    let two = Two::new().await;
    let (server, http) = two.serve().await;
    http.unit("calls", "gauge").await;
    http.unit("bytes", "counter").await;
    let stages = [
        (&two.there, "usage_records", "after insert", "row"),
        (&two.there, "usage_partitions", "after update", "statement"),
        (&two.here, "usage_floors", "after insert", "statement"),
        (&two.here, "usage_moved", "after insert", "statement"),
        (&two.there, "usage_partitions", "after update of arrived", "statement"),
        (&two.here, "usage_detached", "after delete", "statement"),
    ];
    for week in 0..=stages.len() as i64 {
        let days = 40 + 7 * week;
        http.write_old("calls", (0..5).map(|_| old("calls", "a", days)).collect()).await;
        http.write_old("bytes", vec![with(old("bytes", "disk", days), "value", 100 - week)]).await;
    }
    let make_quiet = async |week: i64| {
        let quiet = sqlx::query(
            "update usage_partitions set last_written = now() - interval '31 days' where starts_at <= $1 and $1 < ends_at",
        );
        quiet.bind(ago(40 + 7 * week)).execute(&two.here).await.unwrap();
    };
    let before = all_that_is_read(&http).await;
    // The first one makes the tables.
    make_quiet(stages.len() as i64).await;
    assert_eq!(http.clone().admin().apply_retention().await["moved"].as_array().unwrap().len(), 1);
    server.stop().await;
    for (week, (database, table, when, each)) in stages.into_iter().enumerate() {
        make_quiet(week as i64).await;
        let trigger = format!("create trigger barrier {when} on {table} for each {each} execute function wait_here()");
        let barrier = Barrier::at(database, table, &trigger).await;
        let (mut doomed, http) = two.spawn().await;
        let call = tokio::spawn(async move { http.admin().post(&format!("{RETENTION}/run"), json!({})).await });
        barrier.reached().await;
        doomed.kill();
        call.abort();
        barrier.lift().await;
        let (server, http) = two.serve().await;
        assert_eq!(all_that_is_read(&http).await, before, "{table} {when}");
        http.clone().admin().apply_retention().await;
        assert_eq!(all_that_is_read(&http).await, before, "{table} {when}, and moved");
        two.is_consistent().await;
        let moved: i64 = sqlx::query_scalar("select count(*) from usage_moved").fetch_one(&two.here).await.unwrap();
        let arrived: i64 = sqlx::query_scalar("select count(*) from usage_partitions where arrived")
            .fetch_one(&two.there)
            .await
            .unwrap();
        let left: i64 = sqlx::query_scalar("select count(*) from usage_detached").fetch_one(&two.here).await.unwrap();
        assert_eq!((moved, arrived, left), (week as i64 + 2, week as i64 + 2, 0), "{table} {when}");
        server.stop().await;
    }
}

#[tokio::test]
async fn what_is_written_meanwhile_keeps_its_week_here() {
    let two = Two::new().await;
    let (_server, http) = two.serve().await;
    fill(&http).await;
    let id = id_of(&http.all(ALL).await, "b");
    two.clock.set(Utc::now() + TimeDelta::days(31));
    // As if the copy had been made before, and the record was corrected since.
    sqlx::query("update usage_partitions set last_written = now() - interval '31 days'")
        .execute(&two.here)
        .await
        .unwrap();
    assert_eq!(http.amend(&id, json!({ "value": 77, "reason": "late" })).await.status, 200);
    two.clock.set(Utc::now());
    let before = all_that_is_read(&http).await;
    let moved = http.clone().admin().apply_retention().await;
    assert!(!moved["moved"].as_array().unwrap().is_empty());
    let kept: i64 = sqlx::query_scalar("select count(*) from usage_records where id::text = $1")
        .bind(&id)
        .fetch_one(&two.here)
        .await
        .unwrap();
    assert_eq!(kept, 2, "its week stays");
    assert_eq!(all_that_is_read(&http).await, before);
    two.is_consistent().await;
}

#[tokio::test]
async fn without_the_historical_database_only_what_needs_it_fails() {
    let two = Two::new().await;
    let (server, http) = two.serve().await;
    fill(&http).await;
    let before = http.all(ALL).await;
    two.move_all(&http).await;
    let id = id_of(&before, "b");
    server.stop().await;
    // Behind a wire that can be cut.
    let proxy = Proxy::before(&two.historical_url).await;
    let another = two.deployment.another_database().await;
    for (nth, (url, says)) in [
        ("", "historical.database_url is not set"),
        (&*another, "another database than the one"),
        ("postgres://nobody@127.0.0.1:1/nowhere", "the historical database is away"),
    ]
    .into_iter()
    .enumerate()
    {
        let (server, http) = two.serve_beside(url).await;
        let recent = format!("from={}", (Utc::now() - TimeDelta::days(1)).format("%FT%TZ"));
        for path in [
            RECORDS.to_owned(),
            format!("{RECORDS}/feed"),
            format!("{RECORDS}/{id}"),
            format!("{RECORDS}/{id}/history"),
        ] {
            let answer = http.get(&path).await;
            assert_eq!(answer.status, 503, "{url} {path} {}", answer.text);
            assert!(answer.json()["message"].as_str().unwrap().contains(says), "{path} {}", answer.text);
        }
        let amended = http.amend(&id, json!({ "value": 3, "reason": "a typo" })).await;
        assert_eq!(amended.status, 503, "{}", amended.text);
        assert_eq!(http.clone().admin().post(&format!("{RETENTION}/run"), json!({})).await.status, 503);
        assert_eq!(http.all(&recent).await.len(), 2, "what is here is read");
        assert_eq!(http.get(METADATA).await.json()["total_records"], before.len() + nth);
        let verdict = http.verdict(json!([record("calls", "fleeting", 1)])).await;
        assert_eq!(verdict.0, 1, "and written");
        let fleeting = id_of(&http.all(&recent).await, "fleeting");
        let gone = http.deprecate(&fleeting, json!({ "reason": "a test" })).await;
        assert_eq!(gone.status, 200, "and corrected: {}", gone.text);
        server.stop().await;
    }
    let (_server, http) = two.serve_beside(&proxy.url).await;
    let all = http.all(ALL).await;
    assert_eq!(all[..before.len() - 2], before[..before.len() - 2]);
    proxy.cut();
    let again = eventually("it comes back by itself", async || {
        let answer = http.get(&format!("{RECORDS}?{ALL}")).await;
        assert!(matches!(answer.status, 200 | 503), "{}", answer.text);
        (answer.status == 200).then(|| answer.json())
    })
    .await;
    assert_eq!(again["records"], json!(all));
}

#[tokio::test]
async fn a_copy_that_was_not_given_up_for_is_nothing() {
    let two = Two::new().await;
    let (_server, http) = two.serve().await;
    fill(&http).await;
    let admin = http.clone().admin();
    // Something else is there already, and somebody reads the ledger while the rest is to move.
    let quiet = sqlx::query("update usage_partitions set last_written = now() - interval '31 days' where ends_at < $1");
    quiet.bind(ago(60)).execute(&two.here).await.unwrap();
    assert!(!admin.apply_retention().await["moved"].as_array().unwrap().is_empty());
    let before = all_that_is_read(&http).await;
    let mut reading = two.here.begin().await.unwrap();
    sqlx::query("lock table only usage_records in access share mode").execute(&mut *reading).await.unwrap();
    assert_eq!(two.move_all(&http).await, Vec::<String>::new());
    let copied: i64 = sqlx::query_scalar("select count(*) from usage_partitions where not arrived")
        .fetch_one(&two.there)
        .await
        .unwrap();
    assert_eq!(copied, 1, "the first that could not be given up");
    let floors: i64 = sqlx::query_scalar("select count(*) from usage_floors").fetch_one(&two.here).await.unwrap();
    assert_eq!(floors, 1);
    reading.rollback().await.unwrap();
    assert_eq!(all_that_is_read(&http).await, before);
    two.is_consistent().await;
    // It does not hold a counter up whose reading was wrong.
    let readings = http.all("usage_type=bytes").await;
    let id = |n: usize| readings[n]["id"].as_str().unwrap();
    assert_eq!(http.deprecate(id(0), json!({ "reason": "a broken meter" })).await.status, 200);
    let amended = http.amend(id(1), json!({ "value": 3, "reason": "a broken meter" })).await;
    assert_eq!(amended.status, 200, "{}", amended.text);
    two.is_consistent().await;
    // And what retention takes here is not seen there.
    admin.keep_for("default/bytes", 35).await;
    admin.apply_retention().await;
    let left = http.all("usage_type=bytes&include_deprecated=true").await;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(http.get(METADATA).await.json()["total_records"], before["all"].as_array().unwrap().len() - 3);
    assert_eq!(http.get(&format!("{RECORDS}/{}", id(0))).await.status, 404);
}
