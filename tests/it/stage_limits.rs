//! How often one address may ask for a stage.

use async_nats::jetstream;
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use tidemark::{clock::Clock, config::Config, jetstream::stored, server::Server};
use uuid::Uuid;

use crate::support::{Answer, Deployment, Http, Running, eventually};

async fn ask(http: &Http) -> u16 {
    post(http).await.status
}

async fn post(http: &Http) -> Answer {
    let id = Uuid::new_v4().to_string();
    http.clone().header("x-request-id", &id).post("/stages", json!({})).await
}

fn refused(answer: &Answer, retry_after: &str) {
    assert_eq!((answer.status, &*answer.text), (429, r#"{"error":"Too many requests."}"#));
    assert_eq!(answer.headers["retry-after"], retry_after);
}

/// When the requests of 127.0.0.1 were counted.
async fn entries(deployment: &Deployment) -> Vec<DateTime<Utc>> {
    let context = jetstream::new(deployment.nats().await);
    let stream = context.get_stream("tm_STAGE_LIMITS").await.unwrap();
    let mut times = Vec::new();
    let mut next = 1;
    while let Ok(message) = stream.get_first_raw_message_by_subject("tm_stage_limits.v4-127-0-0-1", next).await {
        times.push(stored::time(message.time));
        next = message.sequence + 1;
    }
    times
}

#[tokio::test]
async fn five_pass_and_the_sixth_when_the_first_has_left_the_window() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(Utc::now());
    let (one, two) = (deployment.serve_by(&clock).await, deployment.serve_by(&clock).await);
    let http = one.http();
    // Whatever was asked is counted, and only what was asked there.
    let id = Uuid::new_v4().to_string();
    let named = http.clone().header("x-request-id", &id);
    assert_eq!(named.post("/stages", json!({})).await.status, 201);
    assert_eq!(named.post("/stages", json!({})).await.status, 200);
    assert_eq!(named.post("/stages", json!({"colour": "red"})).await.status, 400);
    assert_eq!(http.post("/stages", json!({})).await.status, 400);
    for _ in 0..9 {
        assert_eq!(http.get("/stages/1").await.status, 200);
        assert_eq!(http.post("/stages/1/props", json!({"path": "/Game/A"})).await.status / 100, 2);
    }
    assert_eq!(ask(&two.http()).await, 201, "the fifth");
    for http in [one.http(), two.http()] {
        refused(&post(&http).await, "10");
        // Nor does a request that names somebody else get past.
        refused(&post(&http.header("x-forwarded-for", "203.0.113.9")).await, "10");
    }
    assert_eq!(ask(&http.clone().from([127, 0, 0, 2])).await, 201, "another address has its own log");
    let metrics = http.get("/metrics").await.text;
    assert!(metrics.contains("tidemark_stage_limited_total"), "{metrics}");

    let counted = entries(&deployment).await;
    assert_eq!(counted.len(), 5, "what was refused is not counted");
    let window = TimeDelta::seconds(10);
    clock.set(counted[0] + window - TimeDelta::milliseconds(1));
    refused(&post(&http).await, "1");
    clock.set(counted[0] + window);
    assert_eq!(ask(&http).await, 201, "the first has left");
    refused(&post(&http).await, "1");
    clock.set(counted[2] + window);
    let callers = [one.http(), two.http(), one.http(), two.http(), one.http()];
    let at_once = futures::future::join_all(callers.iter().map(ask)).await;
    assert_eq!(at_once.iter().filter(|status| **status == 201).count(), 2, "two more have: {at_once:?}");
    assert_eq!(entries(&deployment).await.len(), 5);
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn the_limit_is_a_setting_and_time_passes_by_itself() {
    let deployment = Deployment::new().await;
    let limit = |requests| {
        move |config: &mut Config| {
            config.stages.rate_limit.requests = requests;
            config.stages.rate_limit.window = std::time::Duration::from_secs(1);
        }
    };
    let server = deployment.serve_with(limit(2)).await;
    let http = server.http();
    assert_eq!((ask(&http).await, ask(&http).await), (201, 201));
    let answer = post(&http).await;
    // Unless the machine is so slow that a second has passed.
    if answer.status != 201 {
        refused(&answer, "1");
    }
    eventually("there is room again", async || (ask(&http).await == 201).then_some(())).await;
    server.stop().await;
    let server = deployment.serve_with(limit(0)).await;
    for _ in 0..20 {
        assert_eq!(ask(&server.http()).await, 201);
    }
    server.stop().await;
    // The stream follows the setting, down as well as up.
    for requests in [1, 7] {
        let clock = Clock::manual(Utc::now());
        let mut config = deployment.config();
        config.stages.rate_limit.requests = requests;
        config.stages.rate_limit.window = std::time::Duration::from_secs(3600);
        let mut server = Server::bind(config).await.unwrap();
        server.clock = clock.clone();
        let server = Running::start(server).await;
        let http = server.http();
        while ask(&http).await == 201 {}
        assert_eq!(entries(&deployment).await.len(), requests as usize);
        let refusal = post(&http).await;
        let wait: u64 = refusal.headers["retry-after"].to_str().unwrap().parse().unwrap();
        // Some of the hour has passed.
        assert!(refusal.status == 429 && (3500..=3600).contains(&wait), "{wait}");
        server.stop().await;
    }
}

#[tokio::test]
async fn only_a_trusted_proxy_says_for_whom_it_asks() {
    let deployment = Deployment::new().await;
    let server =
        deployment.serve_with(|config| config.http.trusted_proxies = vec!["127.0.0.1/32".parse().unwrap()]).await;
    let (proxy, stranger) = (server.http(), server.http().from([127, 0, 0, 9]));
    let asks_for = async |via: &Http, client: &str| ask(&via.clone().header("x-forwarded-for", client)).await;
    for _ in 0..5 {
        assert_eq!(asks_for(&proxy, "203.0.113.9").await, 201);
        assert_eq!(asks_for(&proxy, "203.0.113.10").await, 201);
    }
    assert_eq!(asks_for(&proxy, "203.0.113.9").await, 429);
    assert_eq!(asks_for(&proxy, "198.51.100.1, 203.0.113.9").await, 429, "what stands before it is the client's own");
    // One network of IPv6 is one client.
    for host in 1..=5 {
        assert_eq!(asks_for(&proxy, &format!("2001:db8:0:1::{host}")).await, 201);
    }
    assert_eq!(asks_for(&proxy, "2001:db8:0:1:ffff::1").await, 429);
    assert_eq!(asks_for(&proxy, "2001:db8:0:2::1").await, 201);
    // A stranger's word counts for nothing, whomever he names.
    for client in 1..=5 {
        assert_eq!(asks_for(&stranger, &format!("203.0.113.{client}")).await, 201);
    }
    assert_eq!(asks_for(&stranger, "203.0.113.77").await, 429);
    server.stop().await;
}

/// Messages that the server got on all connections of a deployment.
async fn messages(deployment: &Deployment) -> i64 {
    let account = deployment.nats_url.split("://test").nth(1).unwrap().split(':').next().unwrap();
    let connections = Http::new(&deployment.monitor_url).get(&format!("/connz?acc=TEST{account}")).await.json();
    connections["connections"].as_array().unwrap().iter().map(|one: &Value| one["in_msgs"].as_i64().unwrap()).sum()
}

#[tokio::test]
async fn the_limiter_costs_one_round_trip() {
    let deployment = Deployment::new().await;
    let mut cost = Vec::new();
    for requests in [0, 1000] {
        let server = deployment.serve_with(|config| config.stages.rate_limit.requests = requests).await;
        let http = server.http();
        assert_eq!(ask(&http).await, 201);
        let before = messages(&deployment).await;
        for _ in 0..20 {
            assert_eq!(ask(&http).await, 201);
        }
        cost.push(messages(&deployment).await - before);
        server.stop().await;
    }
    // A few messages have nothing to do with it.
    assert!((15..30).contains(&(cost[1] - cost[0])), "{cost:?}");
}
