//! Starting: several at once, with vanished streams, with a configuration that makes no sense.

use async_nats::jetstream;
use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::{API_KEY, Deployment, Process, tidemark};

#[tokio::test]
async fn three_processes_start_at_once_on_empty_stores() {
    let deployment = Deployment::empty().await;
    let mut processes: Vec<_> = (0..3).map(|_| deployment.spawn(&[])).collect();
    join_all(processes.iter_mut().map(Process::is_ready)).await;
    let https = join_all(processes.iter_mut().map(Process::http)).await;
    https[0].make_key("k", 0).await;
    for http in &https {
        let answer = http.get("/ready").await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    let applied: i64 = sqlx::query_scalar("select count(*) from _sqlx_migrations where success")
        .fetch_one(&deployment.database().await)
        .await
        .unwrap();
    assert_eq!(applied as usize, tidemark::database::MIGRATIONS.iter().count());
    for process in &processes {
        process.signal(nix::sys::signal::Signal::SIGTERM);
    }
    for process in &mut processes {
        let (code, printed) = process.ended().await;
        assert_eq!(code, Some(0), "{printed}");
        assert!(!printed.contains("\"ERROR\""), "{printed}");
        let (_, on_its_way_out) = printed.split_once("\"stopping\"").unwrap();
        assert!(!on_its_way_out.contains("\"WARN\""), "{printed}");
    }
}

#[tokio::test]
async fn a_bucket_that_vanished_or_was_remade_is_refused() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let daily =
        json!([{"type": "date-format", "format": "yyyyMMdd-"}, {"type": "auto-increment", "reset_scope": "date"}]);
    let whole = json!([{"type": "auto-increment"}]);
    let keys = [
        ("increment", json!({"key": "k", "base": 0})),
        ("formatted", json!({"key": "daily", "parts": daily})),
        ("formatted", json!({"key": "whole", "parts": whole})),
        ("snowflake", json!({"key": "s", "base_ts": 0, "ts_size": 41, "worker_id_size": 10, "seq_size": 12})),
    ];
    for (id_type, body) in &keys {
        server.http().configure(id_type, body.clone()).await;
    }
    let paths =
        ["increment?key=k", "formatted?key=daily", "formatted?key=whole", "snowflake?key=s", "snowflake/next?key=s"];
    let caller = server.http().key(API_KEY);
    for path in paths {
        caller.data(&format!("/v1/id/{path}")).await;
    }
    server.stop().await;

    let jetstream = jetstream::new(deployment.nats().await);
    jetstream.delete_stream("KV_tm_counters").await.unwrap();
    let (code, printed) = deployment.spawn(&[]).ended().await;
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("KV_tm_counters is missing") && printed.contains("--fresh"), "{printed}");
    assert!(jetstream.get_stream("KV_tm_counters").await.is_err(), "a refused start makes nothing");

    // An empty one of the same name is as bad: it would give every id again.
    let config = jetstream::kv::Config { bucket: "tm_counters".into(), ..Default::default() };
    jetstream.create_key_value(config).await.unwrap();
    let (code, printed) = deployment.spawn(&[]).ended().await;
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("was deleted and made anew"), "{printed}");

    let mut meant = deployment.spawn(&["--fresh"]);
    meant.is_ready().await;
    let caller = meant.http().await.key(API_KEY);
    assert_eq!(caller.get("/v1/id/increment?key=k").await.json()["data"]["id"], json!([1]), "it was said to be meant");
    meant.kill();
    let mut after = deployment.spawn(&[]);
    after.is_ready().await;

    // Remade under a running process: nothing is counted from the start again, whatever is asked.
    let http = after.http().await;
    for path in paths {
        http.clone().key(API_KEY).data(&format!("/v1/id/{path}")).await;
    }
    for bucket in ["tm_counters", "tm_leases"] {
        jetstream.delete_stream(format!("KV_{bucket}")).await.unwrap();
        let config = jetstream::kv::Config { bucket: bucket.into(), ..Default::default() };
        jetstream.create_key_value(config).await.unwrap();
    }
    for (id_type, mut body) in keys {
        if id_type == "formatted" {
            let parts = body["parts"].as_array_mut().unwrap();
            parts.insert(0, json!({"type": "fixed-chars", "value": "A"}));
        }
        let again = http.clone().admin().post(&format!("/v1/config/{id_type}"), body).await;
        assert_eq!(again.status, 500, "{}", again.text);
        assert!(again.text.contains("--fresh"), "{}", again.text);
    }
    let caller = http.key(API_KEY);
    for path in [
        "increment?key=k&size=1000",
        "formatted?key=daily&size=1000",
        "formatted?key=whole&size=1000",
        "snowflake?key=s",
    ] {
        let refused = loop {
            // What was reserved before is still given.
            let answer = caller.get(&format!("/v1/id/{path}")).await;
            if answer.status != 200 {
                break answer;
            }
        };
        assert!(refused.status == 500 && refused.text.contains("--fresh"), "{path}: {}", refused.text);
    }
}

#[tokio::test]
async fn nonsense_in_the_configuration_stops_the_start_and_is_named() {
    for (variable, value, mentions) in [
        ("TIDEMARK__HTTP__PROT", "1", "prot"),
        ("TIDEMARK__AUTH__ADMIN_TOKEN", "short", "auth.admin_token"),
        ("API_KEY", "short", "auth.api_key"),
        ("TIDEMARK__JETSTREAM__REPLICAS", "2", "jetstream.replicas"),
        ("TIDEMARK__ROLES", "cook", "cook"),
        ("PORT", "eighty", "http.port"),
        ("DATABASE_URL", "not a url", "database.url"),
        ("RUST_LOG", "tidemark=loud", "RUST_LOG"),
        ("TIDEMARK_CONFIG", "/no/such/file.toml", "/no/such/file.toml"),
    ] {
        let environment = [(variable.to_owned(), value.to_owned())].into();
        let (code, out, err) = tidemark(&["serve"], environment).await;
        assert_eq!(code, Some(1), "{variable}: {out}{err}");
        assert!(err.contains(mentions) && err.lines().count() == 1, "{variable}: {err}");
    }
}

#[tokio::test]
async fn a_busy_http_port_is_one_clear_sentence() {
    let deployment = Deployment::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut environment = deployment.environment();
    environment.insert("PORT".into(), taken.local_addr().unwrap().port().to_string());
    let (code, _, err) = tidemark(&["serve"], environment).await;
    assert_eq!(code, Some(1));
    assert!(err.contains("http.port") && err.lines().count() == 1, "{err}");
}

#[tokio::test]
async fn logs_in_a_file_have_no_colours() {
    let deployment = Deployment::new().await;
    let mut environment = deployment.environment();
    environment.insert("TIDEMARK__TELEMETRY__LOG_FORMAT".into(), "pretty".into());
    let mut process = Process::spawn(&["serve"], environment);
    process.prints("ready").await;
    process.signal(Signal::SIGTERM);
    let (code, printed) = process.ended().await;
    assert_eq!(code, Some(0), "{printed}");
    assert!(!printed.contains('\x1b'), "{printed}");
}
