//! The usage ledger.

use std::time::{Duration, Instant};

use bytes::Bytes;
use chrono::Utc;
use futures::{StreamExt, future::FutureExt, stream};
use serde_json::{json, value::RawValue};
use sqlx::PgPool;
use uuid::Uuid;

use super::{Ground, Measure, Measured, Plot, Unit, at, load::Pairs, memory_of_this_process, name, plot::Line};
use crate::{
    api::usage::{MetricKind, NewSource, NewUnit, RegisterSource, RegisterUnit},
    client::Client,
    usage::{
        identity::Origin,
        record::{self, Record},
        store::{self, NewRow},
    },
};

pub const ROWS: &[(&str, Measure)] = &[
    ("usage, published to committed", |ground| throughput(ground, Goal::Ratio).boxed_local()),
    ("usage, records a second", |ground| throughput(ground, Goal::Rate).boxed_local()),
    ("usage, verdict at 1000/s, p95", |ground| verdicts(ground).boxed_local()),
    ("usage, beside 10 M rows: ratio", |ground| beside_many(ground, Goal::Ratio).boxed_local()),
    ("usage, beside 10 M rows: rate", |ground| beside_many(ground, Goal::Rate).boxed_local()),
    ("usage, memory under load", |ground| memory(ground).boxed_local()),
];

enum Goal {
    /// Of bare inserts of the same rows into the same table.
    Ratio,
    Rate,
}

const TENANTS: usize = 8;
pub const SOURCE: &str = "bench";
pub const TYPES: [(&str, MetricKind); 2] = [("bench_calls", MetricKind::Gauge), ("bench_bytes", MetricKind::Counter)];
const RESOURCES: usize = 500;

/// Records of one message, as the emitter sends them.
const MESSAGE: usize = 500;
const MESSAGES: usize = 48;
const ROUNDS: usize = 12;
const WARM_UP: usize = 2;

/// Connections that saturate two cores.
const BARE_WRITERS: usize = 2;
const BARE_BATCH: usize = 1000;

pub async fn register(client: &Client) {
    let source = name(SOURCE);
    client.call::<RegisterSource>(&(), &NewSource { name: source }).await.expect("a source");
    for (unit, kind) in TYPES {
        let unit = NewUnit {
            name: unit.into(),
            metric_kind: kind.as_str().into(),
            base_unit: "one".into(),
            schema: json!({ "type": "object" }),
            allowed_sources: vec![SOURCE.into()],
            ..NewUnit::default()
        };
        // It may be there from the row before.
        let _ = client.call::<RegisterUnit>(&(), &unit).await;
    }
}

fn tenant(number: usize) -> String {
    format!("bench-{}", number % TENANTS)
}

/// A message of records that nobody has seen. Counters rise with the time at which they were made.
fn message() -> Bytes {
    let value = Utc::now().timestamp_millis();
    let record = |number: usize| {
        json!({
            "usage_type": TYPES[number % 2].0,
            "resource_id": format!("resource-{:05}", number % RESOURCES),
            "resource_type": "instance",
            "value": value,
            "event_timestamp": Utc::now(),
            "idempotency_key": Uuid::now_v7(),
            "metadata": { "region": "eu-west", "zone": number % 3 },
        })
    };
    json!((0..MESSAGE).map(record).collect::<Vec<_>>()).to_string().into()
}

pub fn messages() -> Vec<(String, Bytes)> {
    (0..MESSAGES).map(|number| (tenant(number), message())).collect()
}

/// Publishes messages and returns when all their records are in the ledger: records a second.
pub async fn published(nats: &async_nats::Client, database: &PgPool, messages: Vec<(String, Bytes)>) -> f64 {
    let jetstream = async_nats::jetstream::new(nats.clone());
    let before = committed(database).await;
    let expected = before + (messages.len() * MESSAGE) as i64;
    let began = Instant::now();
    let sent = stream::iter(messages).map(|(tenant, body)| {
        let jetstream = jetstream.clone();
        async move {
            let subject = format!("usage.{tenant}.{SOURCE}");
            jetstream.publish(subject, body).await.expect("sent").await.expect("stored");
        }
    });
    sent.buffer_unordered(16).for_each(async |()| {}).await;
    while committed(database).await < expected {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    (expected - before) as f64 / began.elapsed().as_secs_f64()
}

/// Records that are in the ledger. Whoever waits for one that was refused would wait for ever.
async fn committed(database: &PgPool) -> i64 {
    let sums = "select coalesce(sum(accepted), 0)::bigint, coalesce(sum(rejected), 0)::bigint
         from usage_minutes where source_id = $1";
    let (accepted, rejected): (i64, i64) = sqlx::query_as(sums).bind(SOURCE).fetch_one(database).await.expect("sums");
    assert_eq!(rejected, 0, "none is refused");
    accepted
}

/// The same rows straight into the table: rows a second.
pub async fn inserted(database: &PgPool, messages: Vec<(String, Bytes)>) -> f64 {
    let rows: Vec<(String, Record)> = messages
        .iter()
        .flat_map(|(tenant, body)| {
            let origin = Origin { tenant, source: "bare" };
            let read = |raw: &RawValue| record::read(raw.get(), origin, None, usize::MAX).expect("a good record");
            record::split(body)
                .expect("a list")
                .into_iter()
                .map(read)
                .map(|record| (tenant.clone(), record))
                .collect::<Vec<_>>()
        })
        .collect();
    let began = Instant::now();
    stream::iter(rows.chunks(BARE_BATCH))
        .map(async |rows| {
            let rows: Vec<NewRow<'_>> = rows
                .iter()
                .map(|(tenant, record)| NewRow {
                    origin: Origin { tenant, source: "bare" },
                    record,
                    kind: TYPES.iter().find(|(name, _)| *name == record.usage_type).expect("a type").1,
                })
                .collect();
            let mut connection = database.acquire().await.expect("a connection");
            assert_eq!(store::insert(&mut connection, &rows).await.expect("inserted"), rows.len());
        })
        .buffer_unordered(BARE_WRITERS)
        .for_each(async |()| {})
        .await;
    rows.len() as f64 / began.elapsed().as_secs_f64()
}

async fn throughput(ground: &Ground, goal: Goal) -> Measured {
    let (nats, database) = (ground.nats().await, ground.database().await);
    register(&ground.client().await).await;
    let mut rates = Vec::new();
    let rounds = ground.effort.at_most(ROUNDS);
    for round in 0..WARM_UP + rounds {
        let bare = inserted(&database, messages()).await;
        let ours = published(&nats, &database, messages()).await;
        if round >= WARM_UP {
            rates.push((bare, ours));
        }
    }
    let pairs = Pairs::of(&rates);
    let detail = pairs.detail("bare inserts");
    let line = |name, rate: fn(&(f64, f64)) -> f64| Line {
        name,
        points: rates.iter().enumerate().map(|(round, rates)| ((round + 1) as f64, rate(rates))).collect(),
    };
    let lines = vec![line("published to committed", |rates| rates.1), line("bare inserts", |rates| rates.0)];
    let plot = Plot { title: "Ingest over time", x: "round", y: "records/s", lines };
    match goal {
        Goal::Ratio => Measured::new(Unit::Ratio, 0.5, pairs.ratio.middle, detail).with(plot),
        Goal::Rate => Measured::new(Unit::PerSecond, 20_000.0, pairs.measured.middle, detail).with(plot),
    }
}

async fn verdicts(ground: &Ground) -> Measured {
    register(&ground.client().await).await;
    let late = verdict_latencies(&ground.nats().await).await;
    let (p50, p95, worst) = (at(&late, 0.5), at(&late, 0.95), at(&late, 1.0));
    let detail = format!("p50 {p50:.1}, p95 {p95:.1}, worst {worst:.1} ms, ten records with each request");
    let plot = Plot::of_latencies("From a request to its verdict, 1,000 records/s", &[("requests", &late)]);
    Measured::new(Unit::Milliseconds, 50.0, p95, detail).with(plot)
}

/// A hundred requests a second, ten records each, for ten seconds: how long each took, in order.
pub async fn verdict_latencies(nats: &async_nats::Client) -> Vec<f64> {
    let began = tokio::time::Instant::now();
    let subject = format!("tm.usage.ingest.{}.{SOURCE}", tenant(0));
    let requests = (0..1000u32).map(|number| {
        let (nats, subject) = (nats.clone(), subject.clone());
        async move {
            let due = began + Duration::from_millis(10) * number;
            tokio::time::sleep_until(due).await;
            let record = |_| {
                json!({
                    "usage_type": TYPES[0].0, "resource_id": "r", "value": 1, "event_timestamp": Utc::now(),
                    "idempotency_key": Uuid::now_v7(),
                })
            };
            let body = json!((0..10).map(record).collect::<Vec<_>>()).to_string();
            let reply = nats.request(subject, body.into()).await.expect("an answer");
            assert!(reply.payload.starts_with(b"{\"accepted\":10,"), "{reply:?}");
            due.elapsed().as_secs_f64() * 1000.0
        }
    });
    let mut late: Vec<f64> = stream::iter(requests).buffer_unordered(1000).collect().await;
    late.sort_by(f64::total_cmp);
    late
}

async fn beside_many(ground: &Ground, goal: Goal) -> Measured {
    fill(&ground.database().await, 10_000_000).await;
    throughput(ground, goal).await
}

/// Makes sure that the ledger has so many rows of the last thirty days.
pub async fn fill(database: &PgPool, count: i64) {
    let there: i64 =
        sqlx::query_scalar("select count(*) from usage_records").fetch_one(database).await.expect("a count");
    let step = 500_000;
    let make = async |first: i64| {
        let made = "insert into usage_records (id, tenant_id, source_id, resource_id, usage_type, metric_kind, value,
                 event_timestamp, idempotency_key, metadata, body_hash, series)
             select (left(usage_id_at(at)::text, 14) || substr(md5(number::text), 1, 4) || '-'
                     || substr(md5(number::text), 5, 4) || '-' || substr(md5(number::text), 9, 12))::uuid,
                 'tenant-' || number % 100, 'fill', 'resource-' || number % 5000, 'type-' || number % 21,
                 case when number % 2 = 0 then 'gauge' else 'counter' end, number, at, gen_random_uuid()::text,
                 '{\"region\": \"eu-west\"}', decode(md5(number::text), 'hex'),
                 case when number % 2 = 1 then md5((number % 5000)::text)::uuid end
             from (select number, now() - interval '30 days' * (1 - number::float / $3::bigint) as at
                 from generate_series($1::bigint, $2::bigint) as number) as moments
             on conflict do nothing";
        let last = (first + step - 1).min(count);
        sqlx::query(made).bind(first).bind(last).bind(count).execute(database).await.expect("rows are made");
    };
    stream::iter((there..count).step_by(step as usize)).map(make).buffer_unordered(2).for_each(async |()| {}).await;
    sqlx::query("vacuum analyze usage_records").execute(database).await.expect("the rows are counted");
    sqlx::query("checkpoint").execute(database).await.ok();
}

/// How much more memory the process has after ten minutes of steady load than after the first; with less effort, after fewer.
async fn memory(ground: &Ground) -> Measured {
    let (nats, database) = (ground.nats().await, ground.database().await);
    register(&ground.client().await).await;
    let began = Instant::now();
    let (mut after_one, mut records) = (None, 0);
    while after_one.is_none() || began.elapsed() < Duration::from_secs(15) * ground.effort.at_most(40) as u32 {
        let messages = messages();
        records += messages.len() * MESSAGE;
        published(&nats, &database, messages).await;
        if after_one.is_none() && began.elapsed() > Duration::from_secs(60) {
            after_one = Some(memory_of_this_process());
        }
    }
    let (first, last) = (after_one.expect("a minute has passed"), memory_of_this_process());
    let (minutes, records) = (began.elapsed().as_secs_f64() / 60.0, records as f64 / 1e6);
    let detail =
        format!("{first:.0} MB after a minute, {last:.0} MB after {minutes:.0} minutes and {records:.1} M records");
    Measured::new(Unit::Megabytes, 20.0, (last - first).max(0.0), detail)
}
