//! Tokens that open one key over HTTP, and how often they may be used.

use serde_json::json;
use tidemark::clock::Clock;

use crate::support::{Deployment, Http, eventually, time};

async fn token(http: &Http, path: &str, key: &str) -> String {
    http.clone().admin().data(&format!("/v1/auth/{path}?key={key}")).await["token"].as_str().unwrap().to_owned()
}

fn bearer(http: Http, token: &str) -> Http {
    http.header("authorization", &format!("Bearer {token}"))
}

#[tokio::test]
async fn a_key_token_opens_its_key_and_nothing_else() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    for key in ["mine", "yours"] {
        server.http().make_key(key, 0).await;
    }
    let text = token(&server.http(), "token", "mine").await;
    assert_eq!(token(&server.http(), "token", "mine").await, text, "asked again soon, it is the same");
    let http = bearer(server.http(), &text);
    assert_eq!(http.data("/v1/id/increment?key=mine").await["id"], json!([1]));
    let by_body = http.post("/v1/id/increment", json!({"key": "mine"})).await;
    assert_eq!(by_body.status, 200, "{}", by_body.text);
    for (path, status, code) in [
        ("/v1/id/increment?key=yours", 403, 2002),
        ("/v1/id/increment?key=nope", 403, 2002),
        ("/v1/id/formatted?key=mine", 404, 3001),
        ("/v1/config/increment?key=mine", 403, 2002),
        ("/v1/config/list", 403, 2002),
        ("/v1/auth/verify", 403, 2002),
        ("/v1/auth/token?key=mine", 403, 2002),
        ("/v1/auth/tokenreset?key=mine", 403, 2002),
    ] {
        let answer = http.get(path).await;
        assert_eq!((answer.status, &answer.json()["code"]), (status, &json!(code)), "{path}: {}", answer.text);
    }
    let smuggled = http.post("/v1/id/increment", json!({"key": "yours"})).await;
    assert_eq!((smuggled.status, &smuggled.json()["code"]), (403, &json!(2002)), "{}", smuggled.text);
    let native = http.get("/v1/admin/keys").await;
    assert_eq!(native.status, 403);
    for wrong in [&text[..text.len() - 1], &text.replace("mine", "yours"), "tmt_"] {
        let answer = bearer(server.http(), wrong).get("/v1/id/increment?key=mine").await;
        assert_eq!((answer.status, &answer.json()["code"]), (401, &json!(2001)), "{wrong}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_reset_ends_the_tokens_before_it_on_every_instance() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    server.http().make_key("k", 0).await;
    let old = token(&server.http(), "token", "k").await;
    let status = async |http: Http, token: &str| bearer(http, token).get("/v1/id/increment?key=k").await.status;
    assert_eq!(status(server.http(), &old).await, 200);
    let new = token(&server.http(), "tokenreset", "k").await;
    assert_ne!(new, old);
    assert_eq!((status(server.http(), &old).await, status(server.http(), &new).await), (401, 200));
    assert_eq!(status(other.http(), &new).await, 200, "at once, also where the reset was not heard of yet");
    eventually("the other instance refuses the old one", async || {
        (status(other.http(), &old).await == 401).then_some(())
    })
    .await;
    // A change of the key keeps its tokens.
    server.http().configure("increment", json!({"key": "k", "base": 0, "delta": 2})).await;
    assert_eq!(status(server.http(), &new).await, 200);
    tokio::join!(server.stop(), other.stop());
}

#[tokio::test]
async fn a_token_expires() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-11-16T12:00:00Z"));
    let server = deployment.serve_by(&clock).await;
    server.http().make_key("k", 0).await;
    let made = server.http().admin().data("/v1/auth/token?key=k").await;
    assert_eq!(made["expires_at"], "2027-11-17T00:00:00Z", "a year, to the end of the day");
    let http = bearer(server.http(), made["token"].as_str().unwrap());
    clock.set(time("2027-11-16T23:59:59Z"));
    assert_eq!(http.get("/v1/id/increment?key=k").await.status, 200);
    clock.set(time("2027-11-17T00:00:00Z"));
    assert_eq!(http.get("/v1/id/increment?key=k").await.json()["code"], 2001);
    server.stop().await;
}

#[tokio::test]
async fn tokens_are_signed_with_the_configured_secret() {
    let deployment = Deployment::new().await;
    let secret = |text: &str| Some(tidemark::config::Secret::new(text.repeat(32)));
    let server = deployment.serve_with(|config| config.auth.token_secret = secret("a")).await;
    server.http().make_key("k", 0).await;
    let text = token(&server.http(), "token", "k").await;
    assert_eq!(bearer(server.http(), &text).get("/v1/id/increment?key=k").await.status, 200);
    server.stop().await;
    let server = deployment.serve_with(|config| config.auth.token_secret = secret("b")).await;
    assert_eq!(bearer(server.http(), &text).get("/v1/id/increment?key=k").await.status, 401);
    server.stop().await;
}

#[tokio::test]
async fn a_token_may_be_used_so_often_and_no_more() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.ids.rate_limit = 5).await;
    server.http().make_key("k", 0).await;
    let text = token(&server.http(), "token", "k").await;
    let http = bearer(server.http(), &text);
    let refused = eventually("the limit is reached", async || {
        let answer = http.get("/v1/id/increment?key=k").await;
        (answer.status == 429).then_some(answer)
    })
    .await;
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.json()["code"], 4002, "{}", refused.text);
    let other = token(&server.http(), "tokenreset", "k").await;
    assert_eq!(
        bearer(server.http(), &other).get("/v1/id/increment?key=k").await.status,
        200,
        "another token is not limited by it"
    );
    server.stop().await;
}
