//! Reading and replacing what the usage ledger has.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use futures::{FutureExt, StreamExt, future::join_all, stream};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Ground, Measure, Measured, Plot, Unit, at, name,
    usage::{SOURCE, TYPES, fill, inserted, messages, published, register, verdict_latencies},
};
use crate::{
    api::{
        Json,
        usage::{BackfillAnswer, BackfillEvents, BackfillId, BackfillMode, BackfillRequest, RecordQuery, TimeRange},
    },
    client::Client,
};

pub const ROWS: &[(&str, Measure)] = &[
    ("usage, page of 100 by type, p95", |ground| pages(ground, 100, true, 20.0).boxed_local()),
    ("usage, page of 1000 by type, p95", |ground| pages(ground, 1000, true, 60.0).boxed_local()),
    ("usage, page of 1000 of all, p95", |ground| pages(ground, 1000, false, 100.0).boxed_local()),
    ("usage, verdict with 4 readers, p95", |ground| beside_readers(ground).boxed_local()),
    ("usage, feed to one consumer", |ground| feed(ground).boxed_local()),
    ("usage, backfill of 1 M records", |ground| backfill(ground).boxed_local()),
];

const MANY: i64 = 10_000_000;
const QUERIES: usize = 500;

/// A page somewhere in the last thirty days.
fn query(size: usize, by_type: bool) -> (String, RecordQuery) {
    let now = Utc::now();
    let from = now - TimeDelta::days(30);
    let query = RecordQuery {
        usage_type: by_type.then(|| format!("type-{}", rand::random_range(0..21))),
        from: Some(from + TimeDelta::minutes(rand::random_range(0..28 * 24 * 60))),
        to: Some(now),
        page_size: Some(size),
        ..RecordQuery::default()
    };
    (format!("tenant-{}", rand::random_range(0..100)), query)
}

/// Two pages of each query, the second by its cursor.
async fn page(client: &Client, size: usize, by_type: bool) -> [f64; 2] {
    let (tenant, mut query) = query(size, by_type);
    let tenant = name(&tenant);
    let mut times = [0.0; 2];
    for time in &mut times {
        let began = Instant::now();
        let page = client.query_records(&tenant, &query).await.expect("a page");
        *time = began.elapsed().as_secs_f64() * 1000.0;
        query.cursor = page.next_cursor;
    }
    times
}

async fn pages(ground: &Ground, size: usize, by_type: bool, goal: f64) -> Measured {
    fill(&ground.database().await, MANY).await;
    let client = ground.client().await;
    for _ in 0..QUERIES {
        page(&client, size, by_type).await;
    }
    let mut times = Vec::with_capacity(QUERIES * 2);
    for _ in 0..QUERIES {
        times.extend(page(&client, size, by_type).await);
    }
    times.sort_by(f64::total_cmp);
    let detail =
        format!("p50 {:.1}, worst {:.1} ms, 10 M rows of 30 days, over NATS", at(&times, 0.5), at(&times, 1.0));
    let plot = Plot::of_latencies("Pages out of 10 M rows", &[("pages", &times)]);
    Measured::new(Unit::Milliseconds, goal, at(&times, 0.95), detail).with(plot)
}

/// Verdicts as of a thousand records a second, alone and while four readers page, in turns.
async fn beside_readers(ground: &Ground) -> Measured {
    fill(&ground.database().await, MANY).await;
    let (nats, client) = (ground.nats().await, ground.client().await);
    register(&client).await;
    let (mut alone, mut beside, mut pages) = (Vec::new(), Vec::new(), 0);
    for _ in 0..ground.effort.at_most(3) {
        alone.extend(verdict_latencies(&nats).await);
        let stop = CancellationToken::new();
        let reader = |_| {
            let (client, stop) = (client.clone(), stop.clone());
            async move {
                let mut pages = 0;
                while !stop.is_cancelled() {
                    page(&client, 100, true).await;
                    pages += 2;
                }
                pages
            }
        };
        let measuring = async {
            beside.extend(verdict_latencies(&nats).await);
            stop.cancel();
        };
        let (read, ()): (Vec<usize>, _) = tokio::join!(join_all((0..4).map(reader)), measuring);
        pages += read.iter().sum::<usize>();
    }
    alone.sort_by(f64::total_cmp);
    beside.sort_by(f64::total_cmp);
    let detail = format!("alone {:.1} ms; {pages} pages of 100 were read meanwhile", at(&alone, 0.95));
    let plot = Plot::of_latencies("From a request to its verdict", &[("alone", &alone), ("beside readers", &beside)]);
    Measured::new(Unit::Milliseconds, at(&alone, 0.95) * 1.5, at(&beside, 0.95), detail).with(plot)
}

async fn feed(ground: &Ground) -> Measured {
    let (nats, database, client) = (ground.nats().await, ground.database().await, ground.client().await);
    register(&client).await;
    for _ in 0..20 {
        published(&nats, &database, messages()).await;
    }
    let tenant = name("bench-0");
    let heads = sqlx::query_scalar("select sum(position)::bigint from usage_feed_heads where tenant_id = $1");
    let written: i64 = heads.bind(tenant.as_str()).fetch_one(&database).await.expect("a sum");
    let mut rates = Vec::new();
    for _ in 0..5 {
        let (mut feed, mut records) = (client.feed(&tenant, None), 0);
        let began = Instant::now();
        while records < written as usize {
            records += feed.next().await.expect("a page").records.len();
        }
        rates.push(records as f64 / began.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    let detail = format!("{:.0} to {:.0} in five rounds, over NATS", at(&rates, 0.0), at(&rates, 1.0));
    Measured::new(Unit::PerSecond, 100_000.0, at(&rates, 0.5), detail)
}

const REPLACED: usize = 1_000_000;
const PART: usize = 2000;

/// Rounds of bare inserts before it and after it: about as many rows.
const BARE_ROUNDS: usize = 21;

fn events(part: usize, from: DateTime<Utc>) -> Vec<Json> {
    let event = |number: usize| {
        Json::from(&json!({
            "usage_type": TYPES[0].0, "resource_id": format!("resource-{:05}", number % 500), "resource_type": "instance",
            "value": number, "event_timestamp": from + TimeDelta::milliseconds((part * PART + number) as i64),
            "idempotency_key": Uuid::now_v7(), "metadata": { "region": "eu-west", "zone": number % 3 },
        }))
    };
    (0..PART).map(event).collect()
}

async fn backfill(ground: &Ground) -> Measured {
    let (database, client) = (ground.database().await, ground.client().await);
    register(&client).await;
    let mut bare = Vec::new();
    for _ in 0..BARE_ROUNDS {
        bare.push(inserted(&database, messages()).await);
    }
    let (tenant, source) = (name("bench-backfill"), name(SOURCE));
    let from = Utc::now() - TimeDelta::days(10);
    let parts: Vec<Vec<Json>> = (0..REPLACED / PART).map(|part| events(part, from)).collect();
    let request = BackfillRequest {
        usage_type: TYPES[0].0.into(),
        time_range: TimeRange { from, to: from + TimeDelta::days(1) },
        replacement_events: Vec::new(),
        mode: BackfillMode::Blocking,
        reason: "a benchmark".into(),
        dry_run: false,
        staged: true,
    };
    let began = Instant::now();
    let answer = client.submit_backfill(&tenant, &source, &request).await.expect("it begins");
    let BackfillAnswer::Operation(begun) = answer else { unreachable!("it was no dry run") };
    let id = begun.id;
    stream::iter(parts)
        .map(async |records| client.send_backfill_events(&tenant, &source, &BackfillEvents { id, records }).await)
        .buffer_unordered(4)
        .for_each(async |sent| assert!(sent.expect("they are taken").rejected.is_empty()))
        .await;
    let received = began.elapsed();
    client.commit_backfill(&tenant, &BackfillId { id }).await.expect("it is carried out");
    while client.get_backfill(&tenant, &BackfillId { id }).await.expect("it is there").is_deferred() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (rate, whole) = (REPLACED as f64 / began.elapsed().as_secs_f64(), began.elapsed());
    for _ in 0..BARE_ROUNDS {
        bare.push(inserted(&database, messages()).await);
    }
    // As many rows in all, over the time that they took.
    let bare = bare.len() as f64 / bare.iter().map(|rate| 1.0 / rate).sum::<f64>();
    let detail = format!(
        "{rate:.0}/s against {bare:.0}/s of bare inserts; {:.1} s to receive, {:.1} s to write",
        received.as_secs_f64(),
        (whole - received).as_secs_f64()
    );
    Measured::new(Unit::Ratio, 0.5, rate / bare, detail)
}
