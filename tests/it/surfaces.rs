//! What every HTTP surface has in common, and what not.

use std::time::Duration;

use futures::StreamExt;
use reqwest::Method;
use serde_json::json;
use tidemark::roles::Role;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::support::{API_KEY, Deployment, Process, Running, eventually};

#[tokio::test]
async fn every_surface_speaks_its_own_dialect() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (stranger, caller) = (server.http(), server.http().key(API_KEY));

    let ids = caller.get("/v1/id/nothing").await;
    assert_eq!((ids.status, &ids.json()["code"], &ids.json()["data"]), (404, &json!(3001), &json!(null)));
    let timers = caller.get("/timers/x/y").await;
    assert_eq!((timers.status, &timers.json()["code"], &timers.json()["data"]), (404, &json!(3), &json!(null)));
    let stages = stranger.get("/stages/x/y").await;
    assert_eq!((stages.status, &*stages.text), (404, r#"{"error":"there is nothing at GET /stages/x/y"}"#));
    let pools = stranger.get("/pools/x/y").await;
    assert_eq!((pools.status, &pools.headers["content-type"]), (404, &"text/plain; charset=utf-8".parse().unwrap()));
    assert_eq!(pools.text, "there is nothing at GET /pools/x/y\n");
    let usage = caller.get("/api/uc/v1/x").await;
    assert_eq!((usage.status, usage.json()["code"].as_str()), (404, Some("not_found")));
    let native = stranger.get("/nothing").await;
    assert_eq!((native.status, native.json()["code"].as_str()), (404, Some("not_found")));

    // Unauthenticated, in the dialects of the closed ones.
    for (path, code) in
        [("/v1/id/increment?key=k", json!(2001)), ("/timers", json!(4)), ("/api/uc/v1/x", json!("unauthenticated"))]
    {
        let answer = stranger.get(path).await;
        assert_eq!((answer.status, &answer.json()["code"]), (401, &code), "{path}: {}", answer.text);
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    let method = caller.delete("/v1/id/increment").await;
    assert_eq!((method.status, method.json()["code"].as_i64()), (405, Some(1001)));
    assert_eq!(stranger.delete("/v1/id/increment").await.status, 401, "nor do strangers learn what there is");
    server.stop().await;
}

#[tokio::test]
async fn pools_and_stages_are_open_until_the_setting_closes_them() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.auth.open_pools_and_stages = false).await;
    for path in ["/pools/x", "/stages/7"] {
        assert_eq!(server.http().get(path).await.status, 401, "{path}");
        assert_eq!(server.http().key(API_KEY).get(path).await.status, 404, "{path}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed_and_one_that_waits_is_not() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.http.idle_timeout = Duration::from_secs(1)).await;
    let address = server.url.strip_prefix("http://").unwrap();
    let silence = async {
        for head in ["", "GET /health HTTP/1.1\r\nHost: x\r\n", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"] {
            let mut connection = TcpStream::connect(address).await.unwrap();
            connection.write_all(head.as_bytes()).await.unwrap();
            let mut answer = String::new();
            let closed = timeout(Duration::from_secs(20), connection.read_to_string(&mut answer));
            closed.await.expect("it is closed").unwrap();
            assert_eq!(answer.contains("200 OK"), head.ends_with("\r\n\r\n"), "{answer}");
        }
    };
    let waiting = async { server.http().key(API_KEY).get("/api/uc/v1/usage/records/feed?wait=3").await };
    let ((), waited) = tokio::join!(silence, waiting);
    assert_eq!(waited.status, 200, "{}", waited.text);
    server.stop().await;
}

#[tokio::test]
async fn bodies_are_bounded() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.http.body_limit = 1000).await;
    let http = server.http().admin();
    let large = http.post("/v1/config/increment", json!({"key": "k".repeat(2000), "base": 0})).await;
    assert_eq!((large.status, large.json()["code"].as_i64()), (413, Some(1001)), "{}", large.text);
    let broken = http.send(Method::POST, "/v1/config/increment", Some(b"{\"key\": \"k\", \"base\": ".to_vec())).await;
    assert_eq!((broken.status, broken.json()["code"].as_i64()), (400, Some(1001)), "{}", broken.text);
    let twice = br#"{"key": "k", "base": 1, "base": 2}"#.to_vec();
    let twice = http.send(Method::POST, "/v1/config/increment", Some(twice)).await;
    assert!(twice.status == 400 && twice.text.contains("base: is given twice"), "{}", twice.text);
    for (path, status) in [("/timers/%ff", 401), ("/stages/%ff", 400)] {
        let unreadable = server.http().get(path).await;
        assert_eq!((unreadable.status, unreadable.text.starts_with('{')), (status, true), "{}", unreadable.text);
    }
    server.stop().await;
}

#[tokio::test]
async fn the_documents_and_the_metrics_are_served() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    server.http().make_key("k", 0).await;
    server.http().key(API_KEY).get("/v1/id/increment?key=k").await;

    let openapi = http.get("/openapi.json").await.json();
    let increment = &openapi["paths"]["/v1/id/increment"];
    assert_eq!(increment["get"]["x-nats-subject"], "tm.id.increment.*");
    assert_eq!(increment["get"]["parameters"][0]["name"], "key");
    assert_eq!(increment["post"]["operationId"], "id.increment.post");
    assert!(openapi["components"]["schemas"]["IncrementRequest"]["properties"]["size"].is_object());
    let mint = &openapi["paths"]["/pools/{pool}/mint"]["post"];
    let ids = &mint["responses"]["200"]["content"]["application/json"]["schema"];
    assert_eq!((&ids["type"], &ids["items"]["type"]), (&json!("array"), &json!("string")));
    assert!(mint["requestBody"]["content"]["multipart/form-data"].is_object());
    // What stands in the path does not stand in the body too.
    let update = &openapi["paths"]["/timers/{id}"]["put"];
    let body = &update["requestBody"]["content"]["application/json"]["schema"];
    assert!(body["properties"]["execute_at"].is_object() && body["properties"]["id"].is_null(), "{body}");
    assert!(!body["required"].to_string().contains("\"id\""), "{body}");
    assert!(openapi["components"]["schemas"]["TimerStatus"]["enum"].to_string().contains("pending"));
    let backfill = &openapi["paths"]["/api/uc/v1/usage/backfill"]["post"]["responses"];
    assert!(backfill["200"].is_object() && backfill["201"].is_object() && backfill["202"].is_object(), "{backfill}");
    assert!(mint["responses"]["default"]["content"]["text/plain"].is_object());
    let docs = http.get("/docs").await;
    assert!(
        docs.text.contains("openapi.json") && !docs.text.contains("https://"),
        "the page fetches nothing from outside"
    );

    let metrics = http.get("/metrics").await.text;
    for metric in [
        concat!("tidemark_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        "tidemark_http_requests_total",
        "tidemark_watermark_group_size",
        "tidemark_range_refill_seconds",
        r#"idbuilder_requests_total{key="k",id_type="increment"}"#,
        r#"idbuilder_request_duration_seconds_count{key="k",id_type="increment"}"#,
        r#"idbuilder_sequence_current{key="k"}"#,
        r#"idbuilder_cache_remaining{key="k"}"#,
    ] {
        assert!(metrics.contains(metric), "{metric} is missing");
    }
    assert!(metrics.contains(r#"route="/v1/id/increment""#));
    http.send(Method::from_bytes(b"WHIM").unwrap(), "/health", None).await;
    assert!(!http.get("/metrics").await.text.contains("WHIM"), "a caller can't make new series");

    assert_eq!(http.get("/health").await.json(), json!({"status": "up"}));
    let ready = http.get("/ready").await;
    assert_eq!((ready.status, ready.json()["status"].as_str()), (200, Some("ready")), "{}", ready.text);
    let healthz = http.get("/healthz").await;
    assert_eq!(
        (healthz.status, &healthz.json()["code"], healthz.json()["message"].as_str()),
        (200, &json!(0), Some("healthy"))
    );
    assert_eq!(healthz.json()["data"]["database"], "connected");

    let zipped = http.clone().header("accept-encoding", "gzip").get("/health").await;
    assert!(!zipped.headers.contains_key("content-encoding"), "too small to be worth it");
    let zipped = http.header("accept-encoding", "gzip").send(Method::HEAD, "/openapi.json", None).await;
    assert_eq!(zipped.headers["content-encoding"], "gzip");
    server.stop().await;
}

/// A bridge whose service is the test itself: it takes requests and answers when it likes.
async fn bridge_to_ourselves(
    deployment: &Deployment,
    limit: Duration,
) -> (Running, async_nats::Client, async_nats::Subscriber) {
    let bridge = deployment
        .serve_with(|config| {
            config.roles = vec![Role::Http];
            config.http.request_timeout = limit;
        })
        .await;
    let nats = deployment.nats().await;
    let requests = nats.subscribe("tm.id.increment.*").await.unwrap();
    nats.request("$SRV.PING.tm-admin", "".into()).await.expect("by now the server knows our subscription");
    (bridge, nats, requests)
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_answered_in_its_dialect() {
    let deployment = Deployment::new().await;
    let (bridge, _nats, _requests) = bridge_to_ourselves(&deployment, Duration::from_secs(1)).await;
    let answer = bridge.http().key(API_KEY).get("/v1/id/increment?key=k").await;
    assert_eq!((answer.status, answer.json()["code"].as_i64()), (503, Some(4002)), "{}", answer.text);
    assert!(answer.json()["message"].as_str().unwrap().contains("not answered within 1s"), "{}", answer.text);
    bridge.stop().await;
}

#[tokio::test]
async fn a_stop_waits_for_the_requests_under_way() {
    let deployment = Deployment::new().await;
    let (bridge, nats, mut requests) = bridge_to_ourselves(&deployment, Duration::from_secs(30)).await;
    let caller = bridge.http().key(API_KEY);
    let asked = tokio::spawn(async move { caller.get("/v1/id/increment?key=k").await });
    let request = requests.next().await.unwrap();
    let new_caller = bridge.http();
    let stopping = tokio::spawn(bridge.stop());
    eventually("no new caller gets in", async || new_caller.try_get("/health").await.is_err().then_some(())).await;
    assert!(!stopping.is_finished(), "it waits for the one that is in");
    let ids = rmp_serde::to_vec_named(&json!({"id": [7]})).unwrap();
    nats.publish(request.reply.unwrap(), ids.into()).await.unwrap();
    assert_eq!(asked.await.unwrap().json()["data"]["id"], json!([7]));
    stopping.await.unwrap();
}

#[tokio::test]
async fn a_process_without_the_bridge_can_still_be_watched() {
    let deployment = Deployment::new().await;
    let mut environment = deployment.environment();
    environment.insert("TIDEMARK__TELEMETRY__PORT".into(), "0".into());
    let mut process = Process::spawn(&["serve", "--roles", "ids"], environment);
    process.is_ready().await;
    let http = process.http().await;
    assert_eq!(http.get("/ready").await.status, 200);
    assert!(http.get("/metrics").await.text.contains("tidemark_"));
    assert_eq!(http.clone().admin().get("/v1/admin/keys").await.status, 404, "the bridge is not here");
}
