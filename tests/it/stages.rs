//! Stage ids: one for each request id, whatever happens on the way.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_nats::HeaderMap;
use chrono::{TimeDelta, Utc};
use futures::{StreamExt, future::join_all};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tidemark::{
    api::{Context, stages::AllocateStage, stages::NewStage},
    client::{Client, SERVICE_ERROR_CODE},
    clock::Clock,
    config::Config,
    error::{Code, Result},
    jetstream::round_trip,
};
use tokio::time::timeout;
use uuid::Uuid;

use crate::support::{Answer, Deployment, Http, Process, Proxy, Servers, eventually, unlimited};

async fn post(http: &Http, request_id: &str) -> Answer {
    http.clone().header("x-request-id", request_id).post("/stages", json!({})).await
}

fn new_id() -> String {
    Uuid::new_v4().to_string()
}

/// A stage over NATS, and whether it was given before.
async fn allocate(client: &Client, request_id: &str) -> Result<(i32, bool)> {
    let context = Context { named: Some(request_id.into()), ..Default::default() };
    let given = client.call_with::<AllocateStage>(&(), &NewStage::default(), &context).await?;
    Ok((given.stage_id, given.repeated))
}

const BAD_ID: &str = r#"{"error":"X-Request-ID header is required and must be a valid UUID."}"#;

#[tokio::test]
async fn the_seeds_answers() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(unlimited).await;
    let http = server.http();
    let id = new_id();
    let first = post(&http, &id).await;
    assert_eq!((first.status, &*first.text), (201, r#"{"stage_id":1}"#));
    assert_eq!(first.headers["content-type"], "application/json");
    for spelling in [id.clone(), id.to_uppercase(), id.replace('-', "")] {
        let again = post(&http, &spelling).await;
        assert_eq!((again.status, &*again.text), (200, r#"{"stage_id":1}"#), "{spelling}");
    }
    // No body is an empty one.
    let second = http.clone().header("x-request-id", &new_id()).form("/stages", &[]).await;
    assert_eq!((second.status, &*second.text), (201, r#"{"stage_id":2}"#));
    let nil = Uuid::nil().to_string();
    for bad in ["", "7", "not-a-uuid", &id[..35], &nil] {
        let refused = post(&http, bad).await;
        assert_eq!((refused.status, &*refused.text), (400, BAD_ID), "{bad}");
    }
    let missing = http.post("/stages", json!({})).await;
    assert_eq!((missing.status, &*missing.text), (400, BAD_ID));
    let strange = http.clone().header("x-request-id", &new_id()).post("/stages", json!({"colour": "red"})).await;
    assert!(strange.status == 400 && strange.text.contains("colour"), "{}", strange.text);
    let list = http.clone().header("x-request-id", &new_id()).post("/stages", json!([])).await;
    assert_eq!((list.status, &*list.text), (400, r#"{"error":"body: must be an object"}"#));
    assert_eq!(http.get("/stages").await.status, 405);
    assert_eq!(post(&http, &new_id()).await.text, r#"{"stage_id":3}"#, "what was refused took nothing");

    // What is known of one.
    let stage = http.get("/stages/1").await.json();
    assert_eq!((&stage["stage_id"], &stage["request_id"]), (&json!(1), &json!(id)));
    assert_eq!((&stage["props"], &stage["acts"]), (&json!(0), &json!(0)));
    assert_eq!(http.get("/stages/4").await.text, r#"{"error":"stage 4 was never allocated"}"#);
    let metrics = http.get("/metrics").await.text;
    for meter in
        ["tidemark_stage_allocated_total", "tidemark_stage_repeated_total", "tidemark_stage_allocation_seconds"]
    {
        assert!(metrics.contains(meter), "{meter}");
    }
    server.stop().await;
}

#[tokio::test]
async fn over_nats_the_request_id_is_the_messages_id_or_in_the_body() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.stages.first_id = 101).await;
    let nats = deployment.nats().await;
    let ask = async |header: Option<(&str, &str)>, body: Value| {
        let mut headers = HeaderMap::new();
        if let Some((name, value)) = header {
            headers.insert(name, value);
        }
        nats.request_with_headers("tm.stage.allocate", headers, body.to_string().into()).await.unwrap()
    };
    let id = new_id();
    let upper = id.to_uppercase();
    let first = ask(Some(("Nats-Msg-Id", &id)), json!({})).await;
    assert_eq!((&first.payload[..], first.headers), (&br#"{"stage_id":101}"#[..], None));
    for (header, body) in [
        (Some(("Nats-Msg-Id", &*upper)), json!({})),
        (None, json!({"request_id": id})),
        (Some(("X-Request-ID", &*id)), json!({"request_id": upper})),
    ] {
        let again = ask(header, body).await;
        assert_eq!(&again.payload[..], br#"{"stage_id":101}"#);
        assert_eq!(again.headers.unwrap().get("Tidemark-Repeated").unwrap().as_str(), "true");
    }
    for (header, body, said) in [
        (None, json!({}), "must be a valid UUID"),
        (Some(("Nats-Msg-Id", "7")), json!({}), "must be a valid UUID"),
        (None, json!({"request_id": "x"}), "must be a valid UUID"),
        (Some(("Nats-Msg-Id", &*id)), json!({"request_id": new_id()}), "request_id: is another one"),
        (Some(("Nats-Msg-Id", &*id)), json!({"request_id": "x"}), "request_id: is another one"),
    ] {
        let refused = ask(header, body).await;
        let code = refused.headers.as_ref().unwrap().get(SERVICE_ERROR_CODE).unwrap().to_string();
        let said_it = String::from_utf8_lossy(&refused.payload).contains(said);
        assert!(code == "400" && said_it, "{header:?}: {:?}", refused.payload);
    }
    // Nobody limits NATS, and the order is strict.
    let client = deployment.client().await;
    for stage in 102..130 {
        assert_eq!(allocate(&client, &new_id()).await.unwrap(), (stage, false));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_callers_with_one_request_id_get_one_stage() {
    let deployment = Deployment::new().await;
    let (one, two) = (deployment.serve_with(unlimited).await, deployment.serve_with(unlimited).await);
    let both = [one.http(), two.http()];
    for round in 1..=3 {
        // Others ask at the same time, so that the twins stand in batches.
        let (id, others): (String, Vec<String>) = (new_id(), (0..20).map(|_| new_id()).collect());
        let twins = join_all((0..100).map(|caller| post(&both[caller % 2], &id)));
        let others = join_all(others.iter().map(|other| post(&both[0], other)));
        let (twins, others) = tokio::join!(twins, others);
        let made: Vec<&Answer> = twins.iter().filter(|answer| answer.status == 201).collect();
        assert_eq!(made.len(), 1, "round {round}");
        assert!(twins.iter().all(|answer| answer.text == made[0].text));
        assert_eq!(twins.iter().filter(|answer| answer.status == 200).count(), 99, "round {round}");
        let others: BTreeSet<&str> =
            others.iter().map(|answer| (answer.status == 201).then_some(&*answer.text).unwrap()).collect();
        assert!(others.len() == 20 && !others.contains(&*made[0].text), "round {round}: {others:?}");
    }
    assert_eq!(post(&both[1], &new_id()).await.text, r#"{"stage_id":64}"#, "nothing was burnt");
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_repeat_is_known_for_as_long_as_the_window_to_whoever_starts_later_too() {
    let deployment = Deployment::new().await;
    let one = deployment.serve_with(unlimited).await;
    let client = deployment.client().await;
    let (first, second) = (new_id(), new_id());
    assert_eq!(allocate(&client, &first).await.unwrap(), (1, false));
    let give = async |entries: usize| {
        for _ in 0..entries {
            allocate(&client, &new_id()).await.unwrap();
        }
    };
    give(50).await;
    let middle = Utc::now();
    // More entries than are read at once.
    give(1050).await;
    assert_eq!(allocate(&client, &second).await.unwrap(), (1102, false));
    one.stop().await;
    // Whoever starts when the first entries are too old reads those that count.
    let clock = Clock::manual(middle + TimeDelta::hours(24));
    let two = deployment.serve_by_with(&clock, unlimited).await;
    assert_eq!(allocate(&client, &second).await.unwrap(), (1102, true));
    assert_eq!(allocate(&client, &first).await.unwrap(), (1103, false), "a repeat after the window is a new request");
    assert_eq!(allocate(&client, &first).await.unwrap(), (1103, true));
    clock.set(Utc::now() + TimeDelta::hours(24));
    assert_eq!(allocate(&client, &second).await.unwrap(), (1104, false));
    two.stop().await;
    // All of them exist, for ever.
    let three = deployment.serve_with(unlimited).await;
    let http = three.http();
    for (stage, request) in [(1, &first), (1102, &second), (1103, &first), (1104, &second)] {
        assert_eq!(http.get(&format!("/stages/{stage}")).await.json()["request_id"], json!(request), "{stage}");
    }
    assert_eq!(http.get("/stages/1105").await.status, 404);
    three.stop().await;
}

#[tokio::test]
async fn the_first_id_may_be_raised_and_others_go_on_from_there() {
    let deployment = Deployment::new().await;
    let from = |first: i64| move |config: &mut Config| config.stages.first_id = first;
    let one = deployment.serve_with(from(101)).await;
    let client = deployment.client().await;
    let before = new_id();
    assert_eq!(allocate(&client, &before).await.unwrap(), (101, false));
    one.stop().await;
    let two = deployment.serve_with(from(20_001)).await;
    assert_eq!(allocate(&client, &new_id()).await.unwrap(), (20_001, false));
    assert_eq!(allocate(&client, &before).await.unwrap(), (101, true));
    let http = two.http();
    for (stage, status) in [(100, 404), (101, 200), (102, 404), (20_000, 404), (20_001, 200), (20_002, 404)] {
        assert_eq!(http.get(&format!("/stages/{stage}")).await.status, status, "{stage}");
    }
    two.stop().await;
    let three = deployment.serve_with(from(1)).await;
    assert_eq!(allocate(&client, &new_id()).await.unwrap(), (20_002, false), "never below what was given");
    three.stop().await;
}

#[tokio::test]
async fn ids_end_with_the_int32_of_the_editors() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.stages.first_id = i64::from(i32::MAX) - 3).await;
    let client = deployment.client().await;
    let first = new_id();
    assert_eq!(allocate(&client, &first).await.unwrap(), (i32::MAX - 3, false));
    // A batch that does not fit takes what is left.
    let ids: Vec<String> = (0..10).map(|_| new_id()).collect();
    let (mut given, mut refused) = (BTreeSet::new(), 0);
    for answer in join_all(ids.iter().map(|id| allocate(&client, id))).await {
        match answer {
            Ok((stage, false)) => assert!(given.insert(stage)),
            Ok((_, true)) => panic!("nothing was asked twice"),
            Err(error) => {
                assert_eq!(error.code, Code::Exhausted);
                assert!(error.message.contains("2147483647"), "{error}");
                refused += 1;
            }
        }
    }
    assert_eq!((given, refused), ((i32::MAX - 2..=i32::MAX).collect(), 7));
    assert_eq!(allocate(&client, &first).await.unwrap(), (i32::MAX - 3, true), "repeats are answered for ever");
    let end = server.http().header("x-request-id", &new_id()).post("/stages", json!({})).await;
    assert_eq!(end.status, 503);
    assert!(end.json()["error"].as_str().unwrap().contains("no stage ids are left"), "{}", end.text);
    server.stop().await;
}

#[tokio::test]
async fn the_server_goes_away_between_two_equal_requests_or_hangs_in_one() {
    let mut servers = Servers::start("stages").await;
    let deployment = servers.deployment().await;
    let quick = |config: &mut Config| {
        unlimited(config);
        config.watermark.deadline = Duration::from_millis(300);
    };
    let server = deployment.serve_with(quick).await;
    let http = server.http();
    let id = new_id();
    assert_eq!(post(&http, &id).await.text, r#"{"stage_id":1}"#);
    server.stop().await;
    // Everything is killed, and comes back.
    servers.nats.kill();
    servers.nats.restart().await.unwrap();
    let server = deployment.serve_with(quick).await;
    let http = server.http();
    let again = post(&http, &id).await;
    assert_eq!((again.status, &*again.text), (200, r#"{"stage_id":1}"#));
    // Only the server is.
    servers.nats.kill();
    servers.nats.restart().await.unwrap();
    eventually("the process is back", async || (http.get("/ready").await.status == 200).then_some(())).await;
    let again = post(&http, &id).await;
    assert_eq!((again.status, &*again.text), (200, r#"{"stage_id":1}"#));

    // It hangs: nobody knows whether the stage was given, and the same request finds out.
    let stopped = Pid::from_raw(servers.nats.id() as i32);
    let id = new_id();
    kill(stopped, Signal::SIGSTOP).unwrap();
    let undecided = post(&http, &id).await;
    kill(stopped, Signal::SIGCONT).unwrap();
    let text = r#"{"error":"Another request with the same X-Request-ID is being processed. Please retry shortly."}"#;
    assert_eq!((undecided.status, &*undecided.text), (409, text));
    let decided = eventually("it is decided", async || {
        let answer = post(&http, &id).await;
        [200, 201].contains(&answer.status).then_some(answer.text)
    })
    .await;
    assert_eq!(post(&http, &id).await.text, decided);
    server.stop().await;
}

#[tokio::test]
async fn a_lost_acknowledgement_is_no_repeat_and_takes_no_second_stage() {
    let deployment = Deployment::new().await;
    let proxy = Proxy::before(&deployment.nats_url).await;
    let server = deployment.serve_behind(&proxy).await;
    let http = server.http();
    let mut given = BTreeSet::new();
    for callers in [1, 1, 20] {
        let ids: Vec<String> = (0..callers).map(|_| new_id()).collect();
        let asked = join_all(ids.iter().map(|id| post(&http, id)));
        let (answers, ()) = tokio::join!(asked, proxy.lose_an_acknowledgement());
        for (id, answer) in ids.iter().zip(answers) {
            assert_eq!(answer.status, 201, "{}", answer.text);
            assert!(given.insert(answer.json()["stage_id"].as_i64().unwrap()));
            let again = post(&http, id).await;
            assert_eq!((again.status, again.text), (200, answer.text));
        }
    }
    assert_eq!(given, (1..=22).collect(), "none was burnt");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_stage_goes_to_two_requests_while_processes_are_killed() {
    const CALLERS: usize = 12;
    const ROUNDS: usize = 6;
    let deployment = Deployment::new().await;
    let spawn = async || deployment.spawn_ready(&["--roles", "stages"]).await;
    let mut processes: [Process; 2] = [spawn().await, spawn().await];
    let client = deployment.client().await;
    let given: Arc<Mutex<HashMap<i32, String>>> = Arc::default();
    let done = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| {
            let (given, done, client) = (given.clone(), done.clone(), client.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    let id = new_id();
                    // A killed process leaves callers without an answer; they ask again with the same id.
                    let stage = loop {
                        if let Ok(Ok((stage, _))) = timeout(Duration::from_secs(1), allocate(&client, &id)).await {
                            break stage;
                        }
                    };
                    let earlier = given.lock().unwrap().insert(stage, id);
                    assert_eq!(earlier, None, "{stage} was given before");
                }
            })
        })
        .collect();
    for round in 0..ROUNDS {
        let before = given.lock().unwrap().len();
        eventually("stages are given", async || (given.lock().unwrap().len() > before + 300).then_some(())).await;
        processes[round % 2].kill();
        processes[round % 2] = spawn().await;
    }
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    let given = std::mem::take(&mut *given.lock().unwrap());
    let last = given.keys().max().copied().unwrap();
    assert_eq!(last as usize, given.len(), "every id was given to somebody");
    for (stage, id) in given.iter().take(200) {
        assert_eq!(allocate(&client, id).await.unwrap(), (*stage, true));
    }
}

#[tokio::test]
async fn what_happens_is_told() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(unlimited).await;
    let http = server.http();
    let nats = deployment.nats().await;
    let mut events = nats.subscribe("tm.event.stage.>").await.unwrap();
    round_trip(&nats).await.unwrap();
    let mut next = async || {
        let event = timeout(Duration::from_secs(10), events.next()).await.expect("an event").unwrap();
        (event.subject.to_string(), serde_json::from_slice::<Value>(&event.payload).unwrap())
    };
    let id = new_id();
    post(&http, &id).await;
    post(&http, &id).await;
    assert_eq!(next().await, ("tm.event.stage.allocated".into(), json!({"stage_id": 1, "request_id": id})));
    let editor = http.clone().header("x-request-id", "edit-1");
    let path = "/Game/Maps/L.L:PersistentLevel.BP_Gate";
    editor.post("/stages/1/props", json!({"path": path})).await;
    editor.post("/stages/1/props", json!({"path": path})).await;
    let prop = json!({"stage_id": 1, "request_id": "edit-1", "key": "{1, 0, 1}", "prop_id": 1, "path": path});
    assert_eq!(next().await, ("tm.event.stage.prop-registered.1".into(), prop.clone()), "a repeat is no news");
    let act = json!({"target_prop_states": {"{1, 0, 1}": 2}});
    editor.post("/stages/1/acts", act.clone()).await;
    let (subject, told) = next().await;
    assert_eq!((&*subject, &told["key"]), ("tm.event.stage.act-created.1", &json!("{1, 1, 0}")));
    assert_eq!((&told["revision"], &told["request_id"]), (&json!(1), &json!("edit-1")));
    let changed = json!({"target_prop_states": {}, "revision": 1});
    editor.send(reqwest::Method::PUT, "/stages/1/acts/1", Some(changed.to_string().into())).await;
    assert_eq!(next().await.0, "tm.event.stage.act-updated.1");
    editor.delete("/stages/1/props/1").await;
    assert_eq!(next().await, ("tm.event.stage.prop-unregistered.1".into(), prop));
    server.stop().await;
}

#[tokio::test]
async fn the_bridge_in_another_process_tells_repeats_too() {
    let deployment = Deployment::new().await;
    let mut bridge = deployment.spawn(&["--roles", "http"]);
    let mut service = deployment.spawn(&["--roles", "stages"]);
    bridge.is_ready().await;
    service.is_ready().await;
    let http = bridge.http().await;
    let id = new_id();
    assert_eq!(post(&http, &id).await.status, 201);
    let again = post(&http, &id).await;
    assert_eq!((again.status, &*again.text), (200, r#"{"stage_id":1}"#));
    let bad = post(&http, "x").await;
    assert_eq!((bad.status, &*bad.text), (400, BAD_ID));
    // What the seed wants in the log.
    let line: Value = serde_json::from_str(&service.prints("stage allocated").await).unwrap();
    assert_eq!((&line["stage_id"], &line["request_id"]), (&json!(1), &json!(id)));
    service.prints("stage allocated before").await;
    let line: Value = serde_json::from_str(&bridge.prints("answered").await).unwrap();
    let span = &line["span"];
    assert_eq!((&span["client"], &span["request_id"]), (&json!("127.0.0.1"), &json!(id)), "{line}");
    assert_eq!((&span["path"], &line["status"]), (&json!("/stages"), &json!(201)), "{line}");
    assert!(line["took_ms"].is_u64() && line["timestamp"].is_string(), "{line}");
    for _ in 0..9 {
        post(&http, &id).await;
    }
    let line: Value = serde_json::from_str(&bridge.prints("rate limited").await).unwrap();
    assert_eq!((&line["client"], &line["rule"]), (&json!("127.0.0.1"), &json!("5 requests / 10s")), "{line}");
    assert_eq!(line["span"]["request_id"], json!(id), "{line}");
}
