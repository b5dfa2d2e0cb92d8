//! Timers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use chrono::{DateTime, TimeDelta, Utc};
use futures::{StreamExt, future::FutureExt};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify, time::timeout};

use super::{
    Ground, Measure, Measured, Plot, Unit, at,
    load::{IN_FLIGHT, rate},
    memory_of_this_process,
};

pub const ROWS: &[(&str, Measure)] = &[
    ("timers, 1000 a second, p50", |ground| lateness(ground, 0.50, 5.0).boxed_local()),
    ("timers, 1000 a second, p99", |ground| lateness(ground, 0.99, 25.0).boxed_local()),
    ("timers, 10000 at once, NATS", |ground| at_once_on_nats(ground).boxed_local()),
    ("timers, 10000 at once, HTTP", |ground| at_once_on_http(ground).boxed_local()),
    ("timers set, 64 in flight", |ground| set_singly(ground).boxed_local()),
    ("timers set, in bulk", |ground| set_in_bulk(ground).boxed_local()),
    ("far timers: 1000 a second, p99", |ground| beside_far_timers(ground, Beside::Lateness).boxed_local()),
    ("far timers: 10000 at once, NATS", |ground| beside_far_timers(ground, Beside::AtOnce).boxed_local()),
    ("far timers: 10000 at once, HTTP", |ground| beside_far_timers(ground, Beside::AtOnceOnHttp).boxed_local()),
    ("far timers: set, 64 in flight", |ground| beside_far_timers(ground, Beside::Set).boxed_local()),
    ("far timers: set, in bulk", |ground| beside_far_timers(ground, Beside::SetInBulk).boxed_local()),
    ("far timers: memory", |ground| beside_far_timers(ground, Beside::Memory).boxed_local()),
];

/// Set so long before they are due that all are kept by then.
const AHEAD: TimeDelta = TimeDelta::seconds(8);
const BULK: usize = 1000;

/// Sets timers at the given moments, a thousand with each call.
async fn set(ground: &Ground, moments: &[DateTime<Utc>], callback: impl Fn(&DateTime<Utc>) -> Value) {
    let nats = ground.nats().await;
    let timer = |moment: &DateTime<Utc>| json!({ "execute_at": moment, "callback": callback(moment) });
    for moments in moments.chunks(BULK) {
        let timers: Vec<Value> = moments.iter().map(timer).collect();
        let body = json!({ "timers": timers }).to_string();
        let reply = nats.request("tm.timer.bulk.default", body.into()).await.expect("an answer");
        let results: Value = serde_json::from_slice(&reply.payload).expect("JSON");
        let results = results["results"].as_array().unwrap_or_else(|| panic!("{results}"));
        assert!(results.iter().all(|result| result["code"] == 0), "{results:?}");
    }
}

/// A thousand timers in each of ten seconds, evenly spread: how late each was heard, in milliseconds.
async fn lateness(ground: &Ground, share: f64, goal: f64) -> Measured {
    let nats = ground.nats().await;
    let mut heard = nats.subscribe("bench.timer.late").await.expect("a subscription");
    crate::jetstream::round_trip(&nats).await.expect("a connection");
    let first = Utc::now() + AHEAD;
    let moments: Vec<_> = (0..10_000).map(|number| first + TimeDelta::milliseconds(number)).collect();
    let callback = |moment: &DateTime<Utc>| json!({ "type": "nats", "topic": "bench.timer.late", "payload": moment.timestamp_micros() });
    set(ground, &moments, callback).await;
    let mut late = Vec::with_capacity(moments.len());
    while late.len() < moments.len() {
        let message = timeout(Duration::from_secs(60), heard.next()).await.expect("all fire").expect("a message");
        let due: i64 = serde_json::from_slice(&message.payload).expect("a number");
        late.push((Utc::now().timestamp_micros() - due) as f64 / 1000.0);
    }
    late.sort_by(f64::total_cmp);
    let early = late.iter().filter(|late| **late < 0.0).count();
    let detail =
        format!("p50 {:.1}, p99 {:.1}, worst {:.1} ms; {early} early", at(&late, 0.5), at(&late, 0.99), at(&late, 1.0));
    let figure = if early == 0 { at(&late, share) } else { f64::INFINITY };
    let plot = Plot::of_latencies("How late timers fire, 1,000 a second", &[("timers", &late)]);
    Measured::new(Unit::Milliseconds, goal, figure, detail).with(plot)
}

/// So many timers of one instant, and after how many seconds the last was heard.
const AT_ONCE: usize = 10_000;

async fn at_once_on_nats(ground: &Ground) -> Measured {
    let nats = ground.nats().await;
    let mut heard = nats.subscribe("bench.timer.burst").await.expect("a subscription");
    crate::jetstream::round_trip(&nats).await.expect("a connection");
    let due = Utc::now() + AHEAD;
    set(ground, &vec![due; AT_ONCE], |_| json!({ "type": "nats", "topic": "bench.timer.burst" })).await;
    for _ in 0..AT_ONCE {
        timeout(Duration::from_secs(60), heard.next()).await.expect("all fire").expect("a message");
        assert!(Utc::now() >= due, "a timer fired early");
    }
    let detail = "until the last was heard, on a subject that no stream takes".to_owned();
    Measured::new(Unit::Seconds, 1.0, seconds_since(due), detail)
}

async fn at_once_on_http(ground: &Ground) -> Measured {
    let (count, last) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let (counted, all) = (count.clone(), last.clone());
    let sink = Router::new().route(
        "/",
        post(async move || {
            if counted.fetch_add(1, Ordering::Relaxed) + 1 == AT_ONCE {
                all.notify_one();
            }
        }),
    );
    let serving = tokio::spawn(async move { axum::serve(listener, sink).await });
    let due = Utc::now() + AHEAD;
    set(ground, &vec![due; AT_ONCE], |_| json!({ "type": "http", "url": url, "payload": { "a": 1 } })).await;
    timeout(Duration::from_secs(60), last.notified()).await.expect("all fire");
    let figure = seconds_since(due);
    serving.abort();
    Measured::new(Unit::Seconds, 3.0, figure, "until the last had come to a local sink".to_owned())
}

fn seconds_since(due: DateTime<Utc>) -> f64 {
    (Utc::now() - due).num_microseconds().unwrap_or(i64::MAX) as f64 / 1e6
}

/// One timer with each request.
async fn set_singly(ground: &Ground) -> Measured {
    let nats = ground.nats().await;
    let spread = ground
        .effort
        .rounds(async || {
            let nats = nats.clone();
            rate(IN_FLIGHT, move || {
                let nats = nats.clone();
                async move {
                    let timer = r#"{"execute_in": "2h", "callback": {"type": "nats", "topic": "bench.never"}}"#;
                    let reply = nats.request("tm.timer.create.default", timer.into()).await.expect("an answer");
                    assert!(reply.headers.is_none(), "an error: {reply:?}");
                }
            })
            .await
        })
        .await;
    let detail = format!("kept before the answer (middle half {:.0} to {:.0})", spread.low, spread.high);
    Measured::new(Unit::PerSecond, 3_000.0, spread.middle, detail)
}

async fn set_in_bulk(ground: &Ground) -> Measured {
    let nats = ground.nats().await;
    let timer = r#"{"execute_in": "2h", "callback": {"type": "nats", "topic": "bench.never"}}"#;
    let body = format!(r#"{{"timers": [{}]}}"#, vec![timer; BULK].join(","));
    let spread = ground
        .effort
        .rounds(async || {
            let (nats, body) = (nats.clone(), body.clone());
            let calls = rate(4, move || {
                let (nats, body) = (nats.clone(), body.clone());
                async move {
                    let reply = nats.request("tm.timer.bulk.default", body.into()).await.expect("an answer");
                    assert!(reply.headers.is_none(), "an error: {reply:?}");
                }
            });
            calls.await * BULK as f64
        })
        .await;
    let detail =
        format!("{BULK} with each request, four at once (middle half {:.0} to {:.0})", spread.low, spread.high);
    Measured::new(Unit::PerSecond, 20_000.0, spread.middle, detail)
}

/// What a million far timers must not change.
enum Beside {
    Lateness,
    AtOnce,
    AtOnceOnHttp,
    Set,
    SetInBulk,
    Memory,
}

async fn beside_far_timers(ground: &Ground, what: Beside) -> Measured {
    ground.have_far_timers(1_000_000).await;
    match what {
        Beside::Lateness => lateness(ground, 0.99, 25.0).await,
        Beside::AtOnce => at_once_on_nats(ground).await,
        Beside::AtOnceOnHttp => at_once_on_http(ground).await,
        Beside::Set => set_singly(ground).await,
        Beside::SetInBulk => set_in_bulk(ground).await,
        Beside::Memory => memory(),
    }
}

/// Of this process, which serves and measures at once.
fn memory() -> Measured {
    let detail = "resident, server and benchmark together".to_owned();
    Measured::new(Unit::Megabytes, 200.0, memory_of_this_process(), detail)
}
