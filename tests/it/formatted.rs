//! Formatted keys on a real bucket: scopes, zones, exhaustion, changes.

use std::collections::BTreeSet;

use futures::{StreamExt, future::join_all};
use serde_json::{Value, json};
use tidemark::{api::ids::FormattedRequest, clock::Clock};

use crate::support::{API_KEY, Deployment, Http, name, time};

async fn next(http: &Http, key: &str) -> String {
    let ids = http.data(&format!("/v1/id/formatted?key={key}")).await;
    ids["id"][0].as_str().unwrap().to_owned()
}

fn daily(zone: &str) -> Value {
    json!([
        {"type": "fixed-chars", "value": "INV"},
        {"type": "date-format", "format": "yyyyMMdd", "time_zone": zone},
        {"type": "fixed-chars", "value": "-"},
        {"type": "auto-increment", "length": 4, "reset_scope": "date"},
    ])
}

#[tokio::test]
async fn two_instances_on_either_side_of_midnight_count_each_on_its_day() {
    let deployment = Deployment::new().await;
    // Midnight in Tokyo is 15:00 in Greenwich.
    let (early, late) = (Clock::manual(time("2026-12-31T14:59:59.999Z")), Clock::manual(time("2026-12-31T15:00:00Z")));
    let before = deployment.serve_by(&early).await;
    before.http().configure("formatted", json!({"key": "inv", "parts": daily("Asia/Tokyo"), "mode": "strict"})).await;
    let after = deployment.serve_by(&late).await;
    // Over HTTP each answers itself.
    let (here, there) = (before.http().key(API_KEY), after.http().key(API_KEY));
    assert_eq!(next(&here, "inv").await, "INV20261231-0001");
    assert_eq!(next(&there, "inv").await, "INV20270101-0001", "a new year in Tokyo");
    assert_eq!(next(&here, "inv").await, "INV20261231-0002");
    assert_eq!(next(&there, "inv").await, "INV20270101-0002");
    early.set(time("2026-12-31T15:00:00.001Z"));
    assert_eq!(next(&here, "inv").await, "INV20270101-0003");
    early.set(time("2027-01-01T15:00:00Z"));
    assert_eq!(next(&here, "inv").await, "INV20270102-0001");
    early.set(time("2026-12-31T14:00:00Z"));
    assert_eq!(next(&here, "inv").await, "INV20261231-0003", "a clock that steps back goes on where the day was");
    tokio::join!(before.stop(), after.stop());
}

#[tokio::test]
async fn ranges_are_reserved_for_their_day_on_either_side_of_midnight() {
    let deployment = Deployment::new().await;
    let (early, late) = (Clock::manual(time("2026-12-31T23:59:59.999Z")), Clock::manual(time("2027-01-01T00:00:00Z")));
    let before = deployment.serve_by(&early).await;
    before.http().configure("formatted", json!({"key": "inv", "parts": daily("UTC")})).await;
    let after = deployment.serve_by(&late).await;
    let (here, there) = (before.http().key(API_KEY), after.http().key(API_KEY));
    let mut seen = BTreeSet::new();
    for (http, day) in [(&here, "20261231"), (&there, "20270101"), (&here, "20261231"), (&there, "20270101")] {
        let id = next(http, "inv").await;
        assert!(id.starts_with(&format!("INV{day}-")) && seen.insert(id.clone()), "{id}");
    }
    early.set(time("2027-01-01T00:00:00.001Z"));
    for http in [&here, &there, &here] {
        let id = next(http, "inv").await;
        assert!(id.starts_with("INV20270101-") && seen.insert(id.clone()), "{id}");
    }
    tokio::join!(before.stop(), after.stop());
}

#[tokio::test]
async fn every_scope_starts_again_in_its_zone() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-12-31T12:00:00Z"));
    let server = deployment.serve_by(&clock).await;
    let http = server.http().key(API_KEY);
    for (key, format, scope) in
        [("y", "yyyy", "year"), ("m", "yyyyMM", "month"), ("d", "yyyyMMdd", "date"), ("n", "yyyy", "none")]
    {
        let parts = json!([
            {"type": "date-format", "format": format}, {"type": "fixed-chars", "value": "/"},
            {"type": "auto-increment", "reset_scope": scope},
        ]);
        server.http().configure("formatted", json!({"key": key, "parts": parts})).await;
    }
    let all = async || [next(&http, "y").await, next(&http, "m").await, next(&http, "d").await, next(&http, "n").await];
    assert_eq!(all().await, ["2026/1", "202612/1", "20261231/1", "2026/1"]);
    clock.set(time("2027-01-01T00:00:00Z"));
    assert_eq!(all().await, ["2027/1", "202701/1", "20270101/1", "2027/2"]);
    clock.set(time("2027-01-02T00:00:00Z"));
    assert_eq!(all().await, ["2027/2", "202701/2", "20270102/1", "2027/3"]);
    clock.set(time("2027-02-01T00:00:00Z"));
    assert_eq!(all().await, ["2027/3", "202702/1", "20270201/1", "2027/4"]);
    // Far more days than are held at once, and back to the first.
    for day in 2..20 {
        clock.set(time(&format!("2027-02-{day:02}T00:00:00Z")));
        assert_eq!(next(&http, "d").await, format!("202702{day:02}/1"));
    }
    clock.set(time("2027-01-01T23:59:59Z"));
    let number: i64 = next(&http, "d").await.strip_prefix("20270101/").unwrap().parse().unwrap();
    assert!(number > 1, "the day's first number is spent");
    server.stop().await;
}

#[tokio::test]
async fn a_fixed_length_is_exhausted_and_nothing_is_lost() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    let parts = json!([{"type": "auto-increment", "length": 2, "length_fixed": true}]);
    server.http().configure("formatted", json!({"key": "f", "parts": parts})).await;
    let http = [server.http().key(API_KEY), other.http().key(API_KEY)];
    let first = http[0].data("/v1/id/formatted?key=f&size=90").await;
    assert_eq!(first["id"].as_array().unwrap().len(), 90);
    let too_many = http[0].get("/v1/id/formatted?key=f&size=10").await;
    assert_eq!((too_many.status, &too_many.json()["code"]), (503, &json!(4003)), "{}", too_many.text);
    // Each gives what it has, and all of it is given.
    let mut rest = BTreeSet::new();
    for http in http.iter().cycle().take(18) {
        let answer = http.get("/v1/id/formatted?key=f").await;
        match answer.status {
            200 => assert!(rest.insert(answer.json()["data"]["id"][0].as_str().unwrap().to_owned())),
            _ => assert_eq!(answer.json()["code"], 4003, "{}", answer.text),
        }
    }
    assert_eq!(rest, (91..=99).map(|number| number.to_string()).collect());
    for http in &http {
        assert_eq!(http.get("/v1/id/formatted?key=f").await.json()["code"], 4003);
    }
    tokio::join!(server.stop(), other.stop());
}

#[tokio::test]
async fn a_change_keeps_the_counters_and_what_could_repeat_ids_is_refused() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (admin, http) = (server.http().admin(), server.http().key(API_KEY));
    let parts = |prefix: &str, options: Value| {
        let mut counter = json!({"type": "auto-increment", "length": 3});
        counter.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        json!([{"type": "fixed-chars", "value": prefix}, counter])
    };
    // Before the first id everything may change.
    admin.configure("formatted", json!({"key": "f", "parts": parts("A", json!({"number_base": 16}))})).await;
    admin.configure("formatted", json!({"key": "f", "parts": parts("A", json!({}))})).await;
    assert_eq!(next(&http, "f").await, "A001");
    let changed =
        admin.configure("formatted", json!({"key": "f", "name": "F", "parts": parts("B", json!({"length": 5}))})).await;
    assert_eq!(changed["name"], "F");
    let after: i64 = next(&http, "f").await.strip_prefix('B').unwrap().parse().unwrap();
    assert_eq!(after, 2, "a change keeps the counter");
    for (options, mentions) in [
        (json!({"number_base": 16}), "parts[1].number_base"),
        (json!({"padding_char": "_"}), "parts[1].padding_char"),
        (json!({"padding_char": "_", "padding_mode": "suffix"}), "parts[1].padding_mode"),
    ] {
        let refused = admin.post("/v1/config/formatted", json!({"key": "f", "parts": parts("B", options)})).await;
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(1001)), "{}", refused.text);
        assert!(refused.text.contains(mentions), "{}", refused.text);
    }
    for prefix in ["B1", ""] {
        let parts = match prefix {
            "" => json!([{"type": "auto-increment", "length": 3}]),
            prefix => parts(prefix, json!({})),
        };
        let refused = admin.post("/v1/config/formatted", json!({"key": "f", "parts": parts})).await;
        assert!(refused.status == 400 && refused.text.contains("earlier format"), "{}", refused.text);
    }
    // Not by a detour either: what was given under an earlier format stays given.
    let random = json!([{"type": "fixed-random-chars", "chars_scope": "0123456789abcdef", "length": 20}]);
    admin.configure("formatted", json!({"key": "f", "parts": random})).await;
    let hexadecimal = parts("B", json!({"number_base": 16}));
    let refused = admin.post("/v1/config/formatted", json!({"key": "f", "parts": hexadecimal})).await;
    assert!(refused.status == 400 && refused.text.contains("number_base"), "{}", refused.text);
    admin.configure("formatted", json!({"key": "f", "parts": parts("C", json!({}))})).await;
    assert_eq!(next(&http, "f").await, "C003");

    let yearly = json!([
        {"type": "date-format", "format": "yyyy-"}, {"type": "auto-increment", "reset_scope": "year"},
    ]);
    let refused = admin.post("/v1/config/formatted", json!({"key": "f", "parts": yearly})).await;
    assert!(refused.status == 400 && refused.text.contains("reset_scope"), "{}", refused.text);

    // Without a counter chance alone keeps ids apart, and the answer says so.
    let random = json!([{"type": "fixed-random-chars", "chars_scope": "0123456789abcdef", "length": 20}]);
    let made = admin.configure("formatted", json!({"key": "r", "parts": random})).await;
    assert!(made["uniqueness"].as_str().unwrap().starts_with("chance alone, 80 bits"), "{made}");
    let ids = http.data("/v1/id/formatted?key=r&size=1000").await;
    let ids: BTreeSet<&str> = ids["id"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    assert_eq!(ids.len(), 1000);
    server.stop().await;
}

#[tokio::test]
async fn a_change_that_was_broken_off_is_mended_by_setting_the_format_again() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (admin, http) = (server.http().admin(), server.http().key(API_KEY));
    let format = |prefix: &str| {
        let parts = json!([{"type": "fixed-chars", "value": prefix}, {"type": "auto-increment", "length": 3}]);
        json!({"key": "f", "parts": parts})
    };
    admin.configure("formatted", format("A")).await;
    // The guard has moved on, and the record has not.
    let store = async_nats::jetstream::new(deployment.nats().await).get_key_value("tm_counters").await.unwrap();
    let mut keys = store.keys().await.unwrap();
    let mut guard = None;
    while let Some(key) = keys.next().await {
        let entry = store.get(key.unwrap().as_str()).await.unwrap().unwrap();
        let value: Value = serde_json::from_slice(&entry).unwrap();
        if value["state"]["announced"].is_boolean() {
            guard = Some(value);
            guard.as_mut().unwrap()["state"]["version"] = json!(2);
        }
    }
    store.put("formatted.f", guard.expect("a guard").to_string().into()).await.unwrap();
    let other = deployment.serve().await;
    let refused = other.http().key(API_KEY).get("/v1/id/formatted?key=f").await;
    assert!(refused.status == 503 && refused.text.contains("set it again"), "{}", refused.text);
    admin.configure("formatted", format("A")).await;
    assert_eq!(next(&http, "f").await, "A001");
    // Of many changes at once each is made, one after the other.
    let changes = join_all(["B", "C", "B", "A", "D"].map(|prefix| admin.configure("formatted", format(prefix)))).await;
    assert_eq!(changes.len(), 5);
    assert!(next(&http, "f").await.ends_with("002"));
    other.stop().await;
    server.stop().await;
}

#[tokio::test]
async fn many_callers_of_two_instances_get_different_ids_and_repeats_the_same() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    server.http().configure("formatted", json!({"key": "inv", "parts": daily("UTC")})).await;
    let client = deployment.client().await;
    let (key, request) = (name("inv"), FormattedRequest { size: Some(7) });
    let answers = join_all((0..200).map(|_| client.formatted(&key, &request))).await;
    let ids: Vec<String> = answers.into_iter().flat_map(|answer| answer.unwrap().id).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 1400);

    let once = server.http().key(API_KEY).header("idempotency-key", "again");
    let first = once.get("/v1/id/formatted?key=inv&size=3").await.text;
    assert_eq!(once.get("/v1/id/formatted?key=inv&size=3").await.text, first);
    let elsewhere = other.http().key(API_KEY).header("idempotency-key", "again");
    assert_eq!(elsewhere.get("/v1/id/formatted?key=inv&size=3").await.text, first);
    assert_eq!(once.get("/v1/id/formatted?key=inv&size=4").await.status, 409);
    tokio::join!(server.stop(), other.stop());
}
