//! What the seed left for later: recurrence, retries, lateness, idempotency, bulk, tenants, capture, checks, secrets.

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use futures::{StreamExt, future::join_all};
use serde_json::{Value, json};
use tidemark::clock::Clock;

use crate::{
    support::{API_KEY, Answering, Deployment, Http, Receiver, eventually, past, soon, time},
    timers::{put, serve, set, to, until, with},
};

fn path(timer: &Value) -> String {
    format!("/timers/{}", timer["id"].as_str().unwrap())
}

/// A POST without a body that must succeed, and its data.
async fn post(http: &Http, path: String) -> Value {
    let answer = http.send(reqwest::Method::POST, &path, None).await;
    assert_eq!(answer.status, 200, "{path}: {}", answer.text);
    answer.json()["data"].clone()
}

#[tokio::test]
async fn a_recurring_timer_runs_to_its_count_and_shows_what_comes_next() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    receiver.answer([Answering::status(200), Answering::status(500)]);
    let due = Utc::now() + TimeDelta::milliseconds(300);
    let recurrence = json!({ "every": "1s", "count": 3 });
    let timer =
        set(&http, json!({ "execute_at": due, "callback": to(&receiver, "x"), "recurrence": recurrence })).await;
    let later =
        set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "x"), "recurrence": recurrence })).await;
    assert_eq!(http.data(&path(&later)).await["next_run_at"], later["execute_at"]);
    let received = receiver.has(3).await;
    for (run, one) in received.iter().enumerate() {
        let at = due + TimeDelta::seconds(run as i64);
        assert!(one.at >= at, "run {run} was early");
        assert_eq!(one.header("webhook-id"), format!("{}.{}", timer["id"].as_str().unwrap(), run + 1));
    }
    // A failed run does not end it.
    let done = until(&http, &timer["id"], "completed").await;
    assert_eq!((&done["run"], &done["next_run_at"]), (&json!(3), &Value::Null), "{done}");
    let attempts = http.data(&format!("{}/attempts", path(&timer))).await["attempts"].clone();
    let told: Vec<_> =
        attempts.as_array().unwrap().iter().map(|one| (one["run"].clone(), one["status"].clone())).collect();
    let expected = [(3, "completed"), (2, "failed"), (1, "completed")].map(|(run, status)| (json!(run), json!(status)));
    assert_eq!(told, expected);

    // Or to its last moment, which is still one.
    let due = (Utc::now() + TimeDelta::milliseconds(300)).trunc_subsecs(6);
    let recurrence = json!({ "every": "1s", "until": due + TimeDelta::seconds(1) });
    let timer =
        set(&http, json!({ "execute_at": due, "callback": to(&receiver, "x"), "recurrence": recurrence })).await;
    assert_eq!(until(&http, &timer["id"], "completed").await["run"], 2);
    assert_eq!(receiver.received().len(), 5);
}

#[tokio::test]
async fn a_recurring_timer_is_paused_resumed_fired_and_canceled() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let hourly = json!({ "callback": to(&receiver, "x"), "recurrence": { "cron": "0 0 * * * *" } });
    let timer = set(&http, hourly.clone()).await;
    let next: DateTime<Utc> = timer["execute_at"].as_str().unwrap().parse().unwrap();
    assert_eq!((next.timestamp() % 3600, next.timestamp_subsec_nanos()), (0, 0));
    assert_eq!(post(&http, format!("{}/pause", path(&timer))).await["status"], "paused");
    let refused = http.post(&format!("{}/pause", path(&timer)), json!({})).await;
    assert_eq!(refused.json()["message"], "cannot pause timer with status 'paused'");
    let refused = http.post(&format!("{}/fire", path(&timer)), json!({})).await;
    assert_eq!(refused.json()["message"], "cannot fire timer with status 'paused'");
    let resumed = post(&http, format!("{}/resume", path(&timer))).await;
    assert_eq!((&resumed["status"], &resumed["execute_at"]), (&json!("pending"), &timer["execute_at"]));

    // Fired now, it goes on as it would have.
    post(&http, format!("{}/fire", path(&timer))).await;
    receiver.has(1).await;
    let after = eventually("it waits again", async || {
        let timer = http.data(&path(&timer)).await;
        (timer["status"] == "pending" && timer["run"] == 2).then_some(timer)
    })
    .await;
    assert_eq!(after["execute_at"], timer["execute_at"]);

    // Canceled while it fires, the run ends and there is no other.
    receiver.hold();
    post(&http, format!("{}/fire", path(&timer))).await;
    receiver.has(2).await;
    let canceled = http.delete(&path(&timer)).await;
    assert_eq!(canceled.status, 200, "{}", canceled.text);
    assert_eq!(canceled.json()["data"]["status"], "executing");
    assert!(canceled.json()["data"]["note"].is_string(), "{}", canceled.text);
    receiver.let_go();
    assert_eq!(until(&http, &timer["id"], "canceled").await["run"], 3);

    let once = set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "once") })).await;
    let refused = http.post(&format!("{}/pause", path(&once)), json!({})).await;
    assert_eq!((refused.status, &refused.json()["message"]), (400, &json!("cannot pause timer that does not recur")));
    let fired = post(&http, format!("{}/fire", path(&once))).await;
    assert_eq!(fired["status"], "pending");
    receiver.has(3).await;
    assert!(until(&http, &once["id"], "completed").await["late_by_ms"].as_i64().unwrap() < 2000);
}

#[tokio::test]
async fn another_rhythm_begins_no_sooner_than_was_asked() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let change = async |timer: &Value, change: Value| {
        let changed = http.put_json(&path(timer), change).await;
        assert_eq!(changed.status, 200, "{}", changed.text);
        changed.json()["data"]["execute_at"].clone()
    };
    let every = |every: &str, count: u32| json!({ "recurrence": { "every": every, "count": count } });
    let asked =
        set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "x"), "recurrence": { "every": "10s" } }))
            .await;
    assert_eq!(change(&asked, every("10s", 6)).await, asked["execute_at"]);
    assert_eq!(change(&asked, every("1s", 6)).await, asked["execute_at"]);
    assert_eq!(change(&asked, json!({ "timezone": "Europe/Berlin" })).await, asked["execute_at"]);
    let refused = http.put_json(&path(&asked), json!({ "recurrence": { "every": "1s", "until": Utc::now() } })).await;
    assert!(refused.status == 400 && refused.text.contains("recurrence.until"), "{}", refused.text);
    // One that was to run once.
    let once = set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "x") })).await;
    assert_eq!(change(&once, every("1s", 2)).await, once["execute_at"]);
    // Where nothing was asked for, the rhythm alone decides, and its end alone changes nothing.
    let yearly = set(&http, json!({ "callback": to(&receiver, "x"), "recurrence": { "cron": "0 0 0 1 1 *" } })).await;
    let counted = json!({ "recurrence": { "cron": "0 0 0 1 1 *", "count": 3 } });
    assert_eq!(change(&yearly, counted).await, yearly["execute_at"]);
    let hourly: DateTime<Utc> = serde_json::from_value(change(&yearly, every("1h", 2)).await).unwrap();
    assert!(hourly < Utc::now() + TimeDelta::hours(1));
    // A second that few clocks show is the one after it.
    let leap = set(&http, json!({ "execute_at": "2030-06-30T23:59:60Z", "callback": to(&receiver, "x") })).await;
    assert_eq!(leap["execute_at"], "2030-07-01T00:00:00Z");
    assert!(receiver.received().is_empty());
}

#[tokio::test]
async fn a_pause_does_not_bring_back_what_was_canceled() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    receiver.answer([Answering::status(500)]);
    receiver.hold();
    let retry = json!({ "max_attempts": 2, "initial_delay": "1h", "max_delay": "1h" });
    let hourly = json!({ "every": "1h" });
    let timer = set(
        &http,
        json!({ "execute_in": "10ms", "callback": to(&receiver, "x"), "recurrence": hourly, "retry": retry }),
    )
    .await;
    receiver.has(1).await;
    assert_eq!(http.delete(&path(&timer)).await.status, 200);
    receiver.let_go();
    eventually("its second attempt waits", async || {
        (http.data(&path(&timer)).await["status"] == "pending").then_some(())
    })
    .await;
    let refused = http.post(&format!("{}/pause", path(&timer)), json!({})).await;
    assert_eq!(
        (refused.status, &refused.json()["message"]),
        (400, &json!("cannot pause timer that is canceled after this run"))
    );
    post(&http, format!("{}/fire", path(&timer))).await;
    until(&http, &timer["id"], "canceled").await;
}

#[tokio::test]
async fn clocks_that_are_set_decide_when_a_timer_runs() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2026-03-28T12:00:00Z"));
    let http = deployment.serve_by(&clock).await.http().key(API_KEY);
    let callback = json!({ "type": "nats", "topic": "a.b" });
    let planned = async |more: Value| {
        let made = http.post("/timers", with(json!({ "callback": callback }), &more)).await;
        made.json()["data"]["execute_at"].as_str().map(str::to_owned).unwrap_or(made.text)
    };
    let cron = |text: &str, zone: &str| json!({ "recurrence": { "cron": text }, "timezone": zone });
    // Both directions in three zones: the hour that is skipped fires at its end, the one that is repeated once.
    for (now, timer, expected) in [
        ("2026-03-28T12:00:00Z", cron("0 30 2 * * *", "Europe/Berlin"), "2026-03-29T01:00:00Z"),
        ("2026-10-24T12:00:00Z", cron("0 30 2 * * *", "Europe/Berlin"), "2026-10-25T00:30:00Z"),
        ("2026-10-25T00:30:00Z", cron("0 30 2 * * *", "Europe/Berlin"), "2026-10-26T01:30:00Z"),
        ("2026-03-08T00:00:00Z", cron("0 30 2 * * *", "America/New_York"), "2026-03-08T07:00:00Z"),
        ("2026-11-01T00:00:00Z", cron("0 30 1 * * *", "America/New_York"), "2026-11-01T05:30:00Z"),
        ("2026-10-03T12:00:00Z", cron("0 15 2 * * *", "Australia/Lord_Howe"), "2026-10-03T15:30:00Z"),
        ("2026-04-04T12:00:00Z", cron("0 45 1 * * *", "Australia/Lord_Howe"), "2026-04-04T14:45:00Z"),
        (
            "2026-03-28T12:00:00Z",
            json!({ "execute_at": "2026-03-29T02:30:00", "timezone": "Europe/Berlin" }),
            "2026-03-29T01:00:00Z",
        ),
        (
            "2026-03-28T12:00:00Z",
            json!({ "execute_at": "2026-10-25T02:30:00", "timezone": "Europe/Berlin" }),
            "2026-10-25T00:30:00Z",
        ),
        ("2026-03-28T12:00:00Z", json!({ "execute_at": "2026-03-28T18:00:00+05:30" }), "2026-03-28T12:30:00Z"),
        ("2026-03-28T12:00:00Z", json!({ "execute_in": "90s" }), "2026-03-28T12:01:30Z"),
        ("2026-03-28T12:00:00Z", json!({ "recurrence": { "every": "10m" } }), "2026-03-28T12:10:00Z"),
        (
            "2026-03-28T12:00:00Z",
            json!({ "execute_at": "2026-03-30T00:00:00Z", "recurrence": { "cron": "0 0 12 * * MON" } }),
            "2026-03-30T12:00:00Z",
        ),
    ] {
        clock.set(time(now));
        assert_eq!(planned(timer.clone()).await, expected, "{timer}");
    }
    // An hour after the clock went back, asked by the clock of that moment.
    clock.set(time("2026-10-25T01:10:00Z"));
    assert_eq!(planned(cron("0 30 2 * * *", "Europe/Berlin")).await, "2026-10-26T01:30:00Z");
}

#[tokio::test]
async fn a_failed_callback_is_tried_again_as_asked_and_every_attempt_is_kept() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let busy = Answering { headers: vec![("retry-after", "1".into())], ..Answering::status(503) };
    receiver.answer([Answering::status(500), busy, Answering::status(200)]);
    let retry = json!({ "max_attempts": 4, "initial_delay": "50ms", "max_delay": "1s" });
    let timer = set(&http, json!({ "execute_in": "10ms", "callback": to(&receiver, "x"), "retry": retry })).await;
    let done = until(&http, &timer["id"], "completed").await;
    assert_eq!((&done["attempts"], &done["last_error"]), (&json!(3), &Value::Null));
    let received = receiver.received();
    assert_eq!(received.len(), 3);
    assert!(received[2].at - received[1].at >= TimeDelta::seconds(1), "retry-after was not honoured");
    let ids: Vec<&str> = received.iter().map(|one| one.header("webhook-id")).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    let attempts = http.data(&format!("{}/attempts", path(&timer))).await["attempts"].clone();
    let errors: Vec<&Value> = attempts.as_array().unwrap().iter().map(|one| &one["error"]).collect();
    assert_eq!(errors, [&Value::Null, &json!("HTTP 503"), &json!("HTTP 500")]);

    // One that has failed for good can be tried by hand.
    receiver.answer([Answering::status(500)]);
    let timer = set(&http, json!({ "execute_in": "10ms", "callback": to(&receiver, "x") })).await;
    until(&http, &timer["id"], "failed").await;
    assert_eq!(post(&http, format!("{}/retry", path(&timer))).await["status"], "pending");
    assert_eq!(until(&http, &timer["id"], "completed").await["attempts"], 2);
    let refused = http.post(&format!("{}/retry", path(&timer)), json!({})).await;
    assert_eq!(refused.json()["message"], "cannot retry timer with status 'completed'");
}

#[tokio::test]
async fn a_timer_that_is_too_late_is_skipped_if_it_asked_for_that() {
    let deployment = Deployment::new().await;
    let running = serve(&deployment).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let due = Utc::now() + TimeDelta::milliseconds(500);
    let timer = |more: Value| with(json!({ "execute_at": due, "callback": to(&receiver, "x") }), &more);
    let skipped = set(&http, timer(json!({ "on_late": "skip", "max_lateness": "100ms" }))).await;
    let tolerant = set(&http, timer(json!({ "on_late": "skip" }))).await;
    let default = set(&http, timer(json!({}))).await;
    let recurring = json!({ "on_late": "skip", "max_lateness": "100ms", "recurrence": { "every": "1h" } });
    let recurring = set(&http, timer(recurring)).await;
    running.stop().await;
    let nats = deployment.nats().await;
    let mut events = nats.subscribe("tm.event.timer.default.skipped").await.unwrap();
    past(due + TimeDelta::milliseconds(400)).await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let late = until(&http, &skipped["id"], "skipped").await;
    assert!(
        late["late_by_ms"].as_i64().unwrap() > 100 && late["last_error"].as_str().unwrap().contains("late"),
        "{late}"
    );
    until(&http, &tolerant["id"], "completed").await;
    until(&http, &default["id"], "completed").await;
    let next = eventually("the next run is planned", async || {
        let timer = http.data(&path(&recurring)).await;
        (timer["run"] == 2).then_some(timer)
    })
    .await;
    assert_eq!(next["status"], "pending");
    assert_eq!(receiver.received().len(), 2);
    for _ in 0..2 {
        let event: Value = serde_json::from_slice(&events.next().await.unwrap().payload).unwrap();
        assert_eq!(event["status"], "skipped");
    }
}

#[tokio::test]
async fn an_idempotency_key_stands_for_one_timer_of_its_tenant() {
    let deployment = Deployment::new().await;
    let (one, two) = tokio::join!(serve(&deployment), serve(&deployment));
    let callers = [one.http().key(API_KEY), two.http().key(API_KEY)];
    let timer = json!({ "execute_in": "1h", "callback": { "type": "nats", "topic": "a.b", "payload": { "a": 1, "b": 2 } },
        "idempotency_key": "order-456" });
    let answers = join_all((0..40).map(|number| callers[number % 2].post("/timers", timer.clone()))).await;
    let made = answers.iter().filter(|answer| answer.status == 201).count();
    assert_eq!(made, 1, "{:?}", answers.iter().map(|answer| answer.status).collect::<Vec<_>>());
    assert!(answers.iter().all(|answer| answer.json()["data"]["id"] == answers[0].json()["data"]["id"]));
    let http = &callers[0];
    // The order of members says nothing; a header names it as well.
    let other_order =
        r#"{"callback": {"topic": "a.b", "payload": {"b": 2, "a": 1}, "type": "nats"}, "execute_in": "1h"}"#;
    let named = http.clone().header("idempotency-key", "order-456");
    let again = named.send(reqwest::Method::POST, "/timers", Some(other_order.as_bytes().to_vec())).await;
    assert_eq!(again.status, 200, "{}", again.text);
    let mut other = timer.clone();
    other["execute_in"] = json!("2h");
    let conflict = http.post("/timers", other.clone()).await;
    assert_eq!((conflict.status, &conflict.json()["code"]), (409, &json!(2)), "{}", conflict.text);
    assert!(conflict.json()["message"].as_str().unwrap().starts_with("idempotency_key"));
    let both = http.clone().header("idempotency-key", "another").post("/timers", timer.clone()).await;
    assert_eq!(both.status, 400, "{}", both.text);
    assert_eq!(http.data("/timers").await["total"], 1);
    // Another tenant's key is another key.
    let acme = tenant(http, "acme", &["timers"]).await;
    assert_eq!(acme.post("/timers", other).await.status, 201);
    // In one call too, each for itself.
    let bulk = json!({ "timers": [timer, { "execute_in": "2h", "callback": timer["callback"], "idempotency_key": "order-456" },
        { "execute_in": "1h", "callback": timer["callback"], "idempotency_key": "new" },
        { "execute_in": "1h", "callback": timer["callback"], "idempotency_key": "new" }] });
    let results = http.post("/timers/bulk", bulk).await.json()["data"]["results"].clone();
    let codes: Vec<&Value> = results.as_array().unwrap().iter().map(|result| &result["code"]).collect();
    assert_eq!(codes, [&json!(0), &json!(2), &json!(0), &json!(0)]);
    assert_eq!(results[2]["id"], results[3]["id"]);
}

#[tokio::test]
async fn a_repeat_that_comes_when_the_time_has_passed_finds_its_timer() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(time("2099-01-01T00:00:00Z"));
    let http = deployment.serve_by(&clock).await.http().key(API_KEY);
    let timer = json!({ "execute_at": "2099-01-01T00:00:10Z", "callback": { "type": "nats", "topic": "a.b" },
        "idempotency_key": "once" });
    let made = set(&http, timer.clone()).await;
    clock.set(time("2099-01-01T00:01:00Z"));
    let again = http.post("/timers", timer.clone()).await;
    assert_eq!((again.status, &again.json()["data"]["id"]), (200, &made["id"]), "{}", again.text);
    let bulk = http.post("/timers/bulk", json!({ "timers": [timer] })).await;
    assert_eq!(bulk.json()["data"]["results"][0]["id"], made["id"], "{}", bulk.text);
    let mut other = timer.clone();
    other["metadata"] = json!(1);
    assert_eq!(http.post("/timers", other).await.json()["message"], "execute_at must be in the future");
}

/// A caller of another tenant.
async fn tenant(http: &Http, tenant: &str, roles: &[&str]) -> Http {
    let made = http.clone().admin().post("/v1/admin/keys", json!({ "tenant": tenant, "roles": roles })).await;
    assert_eq!(made.status, 201, "{}", made.text);
    http.clone().key(made.json()["key"].as_str().unwrap())
}

#[tokio::test]
async fn many_timers_are_set_and_canceled_at_once_each_for_itself() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let good = json!({ "execute_in": "1h", "callback": { "type": "nats", "topic": "a.b" } });
    let mut timers = vec![good.clone(); 1000];
    timers[3] = json!({ "execute_in": "1h", "callback": { "type": "nats", "topic": "" } });
    timers[5] = json!("nonsense");
    timers[7] = json!({ "execute_in": "1h" });
    let made = http.post("/timers/bulk", json!({ "timers": timers })).await;
    assert_eq!(made.status, 200, "{}", made.text);
    let results = made.json()["data"]["results"].as_array().unwrap().clone();
    assert_eq!(results.len(), 1000);
    for (index, result) in results.iter().enumerate() {
        assert_eq!(result["index"], index);
        let bad = [3, 5, 7].contains(&index);
        assert_eq!((result["code"].as_u64() == Some(2), result["id"].is_null()), (bad, bad), "{result}");
    }
    assert!(results[3]["message"].as_str().unwrap().starts_with("callback.topic"));
    assert_eq!(http.data("/timers?limit=1").await["total"], 997);
    let ids = [
        &results[0]["id"],
        &results[0]["id"],
        &results[1]["id"],
        &json!("nonsense"),
        &json!("0198a7b0-0000-7000-8000-000000000000"),
    ];
    let canceled = http.post("/timers/bulk/cancel", json!({ "ids": ids })).await.json()["data"]["results"].clone();
    let codes: Vec<&Value> = canceled.as_array().unwrap().iter().map(|result| &result["code"]).collect();
    assert_eq!(codes, [&json!(0), &json!(0), &json!(0), &json!(2), &json!(3)], "{canceled}");
    let again = http.post("/timers/bulk/cancel", json!({ "ids": [results[0]["id"]] })).await;
    assert_eq!(again.json()["data"]["results"][0]["message"], "cannot cancel timer with status 'canceled'");
    for (path, body) in
        [("/timers/bulk", json!({ "timers": [] })), ("/timers/bulk/cancel", json!({ "ids": vec!["x"; 1001] }))]
    {
        assert_eq!(http.post(path, body).await.status, 400, "{path}");
    }
}

#[tokio::test]
async fn tenants_see_their_own_timers_and_secrets_only_with_the_role() {
    let deployment = Deployment::new().await;
    let running = deployment
        .serve_with(|config| {
            soon(config);
            let acme = tidemark::config::TimerTenant { rate_limit: Some(20), subjects: Some(vec!["acme.>".into()]) };
            config.timers.tenants.insert("acme".parse().unwrap(), acme);
        })
        .await;
    let http = running.http().key(API_KEY);
    let acme = tenant(&http, "acme", &["timers"]).await;
    let other = tenant(&http, "other", &["timers", "secrets"]).await;
    let callback = |topic: &str| json!({ "type": "nats", "topic": topic, "headers": { "X-Token": "hunter2" } });
    let timer = set(&acme, json!({ "execute_in": "1h", "callback": callback("acme.x") })).await;
    let refused = acme.post("/timers", json!({ "execute_in": "1h", "callback": callback("others.x") })).await;
    assert_eq!(refused.status, 400);
    assert!(refused.json()["message"].as_str().unwrap().contains("this tenant may name"));
    for stranger in [&other, &http] {
        assert_eq!(stranger.get(&path(&timer)).await.status, 404);
        assert_eq!(stranger.delete(&path(&timer)).await.status, 404);
        assert_eq!(put(stranger, &path(&timer), json!({ "metadata": 1 })).await.0, 404);
        assert_eq!(stranger.data("/timers").await["total"], 0);
        let bulk = stranger.post("/timers/bulk/cancel", json!({ "ids": [timer["id"]] })).await;
        assert_eq!(bulk.json()["data"]["results"][0]["code"], 3);
    }
    let shown = acme.data(&path(&timer)).await;
    assert_eq!(shown["callback_config"]["headers"], json!({ "X-Token": "[redacted]" }));
    let seeing = tenant(&http, "acme", &["timers", "secrets"]).await;
    assert_eq!(seeing.data(&path(&timer)).await["callback_config"]["headers"], json!({ "X-Token": "hunter2" }));
    let without = tenant(&http, "acme", &["mint"]).await;
    assert_eq!((without.get("/timers").await.status, acme.get("/timers/webhook-secret").await.status), (403, 403));
    // A change that does not name the callback keeps its secrets.
    assert_eq!(put(&acme, &path(&timer), json!({ "metadata": 1 })).await.0, 200);
    assert_eq!(seeing.data(&path(&timer)).await["callback_config"]["headers"]["X-Token"], "hunter2");

    let client = deployment.nats().await;
    let get = async |verb: &str| {
        let body = json!({ "id": timer["id"] }).to_string();
        let reply = client.request(format!("tm.timer.{verb}.acme"), body.into()).await.unwrap();
        serde_json::from_slice::<Value>(&reply.payload).unwrap()["callback_config"]["headers"]["X-Token"].clone()
    };
    assert_eq!((get("get").await, get("get-secrets").await), (json!("[redacted]"), json!("hunter2")));

    let statuses = join_all((0..60).map(|_| acme.get("/timers"))).await;
    let limited = statuses.iter().find(|answer| answer.status == 429).expect("a limit");
    assert_eq!(limited.json()["code"], 1);
    assert!(limited.headers.contains_key("retry-after"));
    assert_eq!(other.get("/timers").await.status, 200);
}

#[tokio::test]
async fn answers_are_kept_and_checked_where_that_is_asked_for() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let answer = |status: u16, body: &str| Answering {
        body: body.to_owned(),
        headers: vec![("x-answer", "yes".into())],
        ..Answering::status(status)
    };
    let schema = json!({ "type": "object", "required": ["ok"], "properties": { "ok": { "const": true } } });
    let long = "x".repeat(20_000);
    for (answer, more, status, error) in [
        (answer(200, "fine"), json!({ "capture_response": true }), "completed", ""),
        (answer(200, &long), json!({ "capture_response": true }), "completed", ""),
        (answer(500, "broken"), json!({ "capture_response": true }), "failed", "HTTP 500"),
        (answer(202, ""), json!({ "expect": { "status": [200, 202] } }), "completed", ""),
        (answer(204, ""), json!({ "expect": { "status": [200, 202] } }), "failed", "HTTP 204 is not among"),
        (answer(404, ""), json!({ "expect": { "status": [404] } }), "completed", ""),
        (answer(200, r#"{"ok": true}"#), json!({ "expect": { "schema": schema } }), "completed", ""),
        (answer(200, r#"{"ok": false}"#), json!({ "expect": { "schema": schema } }), "failed", "expect.schema"),
        (answer(200, "nonsense"), json!({ "expect": { "schema": schema } }), "failed", "not JSON"),
    ] {
        receiver.answer([answer.clone()]);
        let timer = with(json!({ "execute_in": "10ms", "callback": to(&receiver, "x") }), &more);
        let timer = until(&http, &set(&http, timer).await["id"], status).await;
        assert!(timer["last_error"].as_str().unwrap_or_default().contains(error), "{timer}");
        if more["capture_response"] == true {
            let kept = &timer["response"];
            assert_eq!((&kept["status"], &kept["headers"]["x-answer"]), (&json!(answer.status), &json!("yes")));
            let truncated = answer.body.len() > 16 * 1024;
            assert_eq!(kept["truncated"], truncated);
            assert_eq!(kept["body"], answer.body[..answer.body.len().min(16 * 1024)]);
            let attempts = http.data(&format!("{}/attempts", path(&timer))).await;
            assert_eq!(attempts["attempts"][0]["response"], *kept);
        } else {
            assert_eq!(timer["response"], Value::Null);
        }
    }
    for (more, field) in [
        (json!({ "expect": { "schema": { "type": "nonsense" } } }), "expect.schema"),
        (json!({ "expect": { "schema": { "$ref": "http://example.com/schema" } } }), "expect.schema"),
        (json!({ "expect": { "status": [] } }), "expect.status"),
    ] {
        let timer = with(json!({ "execute_in": "1h", "callback": to(&receiver, "x") }), &more);
        let refused = http.post("/timers", timer).await;
        assert!(
            refused.status == 400 && refused.json()["message"].as_str().unwrap().starts_with(field),
            "{}",
            refused.text
        );
    }
}
