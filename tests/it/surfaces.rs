//! What every HTTP surface has in common, and what not.

use reqwest::Method;
use serde_json::json;

use crate::support::{API_KEY, Deployment};

#[tokio::test]
async fn every_surface_speaks_its_own_dialect() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (stranger, caller) = (server.http(), server.http().key(API_KEY));

    let ids = caller.get("/v1/id/nothing").await;
    assert_eq!((ids.status, &ids.json()["code"], &ids.json()["data"]), (404, &json!(3001), &json!(null)));
    let timers = caller.get("/timers/x").await;
    assert_eq!((timers.status, &timers.json()["code"], &timers.json()["data"]), (404, &json!(3), &json!(null)));
    let stages = stranger.get("/stages/x").await;
    assert_eq!(stages.status, 404);
    assert!(stages.json()["error"].as_str().unwrap().contains("/stages/x"));
    let pools = stranger.get("/pools/x").await;
    assert_eq!((pools.status, &pools.headers["content-type"]), (404, &"text/plain; charset=utf-8".parse().unwrap()));
    assert_eq!(pools.text, "there is nothing at GET /pools/x");
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
    server.stop().await;
}

#[tokio::test]
async fn pools_and_stages_are_open_until_the_setting_closes_them() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.auth.open_pools_and_stages = false).await;
    for path in ["/pools/x", "/stages/x"] {
        assert_eq!(server.http().get(path).await.status, 401, "{path}");
        assert_eq!(server.http().key(API_KEY).get(path).await.status, 404, "{path}");
    }
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
    let docs = http.get("/docs").await;
    assert!(
        docs.text.contains("openapi.json") && !docs.text.contains("https://"),
        "the page fetches nothing from outside"
    );

    let metrics = http.get("/metrics").await.text;
    for metric in ["tidemark_http_requests_total", "tidemark_watermark_group_size", "tidemark_range_refill_seconds"] {
        assert!(metrics.contains(metric), "{metric} is missing");
    }
    assert!(metrics.contains(r#"route="/v1/id/increment""#));

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
