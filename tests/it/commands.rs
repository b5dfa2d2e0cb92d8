//! The command line.

use std::collections::HashMap;

use tidemark::embedded::{NatsServer, free_port};

use crate::support::{Deployment, UpInstance, servers::folder, tidemark};

#[tokio::test]
async fn help_and_bad_use() {
    let (code, out, _) = tidemark(&["--help"], HashMap::new()).await;
    assert_eq!(code, Some(0));
    for command in ["up", "serve", "migrate", "streams", "doctor", "instances", "openapi", "bench", "call"] {
        assert!(out.contains(command), "{out}");
        let (code, help, _) = tidemark(&[command, "--help"], HashMap::new()).await;
        assert!(code == Some(0) && help.contains("Usage"), "{command}: {help}");
    }
    for arguments in
        [&["dance"][..], &["serve", "--roles", "cook"], &["up", "--http-port", "99999"], &["call"], &["streams"], &[]]
    {
        let (code, _, err) = tidemark(arguments, HashMap::new()).await;
        assert_eq!(code, Some(2), "{arguments:?}: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }
    let broken = folder().join("broken.toml");
    std::fs::write(&broken, "[http]\nport 1").unwrap();
    let broken = broken.to_str().unwrap();
    let (code, _, err) = tidemark(&["doctor", "--config", broken], HashMap::new()).await;
    assert!(code == Some(1) && err.contains(&format!("{broken}: TOML parse error at line 2")), "{err}");
}

#[tokio::test]
async fn openapi_is_the_document_that_is_served() {
    let (code, out, _) = tidemark(&["openapi"], HashMap::new()).await;
    assert_eq!(code, Some(0));
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(document, tidemark::http::openapi_document());
}

#[tokio::test]
async fn call_prints_the_reply_or_says_what_is_wrong() {
    let up = UpInstance::shared().await;
    let operator = up.env.clone();
    let acme = HashMap::from([("NATS_URL".to_owned(), up.env["NATS_URL_ACME"].clone())]);
    let (code, out, err) =
        tidemark(&["call", "tm.id.config.set-increment.calls", r#"{"base": 5}"#], operator.clone()).await;
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains(r#""current":5"#), "{out}");
    let tenant = ["call", "--inbox-prefix", "_INBOX_acme"];
    let (code, out, err) = tidemark(&[&tenant[..], &["tm.id.increment.calls"]].concat(), acme.clone()).await;
    assert_eq!((code, out.as_str()), (Some(0), "{\"id\":[6]}\n"), "{err}");
    let once = ["call", "tm.id.increment.calls", "-H", "Idempotency-Key: x"];
    let (_, first, _) = tidemark(&once, operator.clone()).await;
    assert_eq!(tidemark(&once, operator.clone()).await.1, first);

    for (arguments, environment, mentions) in [
        (vec!["call", "tm.id.increment.nope"], &operator, "404 not_found"),
        (vec!["call", "tm.id.increment.calls", "{"], &operator, "400 invalid_request"),
        (vec!["call", "tm.nobody.home"], &operator, "nobody answers"),
        (vec!["call", "not a subject"], &operator, "not a subject"),
        (vec!["call", "-H", "nonsense", "tm.id.increment.calls"], &operator, "--header"),
        ([&tenant[..], &["tm.admin.key-list"]].concat(), &acme, "Permissions Violation"),
        (vec!["call", "tm.id.increment.calls"], &acme, "Permissions Violation"),
        (vec!["call", "x"], &HashMap::from([("NATS_URL".into(), "nats://127.0.0.1:1".into())]), "not reachable"),
    ] {
        let (code, out, err) = tidemark(&arguments, environment.clone()).await;
        assert_eq!(code, Some(1), "{arguments:?}: {out}{err}");
        assert!(err.contains(mentions) && err.lines().count() == 1, "{arguments:?}: {err}");
    }
}

#[tokio::test]
async fn doctor_finds_nothing_where_all_is_well_and_says_what_to_do_where_not() {
    let up = UpInstance::shared().await;
    let (code, out, err) = tidemark(&["doctor"], up.service_env()).await;
    assert_eq!(code, Some(0), "{out}{err}");
    for line in ["NATS version", "sync policy", "NATS clock", "stream", "replicas", "PostgreSQL", "migrations"] {
        assert!(out.contains(line), "{line}: {out}");
    }
    assert!(!out.contains("WRONG"), "{out}");
    // Whoever calls the service is not the service.
    let (code, out, _) = tidemark(&["doctor"], up.env.clone()).await;
    assert!(code == Some(1) && out.contains("are these the service's own credentials?"), "{out}");

    let deployment = Deployment::empty().await;
    let mut environment = deployment.environment();
    environment.remove("TIDEMARK__NATS__MONITOR_URL");
    let (code, out, _) = tidemark(&["doctor"], environment.clone()).await;
    assert_eq!(code, Some(1));
    for advice in ["set nats.monitor_url", "run `tidemark streams apply`", "run `tidemark migrate`"] {
        assert!(out.contains(advice), "{advice}: {out}");
    }
    let (code, _, err) = tidemark(&["migrate"], environment.clone()).await;
    assert_eq!(code, Some(0), "{err}");
    let newer = "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
        values (99990101000000, 'of tomorrow', true, '', 0)";
    sqlx::query(newer).execute(&deployment.database().await).await.unwrap();
    let (_, out, _) = tidemark(&["doctor"], environment.clone()).await;
    assert!(out.contains("1 applied by another version"), "{out}");

    let store = folder().join("lax");
    let lax = format!("jetstream {{ store_dir: {store:?}, sync_interval: \"30s\" }}");
    let lax = NatsServer::start(&store, free_port(0, "").unwrap(), &lax).await.unwrap();
    environment.insert("NATS_URL".into(), format!("nats://127.0.0.1:{}", lax.port));
    environment.insert("TIDEMARK__NATS__MONITOR_URL".into(), lax.monitor_url());
    let (code, out, _) = tidemark(&["doctor"], environment.clone()).await;
    assert_eq!(code, Some(1));
    for advice in ["syncs every 30s", "set jetstream { sync_interval: always }", "lets everyone in"] {
        assert!(out.contains(advice), "{advice}: {out}");
    }

    environment.insert("NATS_URL".into(), "nats://127.0.0.1:1".into());
    environment.insert("DATABASE_URL".into(), "postgres://127.0.0.1:1/x".into());
    let (code, out, _) = tidemark(&["doctor"], environment).await;
    assert_eq!(code, Some(1));
    assert!(out.contains("check nats.url") && out.contains("check DATABASE_URL"), "{out}");
}
