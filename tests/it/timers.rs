//! Timers as the seed has them: create, get, list, update, cancel, and what callbacks look like.

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{API_KEY, Answering, Deployment, Http, Receiver, Running, eventually, past, soon};

pub async fn put(http: &Http, path: &str, body: Value) -> (u16, Value) {
    let answer = http.send(Method::PUT, path, Some(body.to_string().into_bytes())).await;
    (answer.status, answer.json())
}

/// Sets a timer that must be taken, and returns its data.
pub async fn set(http: &Http, body: Value) -> Value {
    let made = http.post("/timers", body).await;
    assert_eq!(made.status, 201, "{}", made.text);
    made.json()["data"].clone()
}

/// Waits until a timer has a status, and returns all of it.
pub async fn until(http: &Http, id: &Value, status: &str) -> Value {
    let path = format!("/timers/{}", id.as_str().unwrap());
    eventually(&format!("{id} is {status}"), async || {
        let timer = http.data(&path).await;
        (timer["status"] == status).then_some(timer)
    })
    .await
}

pub fn to(receiver: &Receiver, path: &str) -> Value {
    json!({ "type": "http", "url": format!("{}/{path}", receiver.url), "payload": { "event": "timer_triggered" } })
}

/// The same with other members, or more of them.
pub fn with(mut timer: Value, more: &Value) -> Value {
    timer.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    timer
}

pub async fn serve(deployment: &Deployment) -> Running {
    deployment.serve_with(soon).await
}

fn at(timer: &Value, member: &str) -> DateTime<Utc> {
    timer[member].as_str().unwrap_or_else(|| panic!("{member} in {timer}")).parse().unwrap()
}

#[tokio::test]
async fn a_timer_is_set_fires_at_its_time_and_is_completed() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let due = Utc::now().trunc_subsecs(6) + TimeDelta::milliseconds(1500);
    let made = http
        .post(
            "/timers",
            json!({
                "execute_at": due,
                "callback": {
                    "type": "http",
                    "url": format!("{}/webhook", receiver.url),
                    "headers": { "Authorization": "Bearer token123", "X-Custom-Header": "value" },
                    "payload": { "event": "timer_triggered", "user_id": "user123" },
                },
                "metadata": { "client_ref": "order-456" },
            }),
        )
        .await;
    assert_eq!(made.status, 201, "{}", made.text);
    let (envelope, data) = (made.json(), made.json()["data"].clone());
    assert_eq!((&envelope["code"], &envelope["message"]), (&json!(0), &json!("timer created successfully")));
    assert_eq!((&data["callback_type"], &data["status"]), (&json!("http"), &json!("pending")));
    assert_eq!((at(&data, "execute_at"), &data["executed_at"]), (due, &Value::Null));
    let id: uuid::Uuid = data["id"].as_str().unwrap().parse().unwrap();
    assert_eq!(id.get_version_num(), 7);

    let received = receiver.has(1).await.remove(0);
    assert!(received.at >= due, "early by {}", due - received.at);
    assert_eq!(received.path, "webhook");
    assert_eq!(received.header("content-type"), "application/json");
    assert_eq!(received.header("user-agent"), concat!("tidemark/", env!("CARGO_PKG_VERSION")));
    assert_eq!((received.header("authorization"), received.header("x-custom-header")), ("Bearer token123", "value"));
    assert_eq!(received.body, r#"{"event":"timer_triggered","user_id":"user123"}"#);

    let timer = until(&http, &data["id"], "completed").await;
    assert_eq!(timer["metadata"], json!({ "client_ref": "order-456" }));
    assert_eq!(timer["callback_config"]["url"], format!("{}/webhook", receiver.url));
    assert_eq!((&timer["last_error"], &timer["attempts"]), (&Value::Null, &json!(1)));
    assert!(at(&timer, "executed_at") >= due);
    assert!((0..1000).contains(&timer["late_by_ms"].as_i64().unwrap()), "{timer}");
    assert_eq!(receiver.received().len(), 1);
}

#[tokio::test]
async fn a_failing_receiver_makes_a_failed_timer_with_its_reason() {
    let deployment = Deployment::new().await;
    let http = deployment
        .serve_with(|config| {
            soon(config);
            config.timers.callback_timeout = std::time::Duration::from_secs(1);
        })
        .await
        .http()
        .key(API_KEY);
    let receiver = Receiver::start().await;
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}/", listener.local_addr().unwrap())
    };
    let silent = Receiver::start().await;
    silent.hold();
    for (answer, url, reason) in [
        (Some(Answering::status(500)), None, "HTTP 500"),
        (Some(Answering::status(404)), None, "HTTP 404"),
        // Redirects are not followed.
        (
            Some(Answering {
                headers: vec![("location", format!("{}/other", receiver.url))],
                ..Answering::status(302)
            }),
            None,
            "HTTP 302",
        ),
        (None, Some(&*format!("{}/silent", silent.url)), "timeout: no answer within 1s"),
        (None, Some(closed.as_str()), "connection failed"),
        (None, Some("http://no-such-host.invalid/"), "connection failed"),
    ] {
        receiver.answer(answer);
        let url = url.map_or_else(|| format!("{}/failing", receiver.url), str::to_owned);
        let timer = set(&http, json!({ "execute_in": "10ms", "callback": { "type": "http", "url": url } })).await;
        let failed = until(&http, &timer["id"], "failed").await;
        assert!(failed["last_error"].as_str().unwrap().contains(reason), "{reason}: {failed}");
        assert!(failed["executed_at"].is_string() && failed["attempts"] == 1, "{failed}");
    }
    assert!(receiver.received().iter().all(|one| one.path == "failing"));
}

#[tokio::test]
async fn a_pending_timer_can_be_changed_and_canceled_and_a_final_one_can_not() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let timer =
        set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "old"), "metadata": { "a": 1 } })).await;
    let path = format!("/timers/{}", timer["id"].as_str().unwrap());

    let later = Utc::now().trunc_subsecs(6) + TimeDelta::hours(2);
    let (status, envelope) = put(&http, &path, json!({ "execute_at": later })).await;
    assert_eq!((status, &envelope["message"]), (200, &json!("timer updated successfully")));
    assert_eq!(at(&envelope["data"], "execute_at"), later);
    assert!(at(&envelope["data"], "updated_at") >= at(&timer, "created_at"));
    let nats = json!({ "type": "nats", "topic": "events.changed" });
    let (_, envelope) = put(&http, &path, json!({ "callback": nats, "metadata": { "updated": true } })).await;
    assert_eq!(envelope["data"]["callback_type"], "nats");
    let changed = http.data(&path).await;
    assert_eq!((&changed["callback_config"], &changed["metadata"]), (&nats, &json!({ "updated": true })));
    assert_eq!(at(&changed, "execute_at"), later);

    let canceled = http.delete(&path).await;
    assert_eq!(canceled.status, 200);
    let expected = json!({ "code": 0, "message": "timer canceled successfully",
        "data": { "id": timer["id"], "status": "canceled" } });
    assert_eq!(canceled.json(), expected);
    let refused = http.delete(&path).await;
    let expected = json!({ "code": 2, "message": "cannot cancel timer with status 'canceled'", "data": null });
    assert_eq!((refused.status, refused.json()), (400, expected));

    let done = set(&http, json!({ "execute_in": "10ms", "callback": to(&receiver, "done") })).await;
    until(&http, &done["id"], "completed").await;
    let path = format!("/timers/{}", done["id"].as_str().unwrap());
    let (status, refused) = put(&http, &path, json!({ "execute_at": later })).await;
    let expected = json!({ "code": 2, "message": "cannot update timer with status 'completed'", "data": null });
    assert_eq!((status, refused), (400, expected));
    assert_eq!(http.delete(&path).await.json()["message"], "cannot cancel timer with status 'completed'");
    assert_eq!(receiver.received().len(), 1);
}

#[tokio::test]
async fn an_update_moves_a_timer_to_its_new_time_in_both_directions() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let sooner = set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "sooner") })).await;
    let later = set(&http, json!({ "execute_in": "1500ms", "callback": to(&receiver, "later") })).await;
    let path = |timer: &Value| format!("/timers/{}", timer["id"].as_str().unwrap());
    let due = Utc::now() + TimeDelta::milliseconds(300);
    assert_eq!(put(&http, &path(&sooner), json!({ "execute_at": due })).await.0, 200);
    let late = Utc::now() + TimeDelta::milliseconds(3000);
    assert_eq!(put(&http, &path(&later), json!({ "execute_at": late })).await.0, 200);
    let received = receiver.has(2).await;
    assert_eq!([&*received[0].path, &*received[1].path], ["sooner", "later"]);
    assert!(received[0].at >= due && received[1].at >= late, "{received:?}");
}

#[tokio::test]
async fn lists_are_filtered_sorted_and_paged() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let mut ids = Vec::new();
    for number in 0..7 {
        let body = json!({
            "execute_in": format!("{}h", 10 - number),
            "callback": { "type": "nats", "topic": "a.b" },
            "metadata": { "number": number, "color": if number % 2 == 0 { "red" } else { "blue" }, "a.b": "c" },
        });
        let timer = set(&http, body).await;
        ids.push(timer["id"].clone());
        // Ids of one millisecond have no order.
        past(at(&timer, "created_at") + TimeDelta::milliseconds(1)).await;
    }
    assert_eq!(http.delete(&format!("/timers/{}", ids[6].as_str().unwrap())).await.status, 200);
    let listed = async |query: &str| {
        let page = http.data(&format!("/timers?{query}")).await;
        let numbers: Vec<usize> = page["timers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|timer| ids.iter().position(|id| *id == timer["id"]).unwrap())
            .collect();
        (numbers, page)
    };
    let (numbers, page) = listed("").await;
    assert_eq!(numbers, [6, 5, 4, 3, 2, 1, 0]);
    assert_eq!((&page["total"], &page["limit"], &page["offset"]), (&json!(7), &json!(50), &json!(0)));
    assert!(page["timers"][0].get("callback_config").is_none());
    assert_eq!(listed("status=pending&limit=3&sort=execute_at&order=asc").await.0, [5, 4, 3]);
    let (numbers, page) = listed("status=pending&limit=3&offset=3&sort=execute_at&order=asc").await;
    assert_eq!((numbers, &page["total"]), (vec![2, 1, 0], &json!(6)));
    assert_eq!(listed("metadata.color=blue&order=asc").await.0, [1, 3, 5]);
    assert_eq!(listed("metadata.color=blue&metadata.number=3").await.0, [3]);
    assert_eq!(listed("metadata.a.b=c&limit=1").await.0, [6]);
    assert_eq!(listed("status=canceled").await.0, [6]);
    for sort in ["created_at", "execute_at"] {
        for order in ["asc", "desc"] {
            let all = listed(&format!("sort={sort}&order={order}")).await.0;
            let (mut seen, mut cursor) = (Vec::new(), String::new());
            loop {
                let (numbers, page) = listed(&format!("sort={sort}&order={order}&limit=2{cursor}")).await;
                seen.extend(numbers);
                match page["next_cursor"].as_str() {
                    Some(next) => cursor = format!("&cursor={next}"),
                    None => break,
                }
            }
            assert_eq!(seen, all, "{sort} {order}");
        }
    }
    let (_, page) = listed("limit=1").await;
    let cursor = page["next_cursor"].as_str().unwrap();
    for (query, field) in [
        ("limit=201".to_owned(), "limit"),
        ("limit=0".into(), "limit"),
        ("limit=x".into(), "limit"),
        ("offset=-1".into(), "offset"),
        ("status=nonsense".into(), "status"),
        ("sort=name".into(), "sort"),
        ("order=up".into(), "order"),
        ("cursor=nonsense".into(), "cursor"),
        (format!("cursor={cursor}&order=asc"), "cursor"),
        (format!("cursor={cursor}&offset=1"), "offset"),
        ("color=red".into(), "color"),
    ] {
        let refused = http.get(&format!("/timers?{query}")).await;
        let message = refused.json()["message"].as_str().unwrap().to_owned();
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(2)), "{query}");
        assert!(message.contains(field), "{query}: {message}");
    }
}

#[tokio::test]
async fn bad_requests_name_their_field_and_create_nothing() {
    let deployment = Deployment::new().await;
    let http = deployment.serve().await.http().key(API_KEY);
    let callback = json!({ "type": "nats", "topic": "a.b" });
    let timer = |more: Value| {
        let mut timer = json!({ "execute_in": "1h", "callback": callback });
        for (name, value) in more.as_object().unwrap() {
            match value {
                Value::Null => drop(timer.as_object_mut().unwrap().remove(name)),
                value => timer[name] = value.clone(),
            }
        }
        timer
    };
    let past = Utc::now() - TimeDelta::seconds(1);
    let near = Utc::now() + TimeDelta::seconds(3);
    let deep = (0..90).fold(json!(1), |inner, _| json!([inner]));
    for (body, message) in [
        (timer(json!({ "execute_in": null, "execute_at": past })), "execute_at must be in the future"),
        (timer(json!({ "execute_in": null, "execute_at": near })), "execute_at must be in the future: at least 5s"),
        (timer(json!({ "execute_in": null, "execute_at": "tomorrow" })), "execute_at"),
        (timer(json!({ "execute_in": null, "execute_at": "2099-01-01T00:00:00" })), "execute_at"),
        (timer(json!({ "execute_in": null, "execute_at": 17 })), "execute_at"),
        (timer(json!({ "execute_in": null })), "execute_at: is missing"),
        (timer(json!({ "execute_in": "soon" })), "execute_in"),
        (timer(json!({ "execute_in": "1s" })), "execute_at must be in the future"),
        (timer(json!({ "execute_at": "2099-01-01T00:00:00Z" })), "execute_in"),
        (timer(json!({ "timezone": "Mars/Olympus" })), "timezone"),
        (timer(json!({ "callback": null })), "callback: is missing"),
        (timer(json!({ "callback": { "type": "ftp", "url": "x" } })), "callback"),
        (timer(json!({ "callback": { "url": "http://example.com" } })), "callback"),
        (timer(json!({ "callback": { "type": "http" } })), "url"),
        (
            timer(json!({ "callback": { "type": "http", "url": "nonsense" } })),
            "callback.url: must be a valid HTTP or HTTPS URL",
        ),
        (
            timer(json!({ "callback": { "type": "http", "url": "http://example.com", "headers": { "a b": "c" } } })),
            "callback.headers.a b",
        ),
        (timer(json!({ "callback": { "type": "nats", "topic": "" } })), "callback.topic"),
        (timer(json!({ "callback": { "type": "nats", "topic": "tm.id.x" } })), "callback.topic"),
        (
            timer(json!({ "callback": { "type": "nats", "topic": "a", "payload": "x".repeat(300_000) } })),
            "callback.payload",
        ),
        (timer(json!({ "callback": { "type": "nats", "topic": "a", "payload": deep } })), "callback.payload"),
        (timer(json!({ "metadata": { "x": "\0" } })), "metadata"),
        (timer(json!({ "recurrence": { "cron": "0 0 0 30 2 *" } })), "recurrence.cron: never fires"),
        (timer(json!({ "recurrence": { "cron": "nonsense" } })), "recurrence.cron"),
        (timer(json!({ "recurrence": { "every": "10ms" } })), "recurrence.every"),
        (timer(json!({ "recurrence": { "every": "1h", "until": past } })), "recurrence.until"),
        (timer(json!({ "retry": { "max_attempts": 0 } })), "retry.max_attempts"),
        (timer(json!({ "retry": { "max_attempts": 3, "initial_delay": "1h" } })), "retry.initial_delay"),
        (timer(json!({ "on_late": "maybe" })), "on_late"),
        (timer(json!({ "max_lateness": "5m" })), "max_lateness"),
        (timer(json!({ "expect": { "status": [200] } })), "expect"),
        (timer(json!({ "idempotency_key": "" })), "idempotency_key"),
        (timer(json!({ "idempotency_key": "x".repeat(256) })), "idempotency_key"),
        (timer(json!({ "execute_on": "x" })), "execute_on"),
    ] {
        let refused = http.post("/timers", body.clone()).await;
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(2)), "{body}: {}", refused.text);
        let found = refused.json()["message"].as_str().unwrap().to_owned();
        assert!(found.contains(message), "{message}: {found}");
        assert_eq!(refused.json()["data"], Value::Null);
    }
    for raw in [
        "[]",
        "{",
        r#"{"execute_in": "1h", "callback": {"type": "nats", "topic": "a", "payload": 1e400}}"#,
        r#"{"execute_in": "1h", "callback": {"type": "nats", "topic": "a", "payload": 123456789012345678901234567890}}"#,
    ] {
        let refused = http.send(Method::POST, "/timers", Some(raw.as_bytes().to_vec())).await;
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(2)), "{raw}: {}", refused.text);
    }
    let many: Vec<Value> = (0..2000).map(|_| timer(json!({}))).collect();
    let refused = http.post("/timers/bulk", json!({ "timers": many })).await;
    assert_eq!(refused.status, 400, "{}", refused.text);
    assert!(refused.json()["message"].as_str().unwrap().starts_with("timers: must not be more than 1000"));
    assert_eq!(http.data("/timers").await["total"], 0);

    for (method, path) in [
        (Method::GET, "/timers/nonsense"),
        (Method::PUT, "/timers/nonsense"),
        (Method::DELETE, "/timers/17"),
        (Method::POST, "/timers/x/fire"),
    ] {
        let refused = http.send(method, path, None).await;
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(2)), "{path}: {}", refused.text);
        assert_eq!(refused.json()["message"], "id: must be a UUID");
    }
    let nobody = "/timers/0198a7b0-0000-7000-8000-000000000000";
    for (method, path) in [
        (Method::GET, nobody.to_owned()),
        (Method::PUT, nobody.into()),
        (Method::DELETE, nobody.into()),
        (Method::POST, format!("{nobody}/fire")),
        (Method::POST, format!("{nobody}/retry")),
        (Method::POST, format!("{nobody}/pause")),
        (Method::POST, format!("{nobody}/resume")),
        (Method::GET, format!("{nobody}/attempts")),
    ] {
        let missing = http.send(method, &path, None).await;
        let expected = json!({ "code": 3, "message": "timer not found", "data": null });
        assert_eq!((missing.status, missing.json()), (404, expected), "{path}");
    }
    let stranger = http.key("wrong").get("/timers").await;
    assert_eq!((stranger.status, &stranger.json()["code"]), (401, &json!(4)));
}

#[tokio::test]
async fn the_same_operations_work_over_nats() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let nats = deployment.nats().await;
    let mut heard = nats.subscribe("events.timer.>").await.unwrap();
    let ask = async |verb: &str, body: Value| -> Value {
        let reply = nats.request(format!("tm.timer.{verb}.default"), body.to_string().into()).await.unwrap();
        serde_json::from_slice(&reply.payload).unwrap()
    };
    let callback = json!({
        "type": "nats", "topic": "events.timer.triggered", "key": "user123",
        "headers": { "X-Event-Type": "timer_triggered" }, "payload": { "user_id": "user123" },
    });
    let timer = ask("create", json!({ "execute_in": "300ms", "callback": callback })).await;
    assert_eq!(timer["status"], "pending", "{timer}");
    let message = futures::StreamExt::next(&mut heard).await.unwrap();
    assert!(Utc::now() >= at(&timer, "execute_at"));
    assert_eq!(message.payload, r#"{"user_id":"user123"}"#);
    let headers = message.headers.unwrap();
    assert_eq!(headers.get("Tidemark-Key").unwrap().as_str(), "user123");
    assert_eq!(headers.get("X-Event-Type").unwrap().as_str(), "timer_triggered");
    until(&http, &timer["id"], "completed").await;
    assert_eq!(ask("get", json!({ "id": timer["id"] })).await["status"], "completed");
    assert_eq!(ask("list", json!({ "status": "completed" })).await["total"], 1);
    let far = ask("create", json!({ "execute_in": "3h", "callback": callback })).await;
    let changed = ask("update", json!({ "id": far["id"], "metadata": { "a": 1 } })).await;
    assert_eq!(changed["status"], "pending", "{changed}");
    assert_eq!(ask("cancel", json!({ "id": far["id"] })).await["status"], "canceled");
    let refused = ask("cancel", json!({ "id": far["id"] })).await;
    assert_eq!(refused["message"], "cannot cancel timer with status 'canceled'");
    // Another tenant's subject shows nothing of it.
    let other = nats.request("tm.timer.get.other", json!({ "id": far["id"] }).to_string().into()).await.unwrap();
    assert_eq!(other.headers.unwrap().get("Nats-Service-Error-Code").unwrap().as_str(), "404");
}
