//! Reading and replacing what the usage ledger has.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use futures::{FutureExt, StreamExt, future::join_all, stream};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Ground, Measure, Measured, Unit, name,
    usage::{SOURCE, TYPES, fill, inserted, messages, published, register, verdict_latencies},
};
use crate::{
    api::usage::{
        BackfillAnswer, BackfillEvents, BackfillId, BackfillMode, BackfillRequest, FeedRequest, MOST_OF_THE_FEED,
        RecordQuery, TimeRange,
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

fn at(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
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
    Measured { goal, figure: at(&times, 0.95), unit: Unit::Milliseconds, detail }
}

/// Verdicts as of a thousand records a second, alone and while four readers page.
async fn beside_readers(ground: &Ground) -> Measured {
    fill(&ground.database().await, MANY).await;
    let (nats, client) = (ground.nats().await, ground.client().await);
    register(&client).await;
    let alone = verdict_latencies(&nats).await;
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
        let beside = verdict_latencies(&nats).await;
        stop.cancel();
        beside
    };
    let (pages, beside): (Vec<usize>, _) = tokio::join!(join_all((0..4).map(reader)), measuring);
    let detail =
        format!("alone {:.1} ms; {} pages of 100 were read meanwhile", at(&alone, 0.95), pages.iter().sum::<usize>());
    Measured { goal: at(&alone, 0.95) * 1.5, figure: at(&beside, 0.95), unit: Unit::Milliseconds, detail }
}

async fn feed(ground: &Ground) -> Measured {
    let (nats, database, client) = (ground.nats().await, ground.database().await, ground.client().await);
    register(&client).await;
    let first = Utc::now().timestamp() as usize;
    for round in 0..20 {
        published(&nats, &database, messages(first + round)).await;
    }
    let tenant = name("bench-0");
    let mut rates = Vec::new();
    for _ in 0..5 {
        let (mut position, mut records) = (None, 0);
        let began = Instant::now();
        loop {
            let request = FeedRequest { position: position.take(), limit: Some(MOST_OF_THE_FEED), wait: None };
            let page = client.read_feed(&tenant, &request).await.expect("a page");
            if page.records.is_empty() {
                break;
            }
            records += page.records.len();
            position = Some(page.next_position);
        }
        rates.push(records as f64 / began.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    let detail = format!("{:.0} to {:.0} in five rounds, over NATS", at(&rates, 0.0), at(&rates, 1.0));
    Measured { goal: 100_000.0, figure: at(&rates, 0.5), unit: Unit::PerSecond, detail }
}

const REPLACED: usize = 1_000_000;
const PART: usize = 2000;

fn events(part: usize, from: DateTime<Utc>) -> Vec<Value> {
    let event = |number: usize| {
        json!({
            "usage_type": TYPES[0].0, "resource_id": format!("resource-{:05}", number % 500), "resource_type": "instance",
            "value": number, "event_timestamp": from + TimeDelta::milliseconds((part * PART + number) as i64),
            "idempotency_key": Uuid::now_v7(), "metadata": { "region": "eu-west", "zone": number % 3 },
        })
    };
    (0..PART).map(event).collect()
}

async fn backfill(ground: &Ground) -> Measured {
    let (database, client) = (ground.database().await, ground.client().await);
    register(&client).await;
    let first = Utc::now().timestamp() as usize;
    let mut bare = Vec::new();
    for round in 0..10 {
        bare.push(inserted(&database, messages(first + round)).await);
    }
    bare.sort_by(f64::total_cmp);
    let (tenant, source) = (name("bench-backfill"), name(SOURCE));
    let from = Utc::now() - TimeDelta::days(10);
    let parts: Vec<Vec<Value>> = (0..REPLACED / PART).map(|part| events(part, from)).collect();
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
    let bare = at(&bare, 0.5);
    let detail = format!(
        "{rate:.0}/s against {bare:.0}/s of bare inserts; {:.1} s to receive, {:.1} s to write",
        received.as_secs_f64(),
        (whole - received).as_secs_f64()
    );
    Measured { goal: 0.5, figure: rate / bare, unit: Unit::Ratio, detail }
}
