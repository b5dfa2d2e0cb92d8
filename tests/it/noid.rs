//! Noid pools over both transports: what callers see.

use std::time::Duration;

use async_nats::jetstream;
use futures::StreamExt;
use serde_json::{Value, json};
use tidemark::{
    api::{
        NoParameters,
        noid::{Count, IdToValidate, NewPool, OneId, SomeIds},
    },
    error::Code,
};

use tokio::time::timeout;

use crate::support::{API_KEY, Deployment, Http, eventually, name};

async fn create(http: &Http, pool: &str, template: &str) -> Value {
    let made = http.form("/pools", &[("name", pool), ("template", template)]).await;
    assert_eq!(made.status, 201, "{}", made.text);
    made.json()
}

async fn mint(http: &Http, pool: &str, n: usize) -> Value {
    let minted = http.form(&format!("/pools/{pool}/mint"), &[("n", &n.to_string())]).await;
    assert_eq!(minted.status, 200, "{}", minted.text);
    minted.json()
}

#[tokio::test]
async fn parameters_come_by_query_form_multipart_or_json() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    let made = http.post("/pools?name=a&template=.sdd%2B50", Value::Null).await;
    assert_eq!(made.status, 400, "a body that is no object: {}", made.text);
    let made = http.form("/pools?name=a&template=.sdd%2B50", &[]).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let made = made.json();
    let keys: Vec<&String> = made.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["Name", "Template", "Used", "Max", "Closed", "LastMint", "Created", "Remaining"]);
    assert_eq!((&made["Template"], &made["Used"], &made["Max"]), (&json!(".sdd+50"), &json!(50), &json!(100)));
    assert_eq!((&made["Closed"], &made["Remaining"]), (&json!(false), &json!(50)));
    assert_eq!(made["LastMint"], made["Created"]);

    assert_eq!(http.multipart("/pools", &[("name", "b"), ("template", ".zd")]).await.status, 201);
    assert_eq!(http.post("/pools", json!({"name": "c", "template": "x.rde"})).await.status, 201);
    assert_eq!(http.get("/pools").await.text, "[\"a\",\"b\",\"c\"]\n");
    let unbounded = http.get("/pools/b").await.json();
    assert_eq!((&unbounded["Max"], &unbounded["Remaining"]), (&json!(-1), &json!(null)));

    assert_eq!(http.form("/pools/b/mint", &[]).await.text, "[\"0\"]\n", "one is the default");
    assert_eq!(http.form("/pools/b/mint?n=2", &[]).await.json(), json!(["1", "2"]));
    assert_eq!(http.multipart("/pools/b/mint", &[("n", "+2")]).await.json(), json!(["3", "4"]));
    assert_eq!(http.form("/pools/b/mint", &[("n", "")]).await.json(), json!(["5"]));
    assert_eq!(http.form("/pools/b/mint", &[("n", "02")]).await.json(), json!(["6", "7"]));
    assert_eq!(http.post("/pools/b/mint", json!({"n": 2})).await.json(), json!(["8", "9"]));
    assert_eq!(http.multipart("/pools/b/advancePast", &[("id", "98")]).await.json()["Used"], 99);
    assert_ne!(http.get("/pools/b").await.json()["LastMint"], unbounded["LastMint"]);
    server.stop().await;
}

#[tokio::test]
async fn what_is_wrong_is_said_as_text_and_changes_nothing() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    create(&http, "p", ".sdd").await;
    let long = "x".repeat(250) + ".sdddddd";
    for (path, fields, status, said) in [
        ("/pools", &[("template", ".sd")][..], 400, "name: is missing"),
        ("/pools", &[("name", "x")], 400, "missing arguments: template"),
        ("/pools", &[("name", "x"), ("template", "")], 400, "missing arguments: template"),
        ("/pools", &[("name", "a/b"), ("template", ".sd")], 400, "invalid key format"),
        ("/pools", &[("name", "import"), ("template", ".sd")], 400, "name: import"),
        ("/pools", &[("name", "p"), ("template", "nonsense")], 409, "name already exists"),
        ("/pools", &[("name", "x"), ("template", "nonsense")], 400, "Bad Template String: it has no '.'"),
        ("/pools", &[("name", "x"), ("template", ".sdd+101")], 400, "Bad Template String: the counter lies beyond"),
        ("/pools", &[("name", "x"), ("template", ".seeeeeeeeeeeee")], 400, "more than 2^63-1 ids"),
        ("/pools", &[("name", "x"), ("template", &long)], 400, "more than 255 bytes"),
        ("/pools", &[("name", "x"), ("template", ".sd"), ("colour", "red")], 400, "colour"),
        ("/pools", &[("name", "x"), ("template", ".sd"), ("check_scope", "ark")], 400, "check_scope"),
        ("/pools", &[("name", "x"), ("template", ".zd"), ("low_water", "5")], 400, "low_water"),
        ("/pools", &[("name", "x"), ("template", ".sd"), ("low_water", "-1")], 400, "low_water"),
        ("/pools/p/mint", &[("n", "0")], 400, "count is out of range: n"),
        ("/pools/p/mint", &[("n", "1001")], 400, "count is out of range: n"),
        ("/pools/p/mint", &[("n", "-1")], 400, "count is out of range: n"),
        ("/pools/p/mint", &[("n", "two")], 400, "n: "),
        ("/pools/p/mint", &[("n", "99999999999999999999")], 400, "n: "),
        ("/pools/p/mint", &[(":poolname", "q")], 400, ":poolname"),
        ("/pools/p/mint", &[("pool", "q")], 400, "pool: is given twice"),
        ("/pools/none/mint", &[], 404, "Pool could not be found"),
        ("/pools/none/mint", &[("n", "0")], 400, "count is out of range"),
        ("/pools/none/advancePast", &[("id", "00")], 404, "Pool could not be found"),
        ("/pools/p/advancePast", &[], 400, "id parameter is required"),
        ("/pools/p/advancePast", &[("id", "")], 400, "id parameter is required"),
        ("/pools/p/advancePast", &[("id", "0")], 400, "Id is invalid for this counter"),
        ("/pools/p/exclude", &[], 400, "ids: must be 1 to 10000"),
        ("/pools/p/exclude", &[("ids", "05\nzz")], 400, "ids[1]: \"zz\""),
        ("/pools/p/validate", &[], 400, "id parameter is required"),
        ("/pools/import", &[("name", "x")], 400, "template"),
    ] {
        let answer = http.form(path, fields).await;
        assert_eq!(answer.status, status, "{path} {fields:?}: {}", answer.text);
        assert!(answer.text.contains(said) && answer.text.ends_with('\n'), "{path} {fields:?}: {}", answer.text);
        assert_eq!(answer.headers["content-type"], "text/plain; charset=utf-8");
    }
    for path in ["/pools/none", "/pools/none/peek", "/pools/none/export", "/pools/none/validate?id=0"] {
        assert_eq!(http.get(path).await.status, 404, "{path}");
    }
    for path in ["/pools/none/open", "/pools/none/close", "/pools/none/low_water?low_water=3"] {
        assert_eq!(http.put(path).await.status, 404, "{path}");
    }
    let deleted = http.delete("/pools/p").await;
    assert_eq!(deleted.status, 405);
    assert!(deleted.text.contains("DELETE is not supported"), "{}", deleted.text);
    assert_eq!(http.get("/pools").await.json(), json!(["p"]));
    assert_eq!(http.get("/pools/p").await.json()["Template"], ".sdd+0");
    server.stop().await;
}

#[tokio::test]
async fn the_same_over_nats() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (client, nats) = (deployment.client().await, deployment.nats().await);
    let pool = name("p");
    let made = client.create_pool(&pool, &NewPool { template: ".sd".into(), ..Default::default() }).await.unwrap();
    assert_eq!((made.max, made.remaining), (10, Some(10)));
    let again = client.create_pool(&pool, &NewPool { template: ".sd".into(), ..Default::default() }).await;
    assert_eq!(again.unwrap_err().code, Code::Conflict);
    assert_eq!(client.list_pools(&NoParameters {}).await.unwrap(), ["p"]);
    let bare = nats.request("tm.noid.mint.p", "".into()).await.unwrap();
    assert_eq!(&bare.payload[..], br#"["0"]"#, "a bare result, and nothing asked is one");
    assert_eq!(client.mint_noids(&pool, &Count { n: Some(2) }).await.unwrap(), ["1", "2"]);
    assert_eq!(client.peek_noids(&pool, &Count { n: Some(2) }).await.unwrap(), ["3", "4"]);
    assert_eq!(client.advance_pool(&pool, &OneId { id: "4".into() }).await.unwrap().used, 5);
    let excluded = client.exclude_noids(&pool, &SomeIds { ids: vec!["6".into()], numbers: Vec::new() }).await.unwrap();
    assert_eq!((excluded.excluded, excluded.remaining), (Some(1), Some(4)));
    assert!(client.close_pool(&pool, &NoParameters {}).await.unwrap().closed);
    assert!(client.mint_noids(&pool, &Count::default()).await.unwrap().is_empty());
    assert!(!client.open_pool(&pool, &NoParameters {}).await.unwrap().closed);
    let validity = client.validate_noid(&pool, &IdToValidate { id: "4".into(), lenient: false }).await.unwrap();
    assert_eq!((validity.number, validity.used), (4, true));
    assert_eq!(client.mint_noids(&pool, &Count { n: Some(9) }).await.unwrap(), ["5", "7", "8", "9"]);
    assert!(client.pool_info(&pool, &NoParameters {}).await.unwrap().closed);
    let unknown = nats.request("tm.noid.mint.none", "".into()).await.unwrap();
    assert_eq!(unknown.headers.unwrap().get("Nats-Service-Error-Code").unwrap().as_str(), "404");
    let stats = client.noid_stats(&NoParameters {}).await.unwrap();
    assert_eq!((stats.pools, stats.minted), (1, 7));
    assert_eq!(server.http().get("/stats").await.json()["Version"], env!("CARGO_PKG_VERSION"));
    server.stop().await;
}

#[tokio::test]
async fn what_is_excluded_is_never_minted_by_anybody() {
    let deployment = Deployment::new().await;
    let (one, two) = (deployment.serve().await, deployment.serve().await);
    let (http, other) = (one.http(), two.http());
    create(&http, "p", ".sdd").await;
    // Both have the pool in hand when it changes under them.
    assert_eq!((mint(&http, "p", 1).await, mint(&other, "p", 1).await), (json!(["00"]), json!(["01"])));
    let ids: Vec<String> = (4..99).filter(|number| number % 7 != 0).map(|number| format!("{number:02}")).collect();
    let excluded = http.post("/pools/p/exclude", json!({"ids": ids})).await;
    assert_eq!(excluded.status, 200, "{}", excluded.text);
    assert_eq!((&excluded.json()["Excluded"], &excluded.json()["Remaining"]), (&json!(81), &json!(17)));
    assert_eq!(other.get("/pools/p/peek?n=4").await.json(), json!(["02", "03", "07", "14"]));
    assert_eq!(mint(&other, "p", 4).await, json!(["02", "03", "07", "14"]));
    // Twice is once, and what is spent needs nothing; lines of a form will do.
    let again = other.form("/pools/p/exclude", &[("ids", "00\n05\r\n98\n21")]).await.json();
    assert_eq!((&again["Excluded"], &again["Remaining"]), (&json!(74), &json!(11)));
    assert_eq!(mint(&http, "p", 2).await, json!(["28", "35"]));
    assert_eq!(other.form("/pools/p/advancePast", &[("id", "60")]).await.json()["Remaining"], 6);
    one.stop().await;
    two.stop().await;
    // A process that knows nothing finds all of it.
    let three = deployment.serve().await;
    assert_eq!(mint(&three.http(), "p", 9).await, json!(["63", "70", "77", "84", "91", "99"]));
    assert_eq!(three.http().get("/pools/p").await.json()["Closed"], true);
    three.stop().await;
}

#[tokio::test]
async fn a_pool_can_be_moved_with_all_it_knows() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    let fields = [("name", "old"), ("template", "ark:/9/x.rdddddk+7"), ("low_water", "9"), ("check_scope", "ark")];
    assert_eq!(http.form("/pools", &fields).await.status, 201);
    assert_eq!(http.get("/pools/old").await.json()["CheckScope"], "ark");
    // More than one page of them.
    let (template, _) = tidemark::noid::Template::parse("ark:/9/x.rdddddk").unwrap();
    let template = template.with_check_scope(tidemark::noid::CheckScope::Ark).unwrap();
    let numbers: Vec<u64> = (0..25_000).map(|index| 10 + index * 2).collect();
    for batch in numbers.chunks(10_000) {
        let ids: Vec<String> = batch.iter().map(|number| template.id(*number).unwrap()).collect();
        assert_eq!(http.post("/pools/old/exclude", json!({"ids": ids})).await.status, 200);
    }
    assert_eq!(http.put("/pools/old/close").await.json()["Closed"], true);
    let first = http.get("/pools/old/export").await.json();
    let rest = http.get(&format!("/pools/old/export?excluded_from={}", first["next"])).await.json();
    let both: Vec<&Value> =
        first["excluded"].as_array().unwrap().iter().chain(rest["excluded"].as_array().unwrap()).collect();
    assert_eq!(json!(both), json!(numbers));
    assert!(rest.get("next").is_none());

    let mut state = first.clone();
    (state["name"], state["closed"]) = (json!("new"), json!(false));
    let incomplete = http.post("/pools/import", state.clone()).await;
    assert_eq!(incomplete.status, 400, "it could mint what is excluded: {}", incomplete.text);
    assert!(incomplete.text.contains("next"), "{}", incomplete.text);
    state["closed"] = json!(true);
    let made = http.post("/pools/import", state.clone()).await;
    assert_eq!(made.status, 201, "{}", made.text);
    assert_eq!(http.post("/pools/import", state.clone()).await.status, 409);
    let new = http.post("/pools/new/exclude", json!({"numbers": rest["excluded"]})).await.json();
    assert_eq!(http.post("/pools/new/exclude", json!({"numbers": [100_000]})).await.status, 400);
    let old = http.get("/pools/old").await.json();
    for field in
        ["Template", "Used", "Max", "Closed", "Created", "LastMint", "Remaining", "Excluded", "LowWater", "CheckScope"]
    {
        assert_eq!(new[field], old[field], "{field}");
    }
    http.put("/pools/old/open").await;
    http.put("/pools/new/open").await;
    assert_eq!(mint(&http, "new", 1000).await, mint(&http, "old", 1000).await);
    for (field, wrong) in [("template", json!("x")), ("excluded", json!([100_000])), ("closed", json!("no"))] {
        let mut broken = state.clone();
        (broken["name"], broken[field]) = (json!("broken"), wrong);
        let refused = http.post("/pools/import", broken).await;
        assert_eq!(refused.status, 400, "{field}: {}", refused.text);
    }
    assert_eq!(http.get("/pools/broken").await.status, 404);
    server.stop().await;
}

#[tokio::test]
async fn ids_are_validated_strictly_or_as_people_write_them() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    create(&http, "p", ".reeddeeddk").await;
    mint(&http, "p", 3).await;
    let known = http.get("/pools/p/validate?id=05741r680").await.json();
    assert_eq!(known, json!({"Id": "05741r680", "Valid": true, "Number": 2, "Used": true}));
    let ahead = http.form("/pools/p/validate", &[("id", "rj430b984")]).await.json();
    assert_eq!((&ahead["Number"], &ahead["Used"]), (&json!(189_506), &json!(false)));
    let unknown = http.get("/pools/p/validate?id=rj430b985").await.json();
    assert_eq!(unknown, json!({"Id": "rj430b985", "Valid": false, "Number": -1, "Used": false}));
    assert_eq!(http.get("/pools/p/validate?id=rj43-0b984").await.json()["Number"], -1);
    assert_eq!(http.get("/pools/p/validate?id=rj43-0b984&lenient=true").await.json()["Number"], 189_506);
    assert_eq!(http.get("/pools/p").await.json()["Used"], 3, "looking spends nothing");
    server.stop().await;
}

async fn next(events: &mut async_nats::Subscriber) -> async_nats::Message {
    timeout(Duration::from_secs(30), events.next()).await.expect("an event comes").unwrap()
}

#[tokio::test]
async fn a_pool_that_runs_low_is_announced_once_and_again_when_it_ends() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    let mut events = deployment.nats().await.subscribe("tm.event.noid.>").await.unwrap();
    let made = http.form("/pools", &[("name", "p"), ("template", ".sdd"), ("low_water", "10")]).await;
    assert_eq!(made.json()["LowWater"], 10);
    mint(&http, "p", 89).await;
    mint(&http, "p", 2).await;
    let low = next(&mut events).await;
    assert_eq!(low.subject.as_str(), "tm.event.noid.low.p");
    let news: Value = serde_json::from_slice(&low.payload).unwrap();
    assert_eq!((&news["pool"], &news["level"], &news["remaining"]), (&json!("p"), &json!("low"), &json!(9)));
    // Told means told: the pool remembers before the next mint.
    eventually("the pool remembers", async || {
        let store = jetstream::new(deployment.nats().await).get_key_value("tm_counters").await.unwrap();
        let value: Value = serde_json::from_slice(&store.get("noid.p").await.unwrap().unwrap()).unwrap();
        (value["state"]["announced"] == "low").then_some(())
    })
    .await;
    mint(&http, "p", 1).await;
    mint(&http, "p", 1000).await;
    let end = next(&mut events).await;
    assert_eq!(end.subject.as_str(), "tm.event.noid.exhausted.p", "and nothing between");

    // A threshold can be set later, and tells at once.
    create(&http, "q", ".sd").await;
    assert_eq!(http.put("/pools/q/low_water?low_water=10").await.json()["LowWater"], 10);
    assert_eq!(next(&mut events).await.subject.as_str(), "tm.event.noid.low.q");
    assert_eq!(http.put("/pools/q/low_water").await.json().get("LowWater"), None);
    server.stop().await;
}

#[tokio::test]
async fn what_a_killed_process_could_not_tell_is_told_by_the_next() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    create(&server.http(), "p", ".sd").await;
    mint(&server.http(), "p", 10).await;
    let store = jetstream::new(deployment.nats().await).get_key_value("tm_counters").await.unwrap();
    let stored = async || -> Value { serde_json::from_slice(&store.get("noid.p").await.unwrap().unwrap()).unwrap() };
    eventually("the end is told", async || (stored().await["state"]["announced"] == "exhausted").then_some(())).await;
    server.stop().await;
    // As if the process had died before it could tell.
    let mut untold = stored().await;
    untold["state"]["announced"] = json!("plenty");
    store.put("noid.p", untold.to_string().into()).await.unwrap();
    let mut events = deployment.nats().await.subscribe("tm.event.noid.>").await.unwrap();
    let server = deployment.serve().await;
    assert_eq!(next(&mut events).await.subject.as_str(), "tm.event.noid.exhausted.p");
    server.stop().await;
}

#[tokio::test]
async fn there_are_so_many_pools_and_no_more() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.noid.max_pools = 2).await;
    let http = server.http();
    create(&http, "a", ".sd").await;
    create(&http, "b", ".sd").await;
    let refused = http.form("/pools", &[("name", "c"), ("template", ".sd")]).await;
    assert_eq!(refused.status, 409);
    assert!(refused.text.contains("max_pools"), "{}", refused.text);
    server.stop().await;
}

#[tokio::test]
async fn a_broken_record_harms_its_own_pool_only() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    create(&http, "first", ".sd").await;
    create(&http, "broken", ".sd").await;
    create(&http, "last", ".sd").await;
    let store = jetstream::new(deployment.nats().await).get_key_value("tm_counters").await.unwrap();
    create(&http, "absurd", ".sd").await;
    let absurd = store.get("noid.absurd").await.unwrap().unwrap();
    let absurd = String::from_utf8(absurd.to_vec()).unwrap().replace("\"position\":0", "\"position\":11");
    store.put("noid.absurd", absurd.into()).await.unwrap();
    store.put("noid.broken", "half a rec".into()).await.unwrap();
    server.stop().await;
    let server = deployment.serve().await;
    let http = server.http();
    assert_eq!(http.get("/pools").await.json(), json!(["first", "last", "absurd", "broken"]));
    for pool in ["broken", "absurd"] {
        for answer in [http.get(&format!("/pools/{pool}")).await, http.form(&format!("/pools/{pool}/mint"), &[]).await]
        {
            assert_eq!((answer.status, answer.text.as_str()), (500, "an internal error occurred\n"), "{pool}");
        }
    }
    assert_eq!(http.form("/pools", &[("name", "broken"), ("template", ".sd")]).await.status, 500, "never begun again");
    assert_eq!(mint(&http, "last", 1).await, json!(["0"]));
    // A part that is missing is noticed, and nothing excluded is minted.
    create(&http, "large", ".sdddd").await;
    let ids: Vec<String> = (100..300).map(|number| format!("{number:04}")).collect();
    assert_eq!(http.post("/pools/large/exclude", json!({"ids": ids})).await.status, 200);
    store.put("noid.large.excluded.0", "[]".into()).await.unwrap();
    server.stop().await;
    let server = deployment.serve().await;
    assert_eq!(server.http().form("/pools/large/mint", &[("n", "1000")]).await.status, 500);
    server.stop().await;
}

#[tokio::test]
async fn a_closed_surface_asks_who_calls() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.auth.open_pools_and_stages = false).await;
    let http = server.http();
    assert_eq!(http.get("/pools").await.status, 401);
    create(&http.clone().admin(), "p", ".sd").await;
    let roles = json!({"tenant": "acme", "roles": ["mint"]});
    let key = http.clone().admin().post("/v1/admin/keys", roles).await.json()["key"].as_str().unwrap().to_owned();
    let minter = http.clone().key(&key);
    assert_eq!(mint(&minter, "p", 1).await, json!(["0"]));
    assert_eq!(minter.form("/pools", &[("name", "q"), ("template", ".sd")]).await.status, 403);
    assert_eq!(minter.put("/pools/p/close").await.status, 403);
    assert_eq!(http.key(API_KEY).put("/pools/p/close").await.status, 200);
    server.stop().await;
}
