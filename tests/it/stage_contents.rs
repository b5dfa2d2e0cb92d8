//! Props and acts inside a stage, as two designers with an editor each would use them.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tidemark::{
    api::{
        Context,
        stages::{
            ActId, AllocateStage, ChangedAct, NewAct, NewProp, NewStage, OneProp, PropFilter, PropId, Props,
            RegisterProp,
        },
    },
    client::Client,
    error::Code,
};
use tokio::time::timeout;
use uuid::Uuid;

use crate::support::{Answer, Deployment, Http, Proxy, Running, eventually, name, unlimited};

/// The seed's village: stage 101.
async fn village(deployment: &Deployment) -> (Running, Http) {
    let server = deployment
        .serve_with(|config| {
            unlimited(config);
            config.stages.first_id = 101;
        })
        .await;
    let http = server.http();
    allocate(&http).await;
    (server, http)
}

async fn allocate(http: &Http) {
    let id = Uuid::new_v4().to_string();
    assert_eq!(http.clone().header("x-request-id", &id).post("/stages", json!({})).await.status, 201);
}

fn path(prop: &str) -> String {
    format!("/Game/Maps/Village.Village:PersistentLevel.{prop}")
}

async fn register(http: &Http, prop: &str) -> Answer {
    http.post("/stages/101/props", json!({"path": path(prop)})).await
}

async fn put(http: &Http, path: &str, body: Value) -> Answer {
    http.send(Method::PUT, path, Some(body.to_string().into_bytes())).await
}

#[tokio::test]
async fn the_village_of_the_seed() {
    let deployment = Deployment::new().await;
    let (server, http) = village(&deployment).await;
    for (id, prop) in [(1, "BP_VillageGate"), (2, "BP_Well"), (3, "BP_Statue")] {
        let made = register(&http, prop).await;
        assert_eq!(made.status, 201, "{}", made.text);
        assert_eq!(made.text, format!(r#"{{"key":"{{101, 0, {id}}}","prop_id":{id},"path":"{}"}}"#, path(prop)));
    }
    // The same path is the same prop, in any letters, as in the engine.
    for again in ["BP_Well", "bp_well"] {
        let again = register(&http, again).await;
        assert_eq!(
            (again.status, &again.json()["prop_id"], &again.json()["path"]),
            (200, &json!(2), &json!(path("BP_Well")))
        );
    }
    let states = json!({"{101, 0, 1}": 2, "{101, 0, 3}": 5});
    for (id, act) in [(1, "Act_Peaceful"), (2, "Act_UnderAttack"), (3, "Act_Ruined")] {
        let made = http.post("/stages/101/acts", json!({"name": act, "target_prop_states": states})).await;
        let expected = json!({
            "key": format!("{{101, {id}, 0}}"), "act_id": id, "name": act, "target_prop_states": states, "revision": 1,
        });
        assert_eq!((made.status, made.json()), (201, expected));
    }
    let attack = http.get("/stages/101/acts/2").await.json();
    assert_eq!((&attack["name"], &attack["target_prop_states"]), (&json!("Act_UnderAttack"), &states));
    let resolved = json!({"props": [
        {"key": "{101, 0, 1}", "path": path("BP_VillageGate"), "state": 2, "registered": true},
        {"key": "{101, 0, 3}", "path": path("BP_Statue"), "state": 5, "registered": true},
    ]});
    assert_eq!(http.get("/stages/101/acts/2/resolve").await.json(), resolved);
    let acts = http.get("/stages/101/acts").await.json();
    assert_eq!(acts["acts"][2], json!({"key": "{101, 3, 0}", "act_id": 3, "name": "Act_Ruined", "revision": 1}));

    // The statue is taken down: its id stays taken, and the act says what it misses.
    let gone = http.delete("/stages/101/props/3").await;
    assert_eq!((gone.status, gone.json()["key"].as_str()), (200, Some("{101, 0, 3}")));
    assert_eq!(http.delete("/stages/101/props/3").await.status, 404);
    assert_eq!(http.get("/stages/101/props/3").await.status, 404);
    let resolved = http.get("/stages/101/acts/2/resolve").await.json();
    assert_eq!(
        resolved["props"][1],
        json!({"key": "{101, 0, 3}", "path": path("BP_Statue"), "state": 5, "registered": false})
    );
    let back = register(&http, "BP_Statue").await;
    assert_eq!((back.status, &back.json()["prop_id"]), (201, &json!(4)));
    assert_eq!(http.get("/stages/101/acts/2/resolve").await.json(), resolved, "the new one is another prop");

    let listed = http.get("/stages/101/props").await.json();
    let ids: Vec<&Value> = listed["props"].as_array().unwrap().iter().map(|prop| &prop["prop_id"]).collect();
    assert_eq!((ids, listed.get("next")), (vec![&json!(1), &json!(2), &json!(4)], None));
    let page = http.get("/stages/101/props?limit=2").await.json();
    assert_eq!((page["props"].as_array().unwrap().len(), &page["next"]), (2, &json!(2)));
    let rest = http.get("/stages/101/props?limit=2&after=2").await.json();
    assert_eq!((&rest["props"][0]["prop_id"], rest.get("next")), (&json!(4), None));
    let well = json!({"key": "{101, 0, 2}", "prop_id": 2, "path": path("BP_Well")});
    assert_eq!(http.get("/stages/101/props/2").await.json(), well);
    assert_eq!(http.get(&format!("/stages/101/props?path={}", path("BP_Well"))).await.json(), well);
    assert_eq!(http.get(&format!("/stages/101/props?path={}", path("BP_Inn"))).await.status, 404);
    let stage = http.get("/stages/101").await.json();
    assert_eq!((&stage["props"], &stage["acts"]), (&json!(3), &json!(3)));
    server.stop().await;
}

#[tokio::test]
async fn what_is_wrong_is_said_and_changes_nothing() {
    let deployment = Deployment::new().await;
    let (server, http) = village(&deployment).await;
    register(&http, "BP_VillageGate").await;
    register(&http, "BP_Well").await;
    http.delete("/stages/101/props/2").await;
    http.post("/stages/101/acts", json!({})).await;
    let before = (http.get("/stages/101/props").await.text, http.get("/stages/101/acts/1").await.text);
    let data_error =
        |act, prop: &str| format!("Data Error: Act '{{101, {act}, 0}}' references an unregistered PropID '{prop}'.");
    let states = |key: &str, state: Value| json!({"target_prop_states": {key: state}});
    for (path, body, status, said) in [
        ("/stages/102/props", json!({"path": "/Game/A"}), 404, "stage 102 was never allocated".into()),
        ("/stages/0/props", json!({"path": "/Game/A"}), 400, "stage: must be a whole number".into()),
        ("/stages/0101/props", json!({"path": "/Game/A"}), 400, "stage: must be".into()),
        ("/stages/x/props", json!({"path": "/Game/A"}), 400, "stage: must be".into()),
        ("/stages/2147483648/props", json!({"path": "/Game/A"}), 400, "stage: must be".into()),
        ("/stages/101/props", json!({}), 400, "path".into()),
        ("/stages/101/props", json!({"path": ""}), 400, "path: must not be empty".into()),
        ("/stages/101/props", json!({"path": 7}), 400, "path".into()),
        ("/stages/101/props", json!({"path": "BP_Gate"}), 400, "path: must be the path of an object".into()),
        ("/stages/101/props", json!({"path": "/Game/A\n"}), 400, "path: must not have control".into()),
        ("/stages/101/props", json!({"path": format!("/{}", "x".repeat(1024))}), 400, "1024 characters".into()),
        ("/stages/101/props", json!({"path": "/Game/A", "id": 9}), 400, "id".into()),
        ("/stages/101/acts", states("{101, 0, 9}", json!(1)), 400, data_error(2, "{101, 0, 9}")),
        ("/stages/101/acts", states("{101, 0, 2}", json!(1)), 400, data_error(2, "{101, 0, 2}")),
        ("/stages/101/acts", states("{102, 0, 1}", json!(1)), 400, data_error(2, "{102, 0, 1}")),
        ("/stages/101/acts", states("{101, 1, 0}", json!(1)), 400, "{101, 1, 0} names an act".into()),
        ("/stages/101/acts", states("{101, 1, 1}", json!(1)), 400, "target_prop_states".into()),
        ("/stages/101/acts", states("{101,0,1}", json!(1)), 400, "is no key such as {101, 0, 1}".into()),
        ("/stages/101/acts", states("gate", json!(1)), 400, "is no key".into()),
        ("/stages/101/acts", states("{101, 0, 1}", json!(2147483648_i64)), 400, "target_prop_states".into()),
        ("/stages/101/acts", states("{101, 0, 1}", json!("open")), 400, "target_prop_states".into()),
        ("/stages/101/acts", json!({"name": ""}), 400, "name: must have 1 to 255".into()),
        ("/stages/101/acts", json!({"revision": 3}), 400, "revision: a new act has none".into()),
        ("/stages/101/acts", json!({"colour": "red"}), 400, "colour".into()),
        ("/stages/102/acts", json!({}), 404, "stage 102".into()),
    ] {
        let refused = http.post(path, body.clone()).await;
        let error = refused.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(refused.status == status && error.contains(&said), "{path} {body}: {} {error}", refused.status);
    }
    for (path, body, status, said) in [
        ("/stages/101/acts/1", json!({"target_prop_states": {}}), 400, "revision".into()),
        ("/stages/101/acts/1", json!({"revision": 1}), 400, "target_prop_states".into()),
        ("/stages/101/acts/1", json!({"target_prop_states": {}, "revision": 2}), 409, "is at revision 1, not 2".into()),
        ("/stages/101/acts/1", json!({"target_prop_states": {}, "revision": 0}), 409, "revision".into()),
        (
            "/stages/101/acts/1",
            json!({"target_prop_states": {"{101, 0, 2}": 1}, "revision": 1}),
            400,
            data_error(1, "{101, 0, 2}"),
        ),
        ("/stages/101/acts/2", json!({"target_prop_states": {}, "revision": 1}), 404, "no act {101, 2, 0}".into()),
        ("/stages/101/acts/x", json!({"target_prop_states": {}, "revision": 1}), 400, "id".into()),
    ] {
        let refused = put(&http, path, body.clone()).await;
        let error = refused.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(refused.status == status && error.contains(&said), "{path} {body}: {} {error}", refused.status);
    }
    for (path, status) in [
        ("/stages/101/props/9", 404),
        ("/stages/101/props/x", 400),
        ("/stages/101/props?limit=0", 400),
        ("/stages/101/props?limit=1001", 400),
        ("/stages/101/acts/9", 404),
        ("/stages/101/acts/9/resolve", 404),
        ("/stages/102/acts/1/resolve", 404),
    ] {
        assert_eq!(http.get(path).await.status, status, "{path}");
    }
    assert_eq!((http.get("/stages/101/props").await.text, http.get("/stages/101/acts/1").await.text), before);
    // Nothing that was refused took an id.
    assert_eq!(register(&http, "BP_Statue").await.json()["prop_id"], 3);
    assert_eq!(http.post("/stages/101/acts", json!({})).await.json()["act_id"], 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_designers_lose_no_edit() {
    const EDITS: i32 = 20;
    let deployment = Deployment::new().await;
    let (one, http) = village(&deployment).await;
    let two = deployment.serve_with(unlimited).await;
    register(&http, "BP_VillageGate").await;
    http.post("/stages/101/acts", json!({})).await;
    // Each adds one to the state that he has read, again and again, through another instance than the other.
    let designer = async |http: Http| {
        let mut conflicts = 0;
        let mut done = 0;
        while done < EDITS {
            let mut act = http.get("/stages/101/acts/1").await.json();
            let state = act["target_prop_states"]["{101, 0, 1}"].as_i64().unwrap_or(0);
            act["target_prop_states"] = json!({"{101, 0, 1}": state + 1});
            let edit = json!({"target_prop_states": act["target_prop_states"], "revision": act["revision"]});
            match put(&http, "/stages/101/acts/1", edit).await.status {
                200 => done += 1,
                409 => conflicts += 1,
                other => panic!("{other}"),
            }
        }
        conflicts
    };
    let conflicts = tokio::join!(designer(one.http()), designer(two.http()), designer(one.http()));
    let act = http.get("/stages/101/acts/1").await.json();
    assert_eq!(act["target_prop_states"]["{101, 0, 1}"], 3 * EDITS, "{conflicts:?}");
    assert_eq!(act["revision"], 1 + 3 * EDITS);
    // One revision is edited at the same time: one wins.
    let race = |index: usize| {
        let http = [one.http(), two.http()][index % 2].clone();
        let edit = json!({"name": format!("by {index}"), "target_prop_states": {}, "revision": 1 + 3 * EDITS});
        async move { put(&http, "/stages/101/acts/1", edit).await.status }
    };
    let outcomes = join_all((0..10).map(race)).await;
    assert_eq!(outcomes.iter().filter(|status| **status == 200).count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().all(|status| [200, 409].contains(status)), "{outcomes:?}");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_come_without_gaps_whoever_asks_and_whoever_is_killed() {
    const PATHS: usize = 600;
    let deployment = Deployment::new().await;
    let spawn = async || deployment.spawn_ready(&["--roles", "stages"]).await;
    let mut processes = [spawn().await, spawn().await];
    let client = deployment.client().await;
    let context = Context { named: Some(Uuid::new_v4().to_string().into()), ..Default::default() };
    client.call_with::<AllocateStage>(&(), &NewStage::default(), &context).await.unwrap();
    let (stage, done) = (name("1"), Arc::new(AtomicUsize::new(0)));
    // Every path is asked for twice, until it is answered.
    let callers: Vec<_> = (0..2 * PATHS)
        .map(|caller| {
            let (client, stage, done) = (client.clone(), stage.clone(), done.clone());
            tokio::spawn(async move {
                let prop = NewProp { path: path(&format!("BP_{}", caller / 2)) };
                loop {
                    let answer = timeout(Duration::from_secs(2), client.register_prop(&stage, &prop)).await;
                    if let Ok(Ok(prop)) = answer {
                        done.fetch_add(1, Ordering::Relaxed);
                        return prop.prop_id;
                    }
                }
            })
        })
        .collect();
    for victim in &mut processes {
        let before = done.load(Ordering::Relaxed);
        eventually("some are answered", async || (done.load(Ordering::Relaxed) > before).then_some(())).await;
        victim.kill();
        *victim = spawn().await;
    }
    let mut ids = Vec::new();
    for caller in callers {
        ids.push(caller.await.unwrap());
    }
    assert!(ids.chunks(2).all(|twins| twins[0] == twins[1]), "one path is one prop: {ids:?}");
    assert_eq!(ids.into_iter().collect::<BTreeSet<i32>>(), (1..=PATHS as i32).collect());
    // A process that knows nothing finds all of it.
    let third = deployment.serve_with(unlimited).await;
    let http = third.http();
    let listed = http.get("/stages/1/props").await.json();
    assert_eq!(listed["props"].as_array().unwrap().len(), PATHS);
    let next = http.post("/stages/1/props", json!({"path": "/Game/Next"})).await;
    assert_eq!(next.json()["prop_id"], 1 + PATHS);
    third.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_idempotent_edits_at_once_than_a_batch_has_messages() {
    const EDITS: usize = 1200;
    let deployment = Deployment::new().await;
    let (server, _) = village(&deployment).await;
    let client = deployment.client().await;
    let stage = name("101");
    let edit = async |number: usize| {
        let context = Context { idempotency_key: Some(number.to_string().parse().unwrap()), ..Default::default() };
        let prop = NewProp { path: path(&number.to_string()) };
        let first = client.call_with::<RegisterProp>(&stage, &prop, &context).await.unwrap();
        let again = client.call_with::<RegisterProp>(&stage, &prop, &context).await.unwrap();
        assert!(!first.repeated && again.repeated && first.prop_id == again.prop_id);
        let other = NewProp { path: path("other") };
        assert_eq!(client.call_with::<RegisterProp>(&stage, &other, &context).await.unwrap_err().code, Code::Conflict);
        first.prop_id
    };
    let ids: BTreeSet<i32> = join_all((0..EDITS).map(edit)).await.into_iter().collect();
    assert_eq!(ids, (1..=EDITS as i32).collect());
    server.stop().await;
}

#[tokio::test]
async fn the_same_edit_many_times_at_once_is_answered_alike() {
    let deployment = Deployment::new().await;
    let (server, http) = village(&deployment).await;
    let http = http.header("idempotency-key", "once");
    let act = http.post("/stages/101/acts", json!({"name": "first"})).await.json();
    let change = json!({"name": "second", "target_prop_states": {}, "revision": act["revision"]});
    let path = format!("/stages/101/acts/{}", act["act_id"]);
    let answers = join_all((0..20).map(|_| put(&http, &path, change.clone()))).await;
    assert!(answers.iter().all(|answer| (answer.status, &answer.text) == (200, &answers[0].text)), "{answers:?}");
    server.stop().await;
}

#[tokio::test]
async fn a_lost_acknowledgement_makes_no_second_prop_or_act() {
    let deployment = Deployment::new().await;
    let proxy = Proxy::before(&deployment.nats_url).await;
    let server = deployment.serve_behind(&proxy).await;
    let http = server.http();
    allocate(&http).await;
    for number in 1..=3 {
        let prop = json!({"path": path(&format!("BP_{number}"))});
        let (made, ()) = tokio::join!(http.post("/stages/1/props", prop), proxy.lose_an_acknowledgement());
        assert_eq!((made.status, &made.json()["prop_id"]), (201, &json!(number)), "{}", made.text);
        let (made, ()) = tokio::join!(http.post("/stages/1/acts", json!({})), proxy.lose_an_acknowledgement());
        assert_eq!((made.status, &made.json()["act_id"]), (201, &json!(number)), "{}", made.text);
    }
    let stage = http.get("/stages/1").await.json();
    assert_eq!((&stage["props"], &stage["acts"]), (&json!(3), &json!(3)));
    server.stop().await;
}

#[tokio::test]
async fn the_same_over_nats() {
    let deployment = Deployment::new().await;
    let (server, http) = village(&deployment).await;
    let client: Client = deployment.client().await;
    let stage = name("101");
    let gate = client.register_prop(&stage, &NewProp { path: path("BP_Gate") }).await.unwrap();
    assert_eq!((gate.key.to_string(), gate.prop_id, gate.repeated), ("{101, 0, 1}".into(), 1, false));
    assert!(client.register_prop(&stage, &NewProp { path: path("BP_Gate") }).await.unwrap().repeated);
    let by_path = OneProp { path: Some(path("BP_Gate")), id: None };
    assert_eq!(client.get_prop(&stage, &by_path).await.unwrap(), gate);
    assert_eq!(client.get_prop(&stage, &OneProp { id: Some(1), path: None }).await.unwrap(), gate);
    let neither = client.get_prop(&stage, &OneProp::default()).await.unwrap_err();
    assert!(neither.code == Code::InvalidRequest && neither.message.starts_with("id:"), "{neither}");
    let Props::Page { props, next: None } = client.list_props(&stage, &PropFilter::default()).await.unwrap() else {
        panic!("a page")
    };
    assert_eq!(props, std::slice::from_ref(&gate));
    let one = PropFilter { path: Some(path("BP_Gate")), ..Default::default() };
    assert_eq!(client.list_props(&stage, &one).await.unwrap(), Props::One(gate.clone()));
    let target_prop_states = [(gate.key, -5)].into();
    let act = NewAct { name: Some("a".into()), target_prop_states, revision: None };
    let act = client.create_act(&stage, &act).await.unwrap();
    assert_eq!((act.key.to_string(), act.revision), ("{101, 1, 0}".into(), 1));
    assert_eq!(client.get_act(&stage, &ActId { id: 1 }).await.unwrap(), act);
    let change = ChangedAct { id: 1, target_prop_states: [(gate.key, 6)].into(), revision: 1, name: None };
    let changed = client.update_act(&stage, &change).await.unwrap();
    assert_eq!((changed.name.as_deref(), changed.revision), (Some("a"), 2), "a name that is not given stays");
    let stale = client.update_act(&stage, &change).await.unwrap_err();
    assert_eq!((stale.code, stale.details.unwrap()["revision"].as_i64()), (Code::Conflict, Some(2)));
    client.unregister_prop(&stage, &PropId { id: 1 }).await.unwrap();
    let resolved = client.resolve_act(&stage, &ActId { id: 1 }).await.unwrap().props;
    assert_eq!((resolved[0].state, resolved[0].registered), (6, false));
    assert_eq!(client.list_acts(&stage, &Default::default()).await.unwrap().acts.len(), 1);

    // A repeated creation makes no second act.
    let once = http.clone().header("idempotency-key", "once");
    let first = once.post("/stages/101/acts", json!({"name": "b"})).await;
    let again = once.post("/stages/101/acts", json!({"name": "b"})).await;
    assert_eq!((first.status, &first.text), (again.status, &again.text));
    assert_eq!(first.json()["act_id"], 2);
    assert_eq!(once.post("/stages/101/acts", json!({"name": "c"})).await.status, 409);
    assert_eq!(http.post("/stages/101/acts", json!({})).await.json()["act_id"], 3);
    server.stop().await;
}

#[tokio::test]
async fn a_broken_record_harms_its_own_stage_only() {
    let deployment = Deployment::new().await;
    let (server, http) = village(&deployment).await;
    allocate(&http).await;
    allocate(&http).await;
    for stage in [101, 102, 103] {
        let made = http.post(&format!("/stages/{stage}/props"), json!({"path": "/Game/A"})).await;
        assert_eq!(made.json()["prop_id"], 1);
    }
    server.stop().await;
    let nats = deployment.nats().await;
    for key in ["101", "102.prop.1"] {
        nats.request(format!("$KV.tm_stage_contents.{key}"), "{".into()).await.unwrap();
    }
    // One that knows nothing has to read it.
    let server = deployment.serve_with(unlimited).await;
    let http = server.http();
    for stage in [101, 102] {
        let broken = http.get(&format!("/stages/{stage}/props")).await;
        assert_eq!((broken.status, &*broken.text), (500, r#"{"error":"An internal server error occurred."}"#));
        assert_eq!(http.post(&format!("/stages/{stage}/props"), json!({"path": "/Game/B"})).await.status, 500);
    }
    assert_eq!(http.post("/stages/103/props", json!({"path": "/Game/B"})).await.json()["prop_id"], 2);
    server.stop().await;
}

#[tokio::test]
async fn a_closed_surface_is_for_minters() {
    let deployment = Deployment::new().await;
    let server = deployment
        .serve_with(|config| {
            unlimited(config);
            config.auth.open_pools_and_stages = false;
        })
        .await;
    let http = server.http();
    let named = http.clone().header("x-request-id", &Uuid::new_v4().to_string());
    assert_eq!(named.post("/stages", json!({})).await.status, 401);
    let key = http.clone().admin().post("/v1/admin/keys", json!({"tenant": "studio", "roles": ["mint"]})).await;
    let minter = named.key(key.json()["key"].as_str().unwrap());
    assert_eq!(minter.post("/stages", json!({})).await.status, 201);
    assert_eq!(minter.post("/stages/1/props", json!({"path": "/Game/A"})).await.status, 201);
    assert_eq!(http.get("/stages/1/props").await.status, 401);
    server.stop().await;
}
