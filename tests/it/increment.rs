//! Increment keys, through every layer.

use std::collections::BTreeSet;

use futures::future::join_all;
use serde_json::json;
use tidemark::{
    api::{
        Context,
        ids::{Increment, IncrementRequest},
    },
    error::Code,
    roles::Role,
};

use crate::support::{API_KEY, Deployment, eventually, name};

#[tokio::test]
async fn a_key_counts_up_from_its_base_over_both_transports() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    server.http().make_key("orders", 1000).await;

    let one = http.get("/v1/id/increment?key=orders").await;
    assert_eq!(one.json(), json!({"code": 0, "message": "success", "data": {"id": [1001]}}));
    assert_eq!(one.headers["cache-control"], "no-store");
    let three = http.post("/v1/id/increment", json!({"key": "orders", "size": 3})).await;
    assert_eq!(three.json()["data"]["id"], json!([1002, 1003, 1004]));
    let mixed = http.post("/v1/id/increment?key=orders", json!({"size": 2})).await;
    assert_eq!(mixed.json()["data"]["id"], json!([1005, 1006]));
    let reply = deployment.nats().await.request("tm.id.increment.orders", "".into()).await.unwrap();
    assert_eq!(&*reply.payload, br#"{"id":[1007]}"#);
    server.stop().await;
}

#[tokio::test]
async fn bad_requests_are_named_and_spend_nothing() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    server.http().make_key("orders", 0).await;
    for (path, status, code, mentions) in [
        ("/v1/id/increment?key=unknown", 404, 3001, "unknown"),
        ("/v1/id/increment?key=a.b", 400, 1002, "invalid key format"),
        ("/v1/id/increment?key=", 400, 1002, "invalid key format"),
        ("/v1/id/increment", 400, 1001, "key"),
        ("/v1/id/increment?key=orders&size=0", 400, 1003, "size"),
        ("/v1/id/increment?key=orders&size=1001", 400, 1003, "size"),
        ("/v1/id/increment?key=orders&size=many", 400, 1001, "size"),
        ("/v1/id/increment?key=orders&colour=red", 400, 1001, "colour"),
    ] {
        let answer = http.get(path).await;
        assert_eq!((answer.status, &answer.json()["code"]), (status, &json!(code)), "{path}: {}", answer.text);
        assert!(answer.json()["message"].as_str().unwrap().contains(mentions), "{path}: {}", answer.text);
    }
    assert_eq!(http.get("/v1/id/increment?key=orders").await.json()["data"]["id"], json!([1]));
    server.stop().await;
}

#[tokio::test]
async fn a_base_never_moves_the_mark_backwards() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    let admin = server.http().admin();
    let (here, there) = (server.http().key(API_KEY), other.http().key(API_KEY));
    let next = async |http: &crate::support::Http| {
        http.get("/v1/id/increment?key=k").await.json()["data"]["id"][0].as_i64().unwrap()
    };
    server.http().make_key("k", 100).await;
    assert_eq!(next(&here).await, 101);
    eventually("the other instance knows the key", async || {
        (there.get("/v1/id/increment?key=k").await.status == 200).then_some(())
    })
    .await;

    let same = admin.post("/v1/config/increment", json!({"key": "k", "base": 100})).await;
    assert_eq!(same.status, 200, "{}", same.text);
    assert_eq!(next(&here).await, 102, "the same base moves nothing");

    let below = admin.post("/v1/config/increment", json!({"key": "k", "base": 50})).await;
    assert_eq!((below.status, below.json()["code"].as_i64()), (400, Some(1001)));
    let current = same.json()["data"]["current"].to_string();
    assert!(below.json()["message"].as_str().unwrap().contains(&current), "{}", below.text);

    let jump = admin.post("/v1/config/increment", json!({"key": "k", "base": 1_000_000})).await;
    assert_eq!(jump.json()["data"]["current"], 1_000_000);
    assert_eq!(next(&here).await, 1_000_001, "what was reserved below the jump is not given any more");
    eventually("the other instance jumps too", async || (next(&there).await > 1_000_000).then_some(())).await;

    let negative = admin.post("/v1/config/increment", json!({"key": "n", "base": -1})).await;
    assert_eq!((negative.status, negative.json()["code"].as_i64()), (400, Some(1001)));
    let missing = admin.post("/v1/config/increment", json!({"key": "n"})).await;
    assert!(missing.status == 400 && missing.text.contains("base"), "{}", missing.text);
    tokio::join!(server.stop(), other.stop());
}

#[tokio::test]
async fn the_end_of_the_numbers_is_an_error_and_never_a_wrap() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    server.http().make_key("last", i64::MAX - 3).await;
    let too_many = http.get("/v1/id/increment?key=last&size=4").await;
    assert_eq!((too_many.status, too_many.json()["code"].as_i64()), (503, Some(4003)), "{}", too_many.text);
    let rest = http.get("/v1/id/increment?key=last&size=3").await;
    assert_eq!(rest.json()["data"]["id"], json!([i64::MAX - 2, i64::MAX - 1, i64::MAX]), "nothing was spent");
    assert_eq!(http.get("/v1/id/increment?key=last").await.json()["code"], 4003);
    server.stop().await;
}

#[tokio::test]
async fn a_burst_waits_for_the_refill_and_is_never_an_error() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.ids.default_batch_size = 10).await;
    server.http().make_key("burst", 0).await;
    let client = deployment.client().await;
    let key = name("burst");
    let request = IncrementRequest::default();
    let answers = join_all((0..1000).map(|_| client.increment(&key, &request))).await;
    let ids: BTreeSet<i64> = answers.into_iter().flat_map(|answer| answer.unwrap().id).collect();
    assert_eq!(ids, (1..=1000).collect(), "one instance leaves no gap");
    server.stop().await;
}

#[tokio::test]
async fn a_clean_stop_gives_the_unused_tail_back() {
    let deployment = Deployment::new().await;
    for expected in [1, 2, 3] {
        let server = deployment.serve().await;
        if expected == 1 {
            server.http().make_key("tail", 0).await;
        }
        let ids = deployment.client().await.increment(&name("tail"), &IncrementRequest::default()).await.unwrap();
        assert_eq!(ids.id, [expected]);
        server.stop().await;
    }
}

#[tokio::test]
async fn an_idempotency_key_gets_the_same_ids_again() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY).header("idempotency-key", "order 17: \"first\" try");
    server.http().make_key("a", 0).await;
    server.http().make_key("b", 0).await;
    let first = http.get("/v1/id/increment?key=a&size=2").await;
    assert_eq!(first.json()["data"]["id"], json!([1, 2]));
    assert_eq!(http.get("/v1/id/increment?key=a&size=2").await.text, first.text);

    let other_parameters = http.get("/v1/id/increment?key=a&size=3").await;
    assert_eq!((other_parameters.status, other_parameters.json()["code"].as_i64()), (409, Some(1001)));
    assert_eq!(http.get("/v1/id/increment?key=b&size=2").await.json()["data"]["id"], json!([1, 2]), "another request");

    // The other transport, and many at once: still one answer.
    let context = Context { idempotency_key: Some("many".parse().unwrap()), ..Context::default() };
    let client = deployment.client().await;
    let (key, request) = (name("a"), IncrementRequest { size: Some(5), ..Default::default() });
    let answers = join_all((0..50).map(|_| client.call_with::<Increment>(&key, &request, &context))).await;
    let answers: BTreeSet<Vec<i64>> = answers.into_iter().map(|answer| answer.unwrap().id).collect();
    assert_eq!(answers.len(), 1, "{answers:?}");

    // Also where the first has taken all that there was.
    for mode in ["range", "strict"] {
        let few = format!("few-{mode}");
        server.http().admin().configure("increment", json!({"key": few, "base": 0, "max": 8, "mode": mode})).await;
        let few = few.parse().unwrap();
        let answers = (0..20).map(|_| client.call_with::<Increment>(&few, &request, &context));
        for answer in join_all(answers).await {
            assert_eq!(answer.unwrap().id, [1, 2, 3, 4, 5], "{mode}");
        }
    }
    // One is what is asked for where nothing is said.
    let http = server.http().key(API_KEY).header("idempotency-key", "one");
    let first = http.get("/v1/id/increment?key=a").await;
    assert_eq!(http.get("/v1/id/increment?key=a&size=1").await.text, first.text);

    let unreadable = b"caf\xe9".as_slice();
    let refused =
        server.http().key(API_KEY).header_bytes("idempotency-key", unreadable).get("/v1/id/increment?key=a").await;
    assert!(refused.status == 400 && refused.text.contains("Idempotency-Key"), "{}", refused.text);
    let too_long = "x".repeat(256);
    let refused = server.http().key(API_KEY).header("idempotency-key", &too_long).get("/v1/id/increment?key=a").await;
    assert!(refused.status == 400 && refused.text.contains("Idempotency-Key"), "{}", refused.text);
    server.stop().await;
}

#[tokio::test]
async fn a_typed_client_gets_typed_errors() {
    let deployment = Deployment::new().await;
    let client = deployment.client().await;
    let (key, request) = (name("nothing"), IncrementRequest::default());
    assert_eq!(client.increment(&key, &request).await.unwrap_err().code, Code::Unavailable, "nobody serves");
    let server = deployment.serve().await;
    assert_eq!(client.increment(&key, &request).await.unwrap_err().code, Code::NotFound);
    server.stop().await;
}

#[tokio::test]
async fn steps_are_the_callers_within_the_keys_limits() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    for mode in ["range", "strict"] {
        let settings = json!({"key": mode, "base": 100, "delta": 5, "max_request_delta": 10, "mode": mode});
        server.http().configure("increment", settings).await;
        let take = async |query: &str| http.data(&format!("/v1/id/increment?key={mode}{query}")).await["id"].clone();
        assert_eq!(take("").await, json!([105]), "the key's own step");
        assert_eq!(take("&size=3&delta=10").await, json!([115, 125, 135]));
        assert_eq!(take("&delta=1").await, json!([136]));
        let random = take("&size=100&rand_delta=true").await;
        let mut last = 136;
        for id in random.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()) {
            assert!((1..=5).contains(&(id - last)), "{id} after {last}");
            last = id;
        }
        let current = server.http().admin().data(&format!("/v1/config/increment?key={mode}")).await["current"].clone();
        match mode {
            "strict" => assert_eq!(current, json!(last), "exact"),
            _ => assert!(current.as_i64().unwrap() >= last, "reserved"),
        }
        server.http().configure("increment", json!({"key": mode, "base": 100, "rand_delta": true, "delta": 50})).await;
        let first = take("").await[0].as_i64().unwrap();
        assert!((1..=50).contains(&(first - last)), "the key's own chance");
        assert_eq!(take("&delta=3&rand_delta=false").await, json!([first + 3]));
    }
    server.stop().await;
}

#[tokio::test]
async fn strict_keys_count_without_gaps_across_instances() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    server.http().configure("increment", json!({"key": "s", "base": 0, "mode": "strict"})).await;
    let client = deployment.client().await;
    let (key, request) = (name("s"), IncrementRequest::default());
    let answers = join_all((0..500).map(|_| client.increment(&key, &request))).await;
    let ids: BTreeSet<i64> = answers.into_iter().flat_map(|answer| answer.unwrap().id).collect();
    assert_eq!(ids, (1..=500).collect());
    // Repeats are answered from the record that was written with the mark.
    let once = server.http().key(API_KEY).header("idempotency-key", "x");
    let elsewhere = other.http().key(API_KEY).header("idempotency-key", "x");
    assert_eq!(once.data("/v1/id/increment?key=s&size=2").await["id"], json!([501, 502]));
    assert_eq!(elsewhere.data("/v1/id/increment?key=s&size=2").await["id"], json!([501, 502]));
    assert_eq!(once.get("/v1/id/increment?key=s&size=3").await.status, 409);
    tokio::join!(server.stop(), other.stop());
}

#[tokio::test]
async fn a_maximum_ends_a_key_and_a_higher_one_opens_it_again() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http().key(API_KEY);
    for mode in ["range", "strict"] {
        let settings = |max: i64| json!({"key": mode, "base": 0, "mode": mode, "max": max});
        server.http().configure("increment", settings(10)).await;
        let path = |size: i64| format!("/v1/id/increment?key={mode}&size={size}");
        assert_eq!(http.get(&path(11)).await.json()["code"], 4003);
        assert_eq!(http.data(&path(8)).await["id"][7], 8);
        assert_eq!(http.get(&path(3)).await.json()["code"], 4003);
        assert_eq!(http.data(&path(2)).await["id"], json!([9, 10]), "nothing was spent by the refusals");
        assert_eq!(http.get(&path(1)).await.json()["code"], 4003);
        server.http().configure("increment", settings(12)).await;
        assert_eq!(http.data(&path(2)).await["id"], json!([11, 12]));
        server.http().configure("increment", settings(5)).await;
        assert_eq!(http.get(&path(1)).await.json()["code"], 4003, "a maximum below what was given");
    }
    server.stop().await;
}

#[tokio::test]
async fn who_was_given_a_number_is_known() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (admin, http) = (server.http().admin(), server.http().key(API_KEY));
    server.http().configure("increment", json!({"key": "r", "base": 100})).await;
    server.http().configure("increment", json!({"key": "s", "base": 0, "mode": "strict"})).await;
    http.clone().header("x-request-id", "first").data("/v1/id/increment?key=r&size=5").await;
    let given = admin.data("/v1/id/given?key=r&number=103").await;
    assert_eq!(
        (&given["counter"], &given["first"], &given["request_id"]),
        (&json!("increment.r"), &json!(101), &json!("first"))
    );
    assert!(given["last"].as_i64().unwrap() >= 105, "{given}");
    let (_, listed, _) = crate::support::tidemark(&["instances", "--json"], deployment.environment()).await;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(given["instance"], listed[0]["instance"], "{listed}");
    assert_eq!(
        (&listed[0]["number"], &listed[0]["roles"]),
        (&json!(0), &json!(["ids", "noid", "stages", "timers", "usage", "http"]))
    );
    assert_eq!(listed[0]["ranges"][0]["counter"], "r");

    http.clone().header("x-request-id", "one").data("/v1/id/increment?key=s&size=3").await;
    http.clone().header("idempotency-key", "two").data("/v1/id/increment?key=s&size=2").await;
    let who = async |number: i64| admin.data(&format!("/v1/id/given?key=s&number={number}")).await;
    assert_eq!((who(2).await["request_id"].clone(), who(2).await["last"].clone()), (json!("one"), json!(3)));
    assert_eq!((who(4).await["request_id"].clone(), who(5).await["first"].clone()), (json!("two"), json!(4)));

    // A jump gives nothing to anybody.
    admin.configure("increment", json!({"key": "s", "base": 50, "mode": "strict"})).await;
    assert_eq!(admin.get("/v1/id/given?key=s&number=30").await.status, 404);
    assert_eq!(http.get("/v1/id/given?key=s&number=1").await.status, 200, "the default tenant's key is an operator's");

    let parts =
        json!([{"type": "date-format", "format": "yyyyMMdd-"}, {"type": "auto-increment", "reset_scope": "date"}]);
    admin.configure("formatted", json!({"key": "f", "parts": parts, "mode": "strict"})).await;
    http.data("/v1/id/formatted?key=f&size=4").await;
    let today = chrono::Utc::now().date_naive();
    assert_eq!(admin.data("/v1/id/given?key=f&number=4").await["counter"], json!(format!("formatted.f.{today}")));
    assert_eq!(admin.data(&format!("/v1/id/given?key=f&number=4&scope={today}")).await["last"], 4);
    for scope in ["", "2026", "today", "2026-13"] {
        let refused = admin.get(&format!("/v1/id/given?key=f&number=4&scope={scope}")).await;
        assert!(
            refused.status == 400 && refused.text.contains(&format!("scope: must be written as that of now, {today}")),
            "{}",
            refused.text
        );
    }
    assert_eq!(admin.get("/v1/id/given?key=f&number=4&scope=1999-01-01").await.status, 404);
    assert_eq!(admin.get("/v1/id/given?key=f&number=4&scope=*").await.status, 400);
    server.stop().await;
}

#[tokio::test]
async fn instances_have_numbers_of_their_own() {
    let deployment = Deployment::new().await;
    let (one, two) = tokio::join!(deployment.serve(), deployment.serve_with(|config| config.roles = vec![Role::Ids]));
    let list = async || -> serde_json::Value {
        let (_, listed, err) = crate::support::tidemark(&["instances", "--json"], deployment.environment()).await;
        serde_json::from_str(&listed).unwrap_or_else(|_| panic!("{listed}{err}"))
    };
    let both = list().await;
    assert_eq!((&both[0]["number"], &both[1]["number"], both.as_array().unwrap().len()), (&json!(0), &json!(1), 2));
    let (code, table, _) = crate::support::tidemark(&["instances"], deployment.environment()).await;
    assert!(code == Some(0) && table.contains("\tids,noid,stages,timers,usage,http\t"), "{table}");
    tokio::join!(one.stop(), two.stop());
    let (code, _, err) = crate::support::tidemark(&["instances"], deployment.environment()).await;
    assert!(code == Some(1) && err.contains("no instance answers"), "{err}");
}

#[tokio::test]
async fn what_is_left_in_pieces_too_small_is_skipped_and_no_caller_hangs() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    let settings = json!({"key": "k", "base": 0, "max": 100, "delta": 5});
    server.http().configure("increment", settings).await;
    let https = [server.http().key(API_KEY), other.http().key(API_KEY)];
    let mut given = BTreeSet::new();
    let mut exhausted = 0;
    for http in https.iter().cycle().take(60) {
        let answer = http.get("/v1/id/increment?key=k").await;
        match answer.status {
            200 => assert!(given.insert(answer.json()["data"]["id"][0].as_i64().unwrap())),
            _ => {
                assert_eq!(answer.json()["code"], 4003, "{}", answer.text);
                exhausted += 1;
            }
        }
    }
    assert!(exhausted > 0 && given.len() >= 15 && given.iter().all(|id| *id <= 100), "{given:?}");
    tokio::join!(server.stop(), other.stop());
}

#[tokio::test]
async fn a_look_at_the_headers_alone_spends_nothing() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    server.http().make_key("k", 0).await;
    let http = server.http().key(API_KEY);
    for path in ["/v1/id/increment?key=k", "/v1/auth/tokenreset?key=k"] {
        assert_eq!(http.send(reqwest::Method::HEAD, path, None).await.status, 405, "{path}");
    }
    assert_eq!(http.data("/v1/id/increment?key=k").await["id"], json!([1]));
    server.stop().await;
}
