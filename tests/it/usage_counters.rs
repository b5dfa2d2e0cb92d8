//! Counters never go down, whatever order their readings come in.

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};

use crate::{
    support::API_KEY,
    usage::{ledger, record, with},
};

/// A reading of the counter `bytes` so many seconds after a moment.
fn reading(start: DateTime<Utc>, resource: &str, seconds: i64, value: i64) -> Value {
    with(record("bytes", resource, value), "event_timestamp", json!(start + TimeDelta::seconds(seconds)))
}

#[tokio::test]
async fn readings_lie_between_their_neighbours() {
    let (deployment, server, http) = ledger().await;
    let start = Utc::now() - TimeDelta::minutes(10);
    let at = |seconds, value| reading(start, "r", seconds, value);
    let violation = vec!["counter_violation".to_owned()];
    // In order, equal, and decreasing.
    assert_eq!(http.verdict(json!([at(10, 100), at(20, 200), at(30, 200)])).await, (3, 0, vec![]));
    assert_eq!(http.verdict(json!([at(40, 199), at(40, 300)])).await, (1, 0, violation.clone()));
    // Late, between two that are there: by another request, and by the same one.
    assert_eq!(
        http.verdict(json!([at(15, 99), at(16, 201), at(17, 150)])).await,
        (1, 0, [violation.clone(), violation.clone()].concat())
    );
    assert_eq!(http.verdict(json!([at(18, 149), at(16, 151), at(19, 200), at(18, 160)])).await.0, 2);
    // Before all others, and equal to a neighbour.
    assert_eq!(http.verdict(json!([at(5, 101), at(5, 100), at(1, 0)])).await, (2, 0, violation.clone()));
    // Of the same moment they don't order each other, but both bound what comes after.
    assert_eq!(http.verdict(json!([at(50, 500), at(50, 400)])).await, (2, 0, vec![]));
    assert_eq!(http.verdict(json!([at(51, 450), at(51, 500)])).await, (1, 0, violation.clone()));
    // Another resource is another counter, and a gauge is none.
    assert_eq!(http.verdict(json!([reading(start, "other", 60, 1)])).await, (1, 0, vec![]));
    assert_eq!(http.verdict(json!([record("calls", "r", 9), record("calls", "r", 1)])).await, (2, 0, vec![]));
    // Exact where a double would be blind.
    let exact = |seconds, value: &str| with(at(seconds, 0), "value", value);
    assert_eq!(
        http.verdict(json!([exact(60, "9007199254740993"), exact(61, "9007199254740992")])).await,
        (1, 0, violation.clone())
    );
    // The reason names the neighbour.
    let answer = http.post(crate::usage::RECORDS, at(61, 7)).await;
    assert_eq!(answer.status, 422);
    assert!(answer.text.contains("7 is less than 9007199254740993 before it"), "{}", answer.text);
    // Across a restart the heads are what they were.
    server.stop().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    assert_eq!(http.verdict(json!([at(71, 9), at(72, 8)])).await.2.len(), 2);
    let late = at(45, 350);
    assert_eq!(http.verdict(json!([late])).await, (1, 0, vec![]));
    assert_eq!(
        http.verdict(json!([late])).await,
        (0, 1, vec![]),
        "the repeat of an old reading is a duplicate, no violation"
    );
    server.stop().await;
}

/// Whatever order they come in and however they are cut into requests: what is in the ledger never goes down, and what was
/// refused would have made it.
#[tokio::test]
async fn any_order_leaves_a_rising_series() {
    let (deployment, server, http) = ledger().await;
    let start = Utc::now() - TimeDelta::minutes(20);
    let mut readings: Vec<Value> = (0..300).map(|second| reading(start, "r", second, second * 10)).collect();
    // Some that lie.
    readings.extend((0..60).map(|number| reading(start, "r", number * 5, (number * 37) % 3000)));
    for index in (1..readings.len()).rev() {
        readings.swap(index, rand::random_range(0..=index));
    }
    let (mut accepted, mut rejected) = (0, 0);
    for chunk in readings.chunks(23) {
        let verdict = http.verdict(json!(chunk)).await;
        assert_eq!(verdict.1, 0);
        accepted += verdict.0;
        rejected += verdict.2.len();
    }
    assert_eq!(accepted as usize + rejected, readings.len());
    let database = deployment.database().await;
    let falls: i64 = sqlx::query_scalar(
        "select count(*) from usage_records a join usage_records b using (series)
         where a.event_timestamp < b.event_timestamp and a.value > b.value",
    )
    .fetch_one(&database)
    .await
    .unwrap();
    assert_eq!(falls, 0);
    let head_is_last: bool = sqlx::query_scalar(
        "select (head.event_timestamp, head.value) = (select event_timestamp, value from usage_records
             order by event_timestamp desc, value desc limit 1) from counter_heads head",
    )
    .fetch_one(&database)
    .await
    .unwrap();
    assert!(head_is_last);
    server.stop().await;
}
