//! Request-reply as it is on the wire.

use async_nats::HeaderMap;
use futures::StreamExt;
use serde_json::{Value, json};

use crate::support::Deployment;

fn msgpack() -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("Content-Type", "application/msgpack");
    headers
}

#[tokio::test]
async fn replies_mirror_the_encoding_of_the_request() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    server.http().make_key("k", 0).await;
    let nats = deployment.nats().await;

    let plain = nats.request("tm.id.increment.k", r#"{"size": 2}"#.into()).await.unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&plain.payload).unwrap(), json!({"id": [1, 2]}));

    let body = rmp_serde::to_vec_named(&json!({"size": 2})).unwrap();
    let packed = nats.request_with_headers("tm.id.increment.k", msgpack(), body.into()).await.unwrap();
    assert_eq!(rmp_serde::from_slice::<Value>(&packed.payload).unwrap(), json!({"id": [3, 4]}));
    assert_eq!(packed.headers.unwrap().get("Content-Type").unwrap().as_str(), "application/msgpack");

    let empty = nats.request_with_headers("tm.id.increment.k", msgpack(), "".into()).await.unwrap();
    assert_eq!(rmp_serde::from_slice::<Value>(&empty.payload).unwrap(), json!({"id": [5]}));

    // Over HTTP as well.
    let http = server.http().key(crate::support::API_KEY).header("content-type", "application/msgpack");
    let body = rmp_serde::to_vec_named(&json!({"key": "k"})).unwrap();
    let answer = http.send(reqwest::Method::POST, "/v1/id/increment", Some(body)).await;
    assert_eq!(answer.headers["content-type"], "application/msgpack");
    assert!(answer.text.contains("success"));
    server.stop().await;
}

#[tokio::test]
async fn errors_have_the_standard_headers_and_a_body() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    server.http().make_key("k", 0).await;
    let nats = deployment.nats().await;
    for (subject, body, status, code) in [
        ("tm.id.increment.nope", "", "404", "not_found"),
        ("tm.id.increment.k", "{", "400", "invalid_request"),
        ("tm.id.increment.k", r#"{"size": 9999}"#, "400", "size_exceeds_limit"),
        ("tm.id.increment.k", r#"{"colour": "red"}"#, "400", "invalid_request"),
        ("tm.id.increment.$k", "", "400", "invalid_key"),
        ("tm.id.config.set-increment.k", "", "400", "invalid_request"),
        ("tm.admin.key-revoke", r#"{"id": "nobody"}"#, "404", "not_found"),
    ] {
        let reply = nats.request(subject, body.into()).await.unwrap();
        let headers = reply.headers.unwrap();
        assert_eq!(headers.get("Nats-Service-Error-Code").unwrap().as_str(), status, "{subject} {body}");
        let error: Value = serde_json::from_slice(&reply.payload).unwrap();
        assert_eq!(error["code"], code, "{subject} {body}");
        assert_eq!(headers.get("Nats-Service-Error").unwrap().as_str(), error["message"].as_str().unwrap());
    }
    let packed = nats.request_with_headers("tm.id.increment.nope", msgpack(), "".into()).await.unwrap();
    assert_eq!(rmp_serde::from_slice::<Value>(&packed.payload).unwrap()["code"], "not_found");
    server.stop().await;
}

#[tokio::test]
async fn the_micro_services_tools_find_every_operation() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let nats = deployment.nats().await;
    let ping = nats.request("$SRV.PING.tm-id", "".into()).await.unwrap();
    let ping: Value = serde_json::from_slice(&ping.payload).unwrap();
    assert_eq!((ping["name"].as_str(), ping["version"].as_str()), (Some("tm-id"), Some(env!("CARGO_PKG_VERSION"))));
    let info = nats.request("$SRV.INFO.tm-id", "".into()).await.unwrap();
    let info: Value = serde_json::from_slice(&info.payload).unwrap();
    let endpoints = info["endpoints"].as_array().unwrap();
    let increment = endpoints.iter().find(|endpoint| endpoint["name"] == "increment").unwrap();
    assert_eq!(increment["subject"], "tm.id.increment.*");
    assert!(increment["metadata"]["schema"].as_str().unwrap().contains("id.increment"));
    server.stop().await;
}

#[tokio::test]
async fn a_reply_goes_to_inboxes_only() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    server.http().make_key("victim", 0).await;
    let nats = deployment.nats().await;
    // The caller may not write counters, but we may: an answer must not do it for him.
    let mut orders = nats.subscribe("orders.>").await.unwrap();
    for reply in ["$KV.tm_counters.increment.victim", "orders.forged", "tm.id.increment.victim"] {
        nats.publish_with_reply("tm.id.increment.victim", reply, "".into()).await.unwrap();
    }
    // Requests of one connection are answered in order, so after this one the others are dealt with.
    let ids = nats.request("tm.id.increment.victim", "".into()).await.unwrap();
    assert_eq!(&*ids.payload, br#"{"id":[1]}"#, "nothing was spent on them, and the counter is whole");
    nats.publish("orders.end", "".into()).await.unwrap();
    assert_eq!(&*orders.next().await.unwrap().subject, "orders.end");
    server.stop().await;
}
