//! Increment requests over NATS against an empty echo endpoint, side by side in one run.
//!
//! Both are micro services of this process on one nats-server with every write synced, asked by the same 64 callers. They
//! take turns, and the median of the rounds counts, so that a busy machine slows both and the ratio stays.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_nats::{Client, ConnectOptions, service::ServiceExt};
use futures::StreamExt;
use tidemark::{
    api::ids::IncrementSettings,
    config::Config,
    embedded::{Up, UpOptions},
    jetstream::connect_to,
    server::Server,
};
use tokio_util::sync::CancellationToken;

const IN_FLIGHT: usize = 64;
const ROUNDS: usize = 60;
/// Short, so that what else the machine does hits both sides of a pair.
const ROUND: Duration = Duration::from_millis(300);
const WARM_UP: usize = 4;
const GOAL: f64 = 0.85;

#[tokio::main]
async fn main() {
    let folder = std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id()));
    let options = UpOptions { data: folder.clone(), http_port: 0, nats_port: 0, pg_port: 0, tenants: Vec::new() };
    let mut config = Config::from_parts(None, Default::default()).expect("the defaults are valid");
    let up = Up::start(&options, &config).await.expect("the servers start");
    up.configure(&mut config);
    let url = config.nats.url.expose().to_owned();
    let stop = CancellationToken::new();
    let server = Server::bind(config).await.expect("the server binds");
    let mut ready = server.is_ready();
    let serving = tokio::spawn(server.run(stop.clone()));
    ready.wait_for(|ready| *ready).await.expect("the server starts");

    let connect = async || connect_to(ConnectOptions::new(), &url).await.expect("NATS answers");
    let echo = tokio::spawn(echo(connect().await));
    let caller = connect().await;
    let client = tidemark::client::Client::new(caller.clone(), "tm".parse().expect("a name"));
    let key = "bench".parse().expect("a name");
    client.set_increment(&key, &IncrementSettings::from_base(0)).await.expect("the key is made");

    let mut rates: Vec<(f64, f64)> = Vec::new();
    for round in 0..WARM_UP + ROUNDS {
        let baseline = rate(&caller, "bench.echo").await;
        let measured = rate(&caller, "tm.id.increment.bench").await;
        // The first rounds warm up.
        if round >= WARM_UP {
            rates.push((baseline, measured));
        }
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        (values[values.len() / 4], values[values.len() / 2], values[values.len() * 3 / 4])
    };
    let (_, baseline, _) = median(rates.iter().map(|(baseline, _)| *baseline).collect());
    let (_, measured, _) = median(rates.iter().map(|(_, measured)| *measured).collect());
    let (low, ratio, high) = median(rates.iter().map(|(baseline, measured)| measured / baseline).collect());
    let verdict = if ratio >= GOAL { "met" } else { "MISSED" };
    println!("echo {baseline:.0}/s, increment {measured:.0}/s, medians of {} pairs", rates.len());
    println!(
        "increment over NATS, {IN_FLIGHT} in flight: {ratio:.2} of echo (middle half {low:.2} to {high:.2}), \
         goal {GOAL}: {verdict}"
    );

    stop.cancel();
    serving.await.expect("no panic").expect("a clean stop");
    echo.abort();
    up.stop().await;
    let _ = std::fs::remove_dir_all(folder);
    if ratio < GOAL {
        std::process::exit(1);
    }
}

/// Requests per second, from as many callers as are in flight.
async fn rate(client: &Client, subject: &'static str) -> f64 {
    let (count, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let began = Instant::now();
    let callers: Vec<_> = (0..IN_FLIGHT)
        .map(|_| {
            let (client, count, done) = (client.clone(), count.clone(), done.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    let reply = client.request(subject, Default::default()).await.expect("an answer");
                    assert!(reply.headers.is_none(), "an error: {reply:?}");
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    tokio::time::sleep(ROUND).await;
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.expect("no panic");
    }
    count.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64()
}

/// The emptiest endpoint there is.
async fn echo(client: Client) {
    let service = client.service_builder().start("echo", "1.0.0").await.expect("the echo starts");
    let endpoint = service.endpoint("bench.echo").await.expect("the echo listens");
    endpoint
        .for_each_concurrent(1024, async |request| {
            request.respond(Ok(request.message.payload.clone())).await.expect("the echo answers");
        })
        .await;
}
