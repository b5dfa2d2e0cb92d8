//! Identifiers.

use std::time::{Duration, Instant};

use futures::future::FutureExt;
use serde_json::json;

use super::{
    Ground, Measure, Measured, Unit,
    ground::{ADMIN_TOKEN, ECHO},
    load::{IN_FLIGHT, rate, requests},
    name,
};
use crate::{
    api::ids::{IncrementRequest, IncrementSettings},
    client::Client,
};

pub const ROWS: &[(&str, Measure)] = &[
    ("increment over NATS", |ground| increment_over_nats(ground).boxed_local()),
    ("increment over HTTP", |ground| increment_over_http(ground).boxed_local()),
    ("formatted", |ground| formatted(ground).boxed_local()),
    ("increment, 1000 at once", |ground| a_thousand_at_once(ground).boxed_local()),
    ("increment, three instances", |ground| three_instances(ground).boxed_local()),
    ("snowflake in the client", |ground| snowflake_in_the_client(ground).boxed_local()),
];

async fn make_increment(client: &Client) {
    client.set_increment(&name("bench"), &IncrementSettings::from_base(0)).await.expect("the key is made");
}

async fn increment_over_nats(ground: &Ground) -> Measured {
    make_increment(&ground.client().await).await;
    let nats = ground.nats().await;
    let pairs = ground
        .effort
        .pairs(
            async || requests(&nats, ECHO, IN_FLIGHT).await,
            async || requests(&nats, "tm.id.increment.bench", IN_FLIGHT).await,
        )
        .await;
    let detail = pairs.detail("of an echo");
    Measured::new(Unit::Ratio, 0.85, pairs.ratio.middle, detail)
}

async fn increment_over_http(ground: &Ground) -> Measured {
    make_increment(&ground.client().await).await;
    let http = reqwest::Client::builder().pool_max_idle_per_host(IN_FLIGHT).build().expect("a client");
    let get = async |path: &str| {
        let (http, url) = (http.clone(), format!("{}{path}", ground.url));
        rate(IN_FLIGHT, move || {
            let request = http.get(&url).bearer_auth(ADMIN_TOKEN);
            async move {
                let answer = request.send().await.expect("an answer");
                assert!(answer.status().is_success(), "{answer:?}");
                answer.bytes().await.expect("a body");
            }
        })
        .await
    };
    let pairs =
        ground.effort.pairs(async || get("/health").await, async || get("/v1/id/increment?key=bench").await).await;
    let detail = pairs.detail("of an empty route");
    Measured::new(Unit::Ratio, 0.80, pairs.ratio.middle, detail)
}

async fn formatted(ground: &Ground) -> Measured {
    let client = ground.client().await;
    make_increment(&client).await;
    let settings =
        json!({"parts": [{"type": "fixed-chars", "value": "INV-"}, {"type": "auto-increment", "length": 8}]});
    let settings = serde_json::from_value(settings).expect("valid settings");
    client.set_formatted(&name("bench-formatted"), &settings).await.expect("the key is made");
    let nats = ground.nats().await;
    let pairs = ground
        .effort
        .pairs(
            async || requests(&nats, "tm.id.increment.bench", IN_FLIGHT).await,
            async || requests(&nats, "tm.id.formatted.bench-formatted", IN_FLIGHT).await,
        )
        .await;
    let detail = pairs.detail("of increment");
    Measured::new(Unit::Ratio, 0.70, pairs.ratio.middle, detail)
}

async fn a_thousand_at_once(ground: &Ground) -> Measured {
    let client = ground.client().await;
    make_increment(&client).await;
    let spread = ground
        .effort
        .rounds(async || {
            let client = client.clone();
            let asked = rate(IN_FLIGHT, move || {
                let client = client.clone();
                async move {
                    let request = IncrementRequest { size: Some(1000), ..Default::default() };
                    client.increment(&name("bench"), &request).await.expect("ids");
                }
            })
            .await;
            asked * 1000.0
        })
        .await;
    let detail = format!("ids a second, MessagePack (middle half {:.0} to {:.0})", spread.low, spread.high);
    Measured::new(Unit::PerSecond, 1e6, spread.middle, detail)
}

/// Three must not be slower in sum than one. Where all share the same cores they can't be faster either, so a tie is what
/// there is to see, and the goal leaves room for the noise of a tie.
async fn three_instances(ground: &Ground) -> Measured {
    let (one, three) = tokio::join!(ground.serve_beside("one", 1), ground.serve_beside("three", 3));
    make_increment(&one.client).await;
    make_increment(&three.client).await;
    let nats = ground.nats().await;
    let pairs = ground
        .effort
        .pairs(
            async || requests(&nats, "one.id.increment.bench", IN_FLIGHT).await,
            async || requests(&nats, "three.id.increment.bench", IN_FLIGHT).await,
        )
        .await;
    tokio::join!(one.stop(), three.stop());
    let detail = pairs.detail("of one instance");
    Measured::new(Unit::Ratio, 0.95, pairs.ratio.middle, detail)
}

async fn snowflake_in_the_client(ground: &Ground) -> Measured {
    const LIMIT: f64 = 4_096_000.0;
    let client = ground.client().await;
    let layout = json!({"base_ts": 1_700_000_000_000_i64, "ts_size": 41, "worker_id_size": 10, "seq_size": 12});
    let layout = serde_json::from_value(layout).expect("a valid layout");
    client.set_snowflake(&name("bench-snowflake"), &layout).await.expect("the key is made");
    let snowflakes = client.snowflakes(&name("bench-snowflake")).await.expect("a worker id");
    let spread = ground
        .effort
        .rounds(async || {
            tokio::task::block_in_place(|| {
                let (began, mut count) = (Instant::now(), 0_u64);
                while began.elapsed() < Duration::from_millis(300) {
                    for _ in 0..1000 {
                        snowflakes.next_blocking().expect("an id");
                    }
                    count += 1000;
                }
                count as f64 / began.elapsed().as_secs_f64()
            })
        })
        .await;
    snowflakes.stop().await.expect("the worker id is given back");
    let detail = format!("one thread; {:.1} % of what 12 bits allow", spread.middle / LIMIT * 100.0);
    Measured::new(Unit::PerSecond, 4e6, spread.middle, detail)
}
