//! The bridge in one process, the service in another.

use futures::StreamExt;
use serde_json::json;

use crate::support::{API_KEY, Deployment, eventually};

#[tokio::test]
async fn the_bridge_reaches_a_service_in_another_process() {
    let deployment = Deployment::new().await;
    let mut bridge = deployment.spawn(&["--roles", "http"]);
    let mut service = deployment.spawn(&["--roles", "ids"]);
    bridge.is_ready().await;
    service.is_ready().await;
    let http = bridge.http().await;
    http.make_key("orders", 1000).await;
    let caller = http.clone().key(API_KEY);
    assert_eq!(caller.get("/v1/id/increment?key=orders&size=2").await.json()["data"]["id"], json!([1001, 1002]));

    // Errors and idempotency come through as if it were one process.
    let unknown = caller.get("/v1/id/increment?key=nope").await;
    assert_eq!((unknown.status, unknown.json()["code"].as_i64()), (404, Some(3001)));
    let once = caller.clone().header("idempotency-key", "x");
    let first = once.get("/v1/id/increment?key=orders").await;
    assert_eq!(once.get("/v1/id/increment?key=orders").await.text, first.text);
    assert_eq!(once.get("/v1/id/increment?key=orders&size=9").await.status, 409);

    // The trace goes along.
    let nats = deployment.nats().await;
    let mut spy = nats.subscribe("tm.id.increment.*").await.unwrap();
    nats.request("$SRV.PING.tm-id", "".into()).await.expect("by now the server knows our subscription");
    let trace = "0af7651916cd43dd8448eb211c80319c";
    caller
        .clone()
        .header("traceparent", &format!("00-{trace}-b7ad6b7169203331-01"))
        .get("/v1/id/increment?key=orders")
        .await;
    let seen = spy.next().await.unwrap();
    let header = seen.headers.unwrap().get("traceparent").unwrap().to_string();
    assert!(header.starts_with(&format!("00-{trace}-")) && !header.contains("b7ad6b7169203331"), "{header}");

    // Without the service the bridge says so, and it recovers by itself.
    service.kill();
    let down = caller.get("/v1/id/increment?key=orders").await;
    assert_eq!((down.status, down.json()["code"].as_i64()), (503, Some(4002)), "{}", down.text);
    let mut service = deployment.spawn(&["--roles", "ids"]);
    service.is_ready().await;
    eventually("the bridge finds the new service", async || {
        (caller.get("/v1/id/increment?key=orders").await.status == 200).then_some(())
    })
    .await;
}
