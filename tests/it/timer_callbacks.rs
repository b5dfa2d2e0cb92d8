//! Callbacks: signatures, the outbound guard, streams, events.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use chrono::{TimeDelta, Utc};
use futures::StreamExt;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use tidemark::clock::Clock;
use tokio::net::TcpListener;

use crate::{
    support::{API_KEY, Answering, Deployment, Http, Receiver, Running, soon},
    timers::{serve, set, to, until},
};

async fn secret(http: &Http) -> Value {
    http.data("/timers/webhook-secret").await
}

#[tokio::test]
async fn callbacks_are_signed_as_an_independent_library_expects_through_a_rotation() {
    let deployment = Deployment::new().await;
    let clock = Clock::manual(Utc::now());
    let mut server = {
        let mut config = deployment.config();
        soon(&mut config);
        tidemark::server::Server::bind(config).await.unwrap()
    };
    server.clock = clock.clone();
    let running = Running::start(server).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let first = secret(&http).await;
    assert!(first["secret"].as_str().unwrap().starts_with("whsec_") && first["previous"].is_null(), "{first}");
    let mut count = 0;
    let mut fire = async || {
        set(&http, json!({ "execute_at": clock.now() + TimeDelta::milliseconds(1), "callback": to(&receiver, "x") }))
            .await;
        count += 1;
        receiver.has(count).await.pop().unwrap()
    };
    let verifies = |secret: &Value, received: &crate::support::Received| {
        let webhook = Webhook::new(secret.as_str().unwrap()).unwrap();
        webhook.verify(&received.body, &received.headers).is_ok()
    };
    let received = fire().await;
    assert!(verifies(&first["secret"], &received));
    let mut changed = received.clone();
    changed.body = "{}".into();
    assert!(!verifies(&first["secret"], &changed));

    let rotated = http.send(reqwest::Method::POST, "/timers/webhook-secret/rotate", None).await;
    let second = rotated.json()["data"].clone();
    assert_eq!((rotated.status, &second["previous"]), (200, &first["secret"]), "{}", rotated.text);
    assert_eq!(secret(&http).await, second);
    // For a while both count, then the new one alone.
    let received = fire().await;
    assert!(verifies(&first["secret"], &received) && verifies(&second["secret"], &received));
    assert_eq!(received.header("webhook-signature").split(' ').count(), 2);
    clock.set(Utc::now() + TimeDelta::hours(25));
    assert_eq!(secret(&http).await["previous"], Value::Null);
}

#[tokio::test]
async fn callbacks_don_t_reach_our_neighbours() {
    let deployment = Deployment::new().await;
    let running = deployment.serve_with(|config| config.timers.min_delay = Default::default()).await;
    let http = running.http().key(API_KEY);
    // Somebody listens on loopback, and must never hear from us, whatever name leads there.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    for host in [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f.1",
        "[::ffff:127.0.0.1]",
        "[::1]",
        "0.0.0.0",
        "169.254.169.254",
        "10.1.2.3",
    ] {
        let callback = json!({ "type": "http", "url": format!("http://{host}:{port}/") });
        let timer = set(&http, json!({ "execute_in": "5ms", "callback": callback })).await;
        let failed = until(&http, &timer["id"], "failed").await;
        assert!(failed["last_error"].as_str().unwrap().contains("has no public address"), "{host}: {failed}");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_connection_serves_many_callbacks() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/x", listener.local_addr().unwrap());
    let inside = receiver.url.strip_prefix("http://").unwrap().to_owned();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    tokio::spawn(async move {
        while let Ok((mut outer, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let mut inner = tokio::net::TcpStream::connect(&inside).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut outer, &mut inner).await });
        }
    });
    for _ in 0..10 {
        let timer = set(&http, json!({ "execute_in": "5ms", "callback": { "type": "http", "url": url } })).await;
        until(&http, &timer["id"], "completed").await;
    }
    assert_eq!((receiver.received().len(), connections.load(Ordering::SeqCst)), (10, 1));
}

#[tokio::test]
async fn a_redirect_leads_nowhere() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let (first, second) = (Receiver::start().await, Receiver::start().await);
    for status in [301, 302, 307, 308] {
        first.answer([Answering {
            headers: vec![("location", format!("{}/x", second.url))],
            ..Answering::status(status)
        }]);
        let timer = set(&http, json!({ "execute_in": "5ms", "callback": to(&first, "x") })).await;
        assert_eq!(until(&http, &timer["id"], "failed").await["last_error"], format!("HTTP {status}"));
    }
    assert!(second.received().is_empty());
}

#[tokio::test]
async fn a_nats_callback_is_stored_where_a_stream_takes_it_and_told_elsewhere() {
    let deployment = Deployment::new().await;
    let http = serve(&deployment).await.http().key(API_KEY);
    let nats = deployment.nats().await;
    let jetstream = async_nats::jetstream::new(nats.clone());
    let config = async_nats::jetstream::stream::Config {
        name: "JOBS".into(),
        subjects: vec!["jobs.>".into()],
        max_messages: 1,
        discard: async_nats::jetstream::stream::DiscardPolicy::New,
        ..Default::default()
    };
    let mut stream = jetstream.create_stream(config).await.unwrap();
    let on =
        |topic: &str| json!({ "execute_in": "5ms", "callback": { "type": "nats", "topic": topic, "payload": [1, 2] } });
    let stored = set(&http, on("jobs.daily")).await;
    until(&http, &stored["id"], "completed").await;
    let message = stream.get_last_raw_message_by_subject("jobs.daily").await.unwrap();
    assert_eq!(message.payload, "[1,2]");
    let id = format!("{}.1", stored["id"].as_str().unwrap());
    assert_eq!(message.headers.get("Nats-Msg-Id").unwrap().as_str(), id);
    // A stream that takes no more is a failure, not a success that nobody will see.
    let full = set(&http, on("jobs.daily")).await;
    let failed = until(&http, &full["id"], "failed").await;
    assert!(failed["last_error"].as_str().unwrap().contains("maximum messages"), "{failed}");
    assert_eq!(stream.info().await.unwrap().state.messages, 1);

    let mut heard = nats.subscribe("told.x").await.unwrap();
    let told = set(&http, on("told.x")).await;
    assert_eq!(heard.next().await.unwrap().payload, "[1,2]");
    until(&http, &told["id"], "completed").await;
}

#[tokio::test]
async fn what_becomes_of_timers_is_told_and_counted() {
    let deployment = Deployment::new().await;
    let running = serve(&deployment).await;
    let http = running.http().key(API_KEY);
    let receiver = Receiver::start().await;
    let nats = deployment.nats().await;
    let mut events = nats.subscribe("tm.event.timer.default.>").await.unwrap();
    let mut next = async || {
        let event = tokio::time::timeout(std::time::Duration::from_secs(30), events.next()).await.unwrap().unwrap();
        (event.subject.to_string(), serde_json::from_slice::<Value>(&event.payload).unwrap())
    };
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let traced = http.clone().header("traceparent", trace);
    let done = set(&traced, json!({ "execute_in": "5ms", "callback": to(&receiver, "x") })).await;
    let (subject, event) = next().await;
    assert_eq!((&*subject, &event["id"]), ("tm.event.timer.default.completed", &done["id"]));
    assert!(event["late_by_ms"].is_i64() && event["executed_at"].is_string(), "{event}");
    let received = receiver.received().remove(0);
    assert!(received.header("traceparent").contains("0af7651916cd43dd8448eb211c80319c"));
    receiver.answer([Answering::status(500)]);
    let failed = set(&http, json!({ "execute_in": "5ms", "callback": to(&receiver, "x") })).await;
    let (subject, event) = next().await;
    assert_eq!(
        (&*subject, &event["id"], &event["error"]),
        ("tm.event.timer.default.failed", &failed["id"], &json!("HTTP 500"))
    );
    let canceled = set(&http, json!({ "execute_in": "1h", "callback": to(&receiver, "x") })).await;
    http.delete(&format!("/timers/{}", canceled["id"].as_str().unwrap())).await;
    let (subject, event) = next().await;
    assert_eq!((&*subject, &event["id"]), ("tm.event.timer.default.canceled", &canceled["id"]));
    let metrics = http.get("/metrics").await.text;
    for name in [
        "tidemark_timer_lateness_seconds_bucket",
        "tidemark_timers_pending",
        "tidemark_timer_callbacks_in_flight",
        r#"tidemark_timer_runs_total{outcome="completed"}"#,
        r#"tidemark_timer_runs_total{outcome="failed"}"#,
        r#"tidemark_timer_runs_total{outcome="canceled"}"#,
        "tidemark_timers_created_total",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
}

#[tokio::test]
async fn https_callbacks_reach_whom_the_system_trusts_and_nobody_else() {
    let deployment = Deployment::new().await;
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let tls = tokio_rustls::rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.try_into().unwrap())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}/x", listener.local_addr().unwrap().port());
    // What is inside the encryption goes to a receiver as we have it elsewhere.
    let receiver = Receiver::start().await;
    let inside = receiver.url.strip_prefix("http://").unwrap().to_owned();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, inside) = (acceptor.clone(), inside.clone());
            tokio::spawn(async move {
                let mut encrypted = acceptor.accept(stream).await?;
                let mut plain = tokio::net::TcpStream::connect(inside).await?;
                tokio::io::copy_bidirectional(&mut encrypted, &mut plain).await
            });
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let trusted = folder.path().join("ca.pem");
    std::fs::write(&trusted, made.cert.pem()).unwrap();
    for (trusts, status) in [(true, "completed"), (false, "failed")] {
        let mut settings =
            vec![("TIDEMARK__TIMERS__MIN_DELAY", "0s"), ("TIDEMARK__TIMERS__ALLOW_NETWORKS", "127.0.0.0/8,::1")];
        if trusts {
            settings.push(("SSL_CERT_FILE", trusted.to_str().unwrap()));
        }
        let mut process = deployment.spawn_with(&settings);
        process.is_ready().await;
        let http = process.http().await.key(API_KEY);
        let timer =
            set(&http, json!({ "execute_in": "5ms", "callback": { "type": "http", "url": url, "payload": 1 } })).await;
        let timer = until(&http, &timer["id"], status).await;
        let expected =
            if trusts { Value::Null } else { json!("connection failed: invalid peer certificate: UnknownIssuer") };
        assert_eq!(timer["last_error"], expected, "{timer}");
    }
    assert_eq!(receiver.received().len(), 1);
}
