//! What timers promise: never early, never twice, never lost, and every answer true.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use futures::{StreamExt, future::join_all};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tidemark::{
    clock::Clock,
    config::{Config, Secret},
    embedded::Durability,
    server::Server,
};

use crate::{
    support::{API_KEY, Answering, Deployment, Http, Proxy, Receiver, Running, Servers, eventually, past, soon},
    timers::{set, to, until},
};

fn often_swept(config: &mut Config) {
    soon(config);
    config.timers.sweep_interval = Duration::from_secs(1);
}

/// Short times, so that what was left behind is soon found.
fn hasty(config: &mut Config) {
    often_swept(config);
    config.timers.callback_timeout = Duration::from_secs(1);
}

/// The same for a process of its own.
const HASTY: &[(&str, &str)] = &[
    ("TIDEMARK__TIMERS__MIN_DELAY", "0s"),
    ("TIDEMARK__TIMERS__ALLOW_NETWORKS", "127.0.0.0/8"),
    ("TIDEMARK__TIMERS__CALLBACK_TIMEOUT", "1s"),
    ("TIDEMARK__TIMERS__SWEEP_INTERVAL", "1s"),
];

/// Sets many timers at once, and returns their ids.
async fn set_all(http: &Http, timers: Vec<Value>) -> Vec<String> {
    let made = http.post("/timers/bulk", json!({ "timers": timers })).await;
    assert_eq!(made.status, 200, "{}", made.text);
    let results = made.json()["data"]["results"].as_array().unwrap().clone();
    let id = |result: &Value| {
        assert_eq!(result["code"], 0, "{result}");
        result["id"].as_str().unwrap().to_owned()
    };
    results.iter().map(id).collect()
}

fn numbered(receiver: &Receiver, due: DateTime<Utc>, number: usize) -> Value {
    let callback = json!({ "type": "http", "url": format!("{}/x", receiver.url), "payload": number });
    json!({ "execute_at": due, "callback": callback })
}

#[tokio::test]
async fn three_instances_and_doubled_wake_ups_fire_each_timer_once_and_never_early() {
    let deployment = Deployment::new().await;
    let (one, two, three) =
        tokio::join!(deployment.serve_with(hasty), deployment.serve_with(hasty), deployment.serve_with(hasty));
    let receiver = Receiver::start().await;
    let first = Utc::now() + TimeDelta::seconds(7);
    let due = |number: usize| first + TimeDelta::milliseconds(4 * number as i64);
    let timers: Vec<Value> = (0..600).map(|number| numbered(&receiver, due(number), number)).collect();
    for (instance, share) in [&one, &two, &three].iter().zip(timers.chunks(200)) {
        set_all(&instance.http().key(API_KEY), share.to_vec()).await;
    }
    // Every instance is woken, again and again.
    let nats = deployment.nats().await;
    for second in first.timestamp()..=due(599).timestamp() {
        for _ in 0..5 {
            let jetstream = async_nats::jetstream::new(nats.clone());
            jetstream.publish(format!("tm_timers.wake.{second}"), "".into()).await.unwrap().await.unwrap();
        }
    }
    receiver.has(600).await;
    let http = one.http().key(API_KEY);
    eventually("all are completed", async || {
        (http.data("/timers?status=completed&limit=1").await["total"] == 600).then_some(())
    })
    .await;
    let mut seen = HashMap::new();
    for received in receiver.received() {
        let number: usize = serde_json::from_slice(&received.body).unwrap();
        assert!(received.at >= due(number), "{number} was early by {}", due(number) - received.at);
        *seen.entry(number).or_insert(0) += 1;
    }
    assert!((0..600).all(|number| seen.get(&number) == Some(&1)), "{seen:?}");
    for instance in [one, two, three] {
        instance.stop().await;
    }
    assert_eq!(receiver.received().len(), 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_races_the_fire_is_answered_truly() {
    let deployment = Deployment::new().await;
    let (one, two) = tokio::join!(deployment.serve_with(soon), deployment.serve_with(soon));
    let http = one.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::seconds(2);
    let timers: Vec<Value> =
        (0..1000).map(|number| numbered(&receiver, due + TimeDelta::milliseconds(4 * number as i64), number)).collect();
    let ids = set_all(&http, timers).await;
    let callers = [one.http().key(API_KEY), two.http().key(API_KEY)];
    let cancel = |(number, id): (usize, &String)| {
        let (http, path) = (callers[number % 2].clone(), format!("/timers/{id}"));
        async move {
            // Around the very moment at which it is due.
            let moment = due + TimeDelta::milliseconds(4 * number as i64 + rand::random_range(-8..=4));
            past(moment).await;
            let mut in_doubt = false;
            loop {
                let answer = http.delete(&path).await;
                let message = answer.json()["message"].as_str().unwrap().to_owned();
                match answer.status {
                    200 => return true,
                    // A machine that is too busy says so; then it is asked again.
                    503 => in_doubt = true,
                    400 if message == "cannot cancel timer with status 'canceled'" => {
                        assert!(in_doubt, "canceled by nobody");
                        return true;
                    }
                    400 => {
                        let known = ["executing", "completed"];
                        let known = known.map(|status| format!("cannot cancel timer with status '{status}'"));
                        assert!(known.contains(&message), "{message}");
                        return false;
                    }
                    other => panic!("{other}: {}", answer.text),
                }
            }
        }
    };
    let canceled: Vec<bool> = join_all(ids.iter().enumerate().map(cancel)).await;
    let count = canceled.iter().filter(|canceled| **canceled).count();
    assert!((1..1000).contains(&count), "there was no race: {count} canceled");
    receiver.has(1000 - count).await;
    eventually("nothing is under way", async || {
        (http.data("/timers?status=executing").await["total"] == 0).then_some(())
    })
    .await;
    assert_eq!(http.data("/timers?status=canceled&limit=1").await["total"], count);
    assert_eq!(http.data("/timers?status=completed&limit=1").await["total"], 1000 - count);
    // Whoever still holds one of them in memory lets go of it by then.
    one.stop().await;
    two.stop().await;
    let fired: Vec<usize> =
        receiver.received().iter().map(|received| serde_json::from_slice(&received.body).unwrap()).collect();
    let unique: HashSet<usize> = fired.iter().copied().collect();
    assert_eq!(unique.len(), fired.len(), "a timer fired twice");
    for (number, canceled) in canceled.into_iter().enumerate() {
        assert_ne!(unique.contains(&number), canceled, "timer {number}: fired and canceled, or neither");
    }
}

#[tokio::test]
async fn a_process_that_dies_while_it_calls_back_is_found_out() {
    let deployment = Deployment::new().await;
    let mut doomed = deployment.spawn_with(HASTY);
    let http = doomed.http().await.key(API_KEY);
    doomed.is_ready().await;
    // One never gets as far as a request; the other has it, and answers after the death of the caller.
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let deaf_url = format!("http://{}/", deaf.local_addr().unwrap());
    let receiver = Receiver::start().await;
    receiver.hold();
    let retry = json!({ "max_attempts": 3, "initial_delay": "10ms" });
    let mut timers = Vec::new();
    for callback in [json!({ "type": "http", "url": deaf_url }), to(&receiver, "x")] {
        timers.push(set(&http, json!({ "execute_in": "10ms", "callback": callback })).await["id"].clone());
        timers.push(
            set(&http, json!({ "execute_in": "10ms", "callback": callback, "retry": retry })).await["id"].clone(),
        );
    }
    receiver.has(2).await;
    for id in &timers {
        until(&http, id, "executing").await;
    }
    doomed.kill();
    receiver.let_go();

    let survivor = deployment.serve_with(hasty).await;
    let http = survivor.http().key(API_KEY);
    for single in [&timers[0], &timers[2]] {
        let failed = until(&http, single, "failed").await;
        assert!(failed["last_error"].as_str().unwrap().starts_with("outcome unknown"), "{failed}");
        assert_eq!(failed["attempts"], 1);
    }
    // With attempts left it is tried again; the receiver knows it by its id.
    let repeated = until(&http, &timers[3], "completed").await;
    assert_eq!(repeated["attempts"], 2, "{repeated}");
    let failed = until(&http, &timers[1], "failed").await;
    assert_eq!(failed["attempts"], 3, "{failed}");
    let received = receiver.received();
    assert_eq!(received.len(), 3, "{received:?}");
    let id = timers[3].as_str().unwrap();
    let ours: Vec<&str> =
        received.iter().map(|one| one.header("webhook-id")).filter(|webhook| webhook.starts_with(id)).collect();
    assert_eq!(ours, [format!("{id}.1"), format!("{id}.1")]);
    drop(deaf);
}

#[tokio::test]
async fn timers_that_were_due_while_everything_was_down_fire_once_when_it_is_back() {
    let mut servers = Servers::start_with("timers", Durability::Synced).await;
    let deployment = servers.deployment().await;
    let running = deployment.serve_with(hasty).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    // Kept by a stream: our own connection may come back later than the callback is made.
    let jetstream = async_nats::jetstream::new(deployment.nats().await);
    let config = async_nats::jetstream::stream::Config {
        name: "HEARD".into(),
        subjects: vec!["heard.>".into()],
        ..Default::default()
    };
    let mut heard = jetstream.create_stream(config).await.unwrap();
    let due = Utc::now() + TimeDelta::seconds(2);
    let on_nats = json!({ "execute_at": due, "callback": { "type": "nats", "topic": "heard.x" } });
    let ids = set_all(&http, vec![numbered(&receiver, due, 1), on_nats.clone()]).await;
    // A far one is not in anybody's memory.
    let far = due + TimeDelta::seconds(5);
    let ids: Vec<String> = ids.into_iter().chain(set_all(&http, vec![numbered(&receiver, far, 2)]).await).collect();
    servers.nats.kill();
    servers.postgres.kill();
    let refused = http.post("/timers", on_nats.clone()).await;
    assert_eq!((refused.status, &refused.json()["code"]), (503, &json!(1)), "{}", refused.text);
    past(far).await;
    assert!(receiver.received().is_empty());
    // HTTP callbacks need no NATS.
    servers.postgres.restart().await.unwrap();
    receiver.has(2).await;
    servers.nats.restart().await.unwrap();
    for id in &ids {
        let timer = until(&http, &json!(id), "completed").await;
        assert!(timer["late_by_ms"].as_i64().unwrap() > 0, "{timer}");
    }
    running.stop().await;
    assert_eq!(receiver.received().len(), 2);
    assert_eq!(heard.info().await.unwrap().state.messages, 1);
}

#[tokio::test]
async fn lost_schedules_are_found_by_the_sweep() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(hasty).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    // Too far ahead to be kept in memory.
    let due = Utc::now() + TimeDelta::seconds(8);
    let timer = set(&http, numbered(&receiver, due, 1)).await;
    let jetstream = async_nats::jetstream::new(deployment.nats().await);
    let stream = jetstream.get_stream("tm_TIMERS").await.unwrap();
    let second = format!("tm_timers.arm.{}", due.timestamp());
    eventually("its second is armed", async || stream.get_last_raw_message_by_subject(&second).await.ok()).await;
    stream.purge().filter(second.as_str()).await.unwrap();
    assert!(stream.get_last_raw_message_by_subject(&second).await.is_err());
    let received = receiver.has(1).await;
    assert!(received[0].at >= due);
    until(&http, &timer["id"], "completed").await;

    // Even the whole stream may go.
    let timer = set(&http, numbered(&receiver, Utc::now() + TimeDelta::seconds(8), 2)).await;
    jetstream.delete_stream("tm_TIMERS").await.unwrap();
    receiver.has(2).await;
    until(&http, &timer["id"], "completed").await;
    running.stop().await;
}

#[tokio::test]
async fn overdue_timers_fire_at_the_start_and_a_stop_leaves_nothing_half_done() {
    let deployment = Deployment::new().await;
    // Nothing but the start can find them.
    let patient = |config: &mut Config| {
        soon(config);
        config.timers.sweep_interval = Duration::from_secs(3600);
    };
    let first = deployment.serve_with(patient).await;
    let http = first.http().key(API_KEY);
    let receiver = Receiver::start().await;
    receiver.hold();
    let slow = set(&http, json!({ "execute_in": "10ms", "callback": to(&receiver, "slow") })).await;
    let due = Utc::now() + TimeDelta::seconds(1);
    let late = set(&http, json!({ "execute_at": due, "callback": to(&receiver, "late") })).await;
    receiver.has(1).await;
    tokio::join!(first.stop(), async { receiver.let_go() });
    past(due).await;
    assert_eq!(receiver.received().len(), 1);
    let second = deployment.serve_with(patient).await;
    let http = second.http().key(API_KEY);
    assert_eq!(until(&http, &slow["id"], "completed").await["attempts"], 1);
    until(&http, &late["id"], "completed").await;
    assert_eq!(receiver.received().len(), 2);
    second.stop().await;
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_looked_up() {
    let deployment = Deployment::new().await;
    let proxy = Proxy::before(&deployment.database_url).await;
    let url = Secret::new(&*proxy.url);
    let running = deployment
        .serve_with(|config| {
            soon(config);
            config.database.url = Some(url);
        })
        .await;
    let http = running.http().key(API_KEY);
    let timer =
        json!({ "execute_in": "1h", "callback": { "type": "nats", "topic": "a.b" }, "idempotency_key": "once" });
    let (made, ()) = tokio::join!(http.post("/timers", timer.clone()), proxy.lose_an_acknowledgement());
    // It was committed and nobody said so; it is ours all the same, and there is one.
    assert_eq!(made.status, 201, "{}", made.text);
    let again = http.post("/timers", timer).await;
    assert_eq!((again.status, &again.json()["data"]["id"]), (200, &made.json()["data"]["id"]));
    assert_eq!(http.data("/timers").await["total"], 1);
}

#[tokio::test]
async fn one_slow_receiver_delays_nobody_else() {
    let deployment = Deployment::new().await;
    let running = deployment
        .serve_with(|config| {
            soon(config);
            config.timers.concurrency_per_destination = 2;
            config.timers.concurrency = 4;
        })
        .await;
    let http = running.http().key(API_KEY);
    let (slow, quick) = (Receiver::start().await, Receiver::start().await);
    slow.hold();
    let due = Utc::now() + TimeDelta::milliseconds(200);
    let mut timers: Vec<Value> = (0..6).map(|number| numbered(&slow, due, number)).collect();
    timers.extend((0..20).map(|number| numbered(&quick, due + TimeDelta::milliseconds(50), number)));
    set_all(&http, timers).await;
    quick.has(20).await;
    assert!(slow.received().len() <= 2, "{} at once", slow.received().len());
    slow.let_go();
    slow.has(6).await;
}

#[tokio::test]
async fn timers_that_are_changed_leave_no_room_behind() {
    let deployment = Deployment::new().await;
    let running = deployment
        .serve_with(|config| {
            soon(config);
            config.timers.concurrency_per_destination = 2;
        })
        .await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::seconds(2);
    let ids = set_all(&http, (0..40).map(|number| numbered(&receiver, due, number)).collect()).await;
    // Each now waits twice, and is asked for twice.
    for id in &ids {
        let moved = json!({ "execute_at": due - TimeDelta::milliseconds(1) });
        assert_eq!(crate::timers::put(&http, &format!("/timers/{id}"), moved).await.0, 200);
    }
    receiver.has(40).await;
    let more = set_all(
        &http,
        (0..40).map(|number| numbered(&receiver, Utc::now() + TimeDelta::milliseconds(500), number)).collect(),
    );
    assert_eq!(more.await.len(), 40);
    receiver.has(80).await;
    running.stop().await;
    assert_eq!(receiver.received().len(), 80);
}

#[tokio::test]
async fn changes_that_race_the_runs_of_a_recurring_timer_neither_lose_nor_add_one() {
    let deployment = Deployment::new().await;
    let (one, two) = tokio::join!(deployment.serve_with(soon), deployment.serve_with(soon));
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::milliseconds(500);
    let recurring =
        json!({ "execute_at": due, "callback": to(&receiver, "x"), "recurrence": { "every": "1s", "count": 4 } });
    let timer = set(&one.http().key(API_KEY), recurring).await;
    let path = format!("/timers/{}", timer["id"].as_str().unwrap());
    let hammer = async |http: Http| {
        while receiver.received().len() < 4 {
            let (status, answer) = crate::timers::put(&http, &path, json!({ "metadata": { "a": 1 } })).await;
            assert!(matches!(status, 200 | 400 | 409), "{answer}");
        }
    };
    tokio::join!(hammer(one.http().key(API_KEY)), hammer(two.http().key(API_KEY)));
    until(&one.http().key(API_KEY), &timer["id"], "completed").await;
    one.stop().await;
    two.stop().await;
    let runs: Vec<String> = receiver.received().iter().map(|one| one.header("webhook-id").to_owned()).collect();
    let expected: Vec<String> = (1..=4).map(|run| format!("{}.{run}", timer["id"].as_str().unwrap())).collect();
    assert_eq!(runs, expected);
    for (run, received) in receiver.received().iter().enumerate() {
        assert!(received.at >= due + TimeDelta::seconds(run as i64), "run {run} was early");
    }
}

/// A timer whose callback has come, and is not answered before the receiver is let go.
async fn called(http: &Http, receiver: &Receiver, mut timer: Value) -> Value {
    receiver.hold();
    timer["execute_in"] = json!("5ms");
    timer["callback"] = to(receiver, "x");
    let timer = set(http, timer).await;
    receiver.has(1).await;
    timer
}

#[tokio::test]
async fn what_is_known_after_all_wins_over_what_was_not() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(often_swept).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let timer = called(&http, &receiver, json!({})).await;
    until(&http, &timer["id"], "executing").await;
    // As if PostgreSQL had been away for longer than the claim lasts.
    let expire = sqlx::query("update timers set claim_until = now() - interval '1 second'");
    expire.execute(&deployment.database().await).await.unwrap();
    let failed = until(&http, &timer["id"], "failed").await;
    assert!(failed["last_error"].as_str().unwrap().starts_with("outcome unknown"), "{failed}");
    receiver.let_go();
    let done = until(&http, &timer["id"], "completed").await;
    assert_eq!((&done["last_error"], &done["attempts"]), (&Value::Null, &json!(1)));
    let attempts = http.data(&format!("/timers/{}/attempts", timer["id"].as_str().unwrap())).await["attempts"].clone();
    assert_eq!((attempts.as_array().unwrap().len(), &attempts[0]["status"]), (1, &json!("completed")));
}

#[tokio::test]
async fn an_outcome_that_comes_late_does_not_undo_a_change() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(often_swept).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let timer = called(&http, &receiver, json!({ "recurrence": { "every": "1h" } })).await;
    until(&http, &timer["id"], "executing").await;
    let database = deployment.database().await;
    sqlx::query("update timers set claim_until = now() - interval '1 second'").execute(&database).await.unwrap();
    let path = format!("/timers/{}", timer["id"].as_str().unwrap());
    eventually("it is taken for abandoned", async || (http.data(&path).await["run"] == 2).then_some(())).await;
    let moved = http.put_json(&path, json!({ "execute_in": "3h" })).await.json()["data"]["execute_at"].clone();
    receiver.let_go();
    // Another one, so that what came before it has been written.
    let next = set(&http, json!({ "execute_in": "5ms", "callback": to(&receiver, "next") })).await;
    until(&http, &next["id"], "completed").await;
    assert_eq!(http.data(&path).await["execute_at"], moved);
    running.stop().await;
}

#[tokio::test]
async fn an_outcome_is_written_when_it_can_be_whatever_was_in_the_way() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(soon).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let timer = called(&http, &receiver, json!({})).await;
    let database = deployment.database().await;
    // As a server is while another takes its place.
    for statement in [
        "create sequence tried",
        "create function refuse() returns trigger language plpgsql as $$
         begin perform nextval('tried'); raise exception 'read-only' using errcode = '25006'; end $$",
        "create trigger refuse before insert on timer_attempts for each row execute function refuse()",
    ] {
        sqlx::query(statement).execute(&database).await.unwrap();
    }
    receiver.let_go();
    eventually("it was tried again", async || {
        let tried: i64 = sqlx::query_scalar("select last_value from tried").fetch_one(&database).await.unwrap();
        (tried > 2).then_some(())
    })
    .await;
    sqlx::query("drop trigger refuse on timer_attempts").execute(&database).await.unwrap();
    assert_eq!(until(&http, &timer["id"], "completed").await["attempts"], 1);
    assert_eq!(receiver.received().len(), 1);
    running.stop().await;
}

#[tokio::test]
async fn who_deletes_a_timer_and_takes_his_time_keeps_nobody_else_waiting() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(soon).await;
    let http = running.http().key(API_KEY);
    let later = |key: &str| json!({ "execute_in": "1h", "callback": { "type": "nats", "topic": "a.b" }, "idempotency_key": key });
    set(&http, later("one")).await;
    let database = deployment.database().await;
    let mut held = database.begin().await.unwrap();
    sqlx::query("delete from timers").execute(&mut *held).await.unwrap();
    let many = json!({ "timers": [later("other"), later("one"), later("another")] });
    let results = http.post("/timers/bulk", many).await.json()["data"]["results"].clone();
    let set = results.as_array().unwrap().iter().map(|result| result["id"].is_string()).collect::<Vec<_>>();
    assert_eq!(set, [true, false, true], "{results}");
    held.rollback().await.unwrap();
    assert_eq!(http.post("/timers", later("one")).await.status, 200);
    running.stop().await;
}

/// A transaction that holds a timer's row.
async fn hold(database: &sqlx::PgPool, id: &str) -> sqlx::Transaction<'static, sqlx::Postgres> {
    let mut held = database.begin().await.unwrap();
    sqlx::query("select from timers where id = $1::uuid for update").bind(id).execute(&mut *held).await.unwrap();
    held
}

/// The statements that wait for a lock: since when.
async fn who_waits_for_locks(database: &sqlx::PgPool) -> Vec<DateTime<Utc>> {
    let waiting = "select query_start from pg_stat_activity
         where datname = current_database() and wait_event_type = 'Lock'";
    sqlx::query_scalar(waiting).fetch_all(database).await.unwrap()
}

#[tokio::test]
async fn a_row_that_somebody_holds_costs_no_more_than_one_connection() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(soon).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let timer = called(&http, &receiver, json!({})).await;
    let database = deployment.database().await;
    let held = hold(&database, timer["id"].as_str().unwrap()).await;
    receiver.let_go();
    let waits = async || {
        let waiting = who_waits_for_locks(&database).await;
        assert!(waiting.len() <= 1, "{waiting:?}");
        waiting.first().copied()
    };
    let first = eventually("its outcome waits", waits).await;
    eventually("it is tried again", async || waits().await.filter(|since| *since != first)).await;
    held.rollback().await.unwrap();
    until(&http, &timer["id"], "completed").await;
    running.stop().await;
}

/// What the sweep takes for abandoned may be written in one statement with what became of it after all.
#[tokio::test]
async fn what_is_known_in_time_is_told_alone() {
    let deployment = Deployment::new().await;
    let mut process = deployment.spawn_with(&[HASTY, &[("TIDEMARK__TIMERS__CALLBACK_TIMEOUT", "30s")]].concat());
    let http = process.http().await.key(API_KEY);
    process.is_ready().await;
    let mut told = deployment.client().await.follow("timer.default.>").await.unwrap();
    let (before, receiver) = (Receiver::start().await, Receiver::start().await);
    receiver.answer([Answering::status(418)]);
    let mut ids = Vec::new();
    for receiver in [&before, &receiver] {
        receiver.hold();
        let timer = set(&http, json!({ "execute_in": "5ms", "callback": to(receiver, "x") })).await;
        receiver.has(1).await;
        until(&http, &timer["id"], "executing").await;
        ids.push(timer["id"].as_str().unwrap().to_owned());
    }
    // Outcomes wait behind that of the first timer.
    let database = deployment.database().await;
    let held = hold(&database, &ids[0]).await;
    before.let_go();
    eventually("the outcome of the first one waits", async || {
        (!who_waits_for_locks(&database).await.is_empty()).then_some(())
    })
    .await;
    let expire = sqlx::query("update timers set claim_until = now() - interval '1 second' where id = $1::uuid");
    expire.bind(&ids[1]).execute(&database).await.unwrap();
    process.prints("a process left this timer").await;
    receiver.let_go();
    process.prints("a callback failed").await;
    held.rollback().await.unwrap();
    let failed = until(&http, &json!(ids[1]), "failed").await;
    assert_eq!(failed["last_error"], "HTTP 418");
    process.signal(Signal::SIGTERM);
    let (code, printed) = process.ended().await;
    assert_eq!(code, Some(0));
    assert!(!printed.contains("\"ERROR\""), "{printed}");
    told.drain().await.unwrap();
    let facts: Vec<Value> = told.map(|fact| serde_json::from_slice(&fact.payload).unwrap()).collect().await;
    let told_of =
        |id: &str| facts.iter().filter(|fact| fact["id"] == id).map(|fact| &fact["error"]).collect::<Vec<_>>();
    assert_eq!((told_of(&ids[0]), told_of(&ids[1])), (vec![&Value::Null], vec![&json!("HTTP 418")]));
}

#[tokio::test]
async fn a_broken_row_and_an_answer_that_can_not_be_kept_harm_nobody_else() {
    let deployment = Deployment::new().await;
    let http = deployment.serve_with(soon).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::seconds(1);
    let ids = set_all(&http, (0..3).map(|number| numbered(&receiver, due, number)).collect()).await;
    let broken = sqlx::query(r#"update timers set options = '{"retry": 5}' where id = $1::uuid"#).bind(&ids[1]);
    broken.execute(&deployment.database().await).await.unwrap();
    receiver.has(2).await;
    for id in [&ids[0], &ids[2]] {
        until(&http, &json!(id), "completed").await;
    }
    let status = async || -> String {
        let status = sqlx::query_scalar("select status from timers where id = $1::uuid").bind(&ids[1]);
        status.fetch_one(&deployment.database().await).await.unwrap()
    };
    eventually("the broken one has failed", async || (status().await == "failed").then_some(())).await;

    receiver.answer([Answering { body: r#"{"\u0000": 1}"#.into(), ..Answering::status(200) }]);
    let strict = json!({ "schema": { "additionalProperties": false } });
    let timer = set(&http, json!({ "execute_in": "5ms", "callback": to(&receiver, "x"), "expect": strict })).await;
    let failed = until(&http, &timer["id"], "failed").await;
    assert!(failed["last_error"].as_str().unwrap().contains("expect.schema"), "{failed}");
    let timer = set(&http, json!({ "execute_in": "5ms", "callback": to(&receiver, "x") })).await;
    until(&http, &timer["id"], "completed").await;
}

#[tokio::test]
async fn an_instance_whose_clock_is_wrong_is_neither_early_nor_lost() {
    let deployment = Deployment::new().await;
    let skewed = async |ahead: TimeDelta| {
        let mut config = deployment.config();
        hasty(&mut config);
        let mut server = Server::bind(config).await.unwrap();
        server.clock = Clock::ahead(ahead);
        Running::start(server).await
    };
    let receiver = Receiver::start().await;
    for (number, ahead) in [TimeDelta::seconds(20), TimeDelta::seconds(-2)].into_iter().enumerate() {
        // Set by one whose clock is right, and fired by the other.
        let right = deployment.serve_with(hasty).await;
        let due = Utc::now() + TimeDelta::seconds(4);
        set(&right.http().key(API_KEY), numbered(&receiver, due, number)).await;
        right.stop().await;
        let wrong = skewed(ahead).await;
        let received = receiver.has(number + 1).await;
        assert!(received[number].at >= due, "early by {}", due - received[number].at);
        wrong.stop().await;
    }
}

#[tokio::test]
async fn far_timers_are_armed_when_they_come_near() {
    let deployment = Deployment::new().await;
    let running = deployment
        .serve_with(|config| {
            hasty(config);
            config.timers.near_window = Duration::from_secs(2);
        })
        .await;
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::seconds(9);
    let timer = set(&running.http().key(API_KEY), numbered(&receiver, due, 1)).await;
    let jetstream = async_nats::jetstream::new(deployment.nats().await);
    let stream = jetstream.get_stream("tm_TIMERS").await.unwrap();
    let second = format!("tm_timers.arm.{}", due.timestamp());
    assert!(stream.get_last_raw_message_by_subject(&second).await.is_err(), "a far timer costs JetStream nothing");
    eventually("its second is armed", async || stream.get_last_raw_message_by_subject(&second).await.ok()).await;
    assert!(Utc::now() < due);
    receiver.has(1).await;
    until(&running.http().key(API_KEY), &timer["id"], "completed").await;
}

#[tokio::test]
async fn a_change_that_was_read_before_a_run_and_written_after_it_does_not_bring_the_run_back() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(soon).await;
    let http = running.http().key(API_KEY);
    let recurring = json!({ "callback": { "type": "nats", "topic": "a.b" }, "recurrence": { "every": "1h" } });
    let timer = set(&http, recurring).await;
    let path = format!("/timers/{}", timer["id"].as_str().unwrap());
    // Holds the row between the change's reading and its writing, and does what a run would.
    let database = deployment.database().await;
    let mut run = database.begin().await.unwrap();
    sqlx::query("select 1 from timers for update").execute(&mut *run).await.unwrap();
    let changing = {
        let (http, path) = (http.clone(), path.clone());
        tokio::spawn(async move { crate::timers::put(&http, &path, json!({ "metadata": { "a": 1 } })).await })
    };
    eventually("the change waits for the row", async || {
        let waiting =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
        let count: i64 = sqlx::query_scalar(waiting).fetch_one(&database).await.unwrap();
        (count > 0).then_some(())
    })
    .await;
    let next =
        "update timers set run = 2, execute_at = execute_at + interval '1 hour', due_at = due_at + interval '1 hour'";
    sqlx::query(next).execute(&mut *run).await.unwrap();
    run.commit().await.unwrap();
    assert_eq!(changing.await.unwrap().0, 200);
    let changed = http.data(&path).await;
    let at = |timer: &Value| timer["execute_at"].as_str().unwrap().parse::<DateTime<Utc>>().unwrap();
    assert_eq!(at(&changed), at(&timer) + TimeDelta::hours(1), "{changed}");
    assert_eq!((&changed["run"], &changed["metadata"]), (&json!(2), &json!({ "a": 1 })));
}

#[tokio::test]
async fn lateness_is_said_and_old_attempts_are_forgotten() {
    let deployment = Deployment::new().await;
    let first = deployment.serve_with(soon).await;
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::milliseconds(500);
    let timer = set(&first.http().key(API_KEY), numbered(&receiver, due, 1)).await;
    first.stop().await;
    let late = due + TimeDelta::milliseconds(1200);
    past(late).await;
    let mut process = deployment.spawn_with(&[HASTY, &[("TIDEMARK__TIMERS__ATTEMPTS_KEPT", "1s")]].concat());
    process.prints("timers fire late").await;
    let http = process.http().await.key(API_KEY);
    process.is_ready().await;
    until(&http, &timer["id"], "completed").await;
    eventually("its attempt is forgotten", async || {
        let path = format!("/timers/{}/attempts", timer["id"].as_str().unwrap());
        http.data(&path).await["attempts"].as_array().unwrap().is_empty().then_some(())
    })
    .await;
}
