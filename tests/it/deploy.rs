//! The deployment files: what the compose files name is there, and nats-server grants what its configuration says.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use async_nats::ConnectOptions;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tidemark::{
    api::{self, Operation, Scope},
    client::{Client, Refusals},
    config::{Config, Secret},
    embedded::{Child, find_nats_server, free_port},
    jetstream::connect_to,
};

use crate::support::{Deployment, eventually, name, servers::folder};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Variables that a text takes from the environment, and whether it has a value for when there is none.
fn variables(text: &str) -> Vec<(String, bool)> {
    let is_name = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_';
    let variable = |part: &str| {
        let part = part.strip_prefix('{').unwrap_or(part);
        let end = part.find(|letter| !is_name(letter)).unwrap_or(part.len());
        (!part[..end].is_empty()).then(|| (part[..end].to_owned(), part[end..].starts_with(":-")))
    };
    text.split('$').skip(1).filter_map(variable).collect()
}

/// Without comments.
fn code(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with('#')).map(|line| format!("{line}\n")).collect()
}

/// The variables of env.example that must be filled in.
fn required() -> BTreeSet<String> {
    let example = text("deploy/env.example");
    example.lines().filter_map(|line| line.strip_suffix('=')).map(str::to_owned).collect()
}

#[tokio::test]
async fn compose_files_name_what_is_there() {
    for file in ["docker-compose.yml", "docker-compose.cluster.yml"] {
        let written = text(file);
        let compose: Value = serde_saphyr::from_str(&written).unwrap_or_else(|error| panic!("{file}: {error}"));
        let (example, required) = (text("deploy/env.example"), required());
        for (variable, has_default) in variables(&code(&written)) {
            assert!(required.contains(&variable) || has_default, "{file}: {variable} is in no env.example");
            assert!(!has_default || example.contains(&format!("# {variable}=")), "{file}: {variable} is not described");
        }
        let services = compose["services"].as_object().unwrap();
        for (service, settings) in services {
            let mounted = check_mounts(file, &compose, settings);
            if let Some(config) = settings["command"].as_array().and_then(|words| words.last()?.as_str()) {
                let found = mounted
                    .iter()
                    .find_map(|(from, to)| Some(from.join(config.strip_prefix(to)?.trim_start_matches('/'))));
                assert!(found.is_some_and(|path| path.is_file()), "{file}: {service}: {config} is not mounted");
            }
            if settings["build"].is_null() {
                assert!(settings["healthcheck"]["test"].is_array(), "{file}: {service} has no health check");
            }
            let waits = settings["depends_on"].as_object().into_iter().flatten();
            for (other, condition) in waits {
                assert!(services.contains_key(other) && condition["condition"] == "service_healthy", "{file}: {other}");
            }
            let environment = settings["environment"].as_object().cloned().unwrap_or_default();
            for (variable, value) in &environment {
                let secret = ["PASSWORD", "TOKEN", "SECRET"].iter().any(|word| variable.contains(word));
                let value = value.as_str().unwrap_or_default();
                assert!(!secret || value.starts_with("${"), "{file}: {service}: {variable} stands in the file");
            }
            if service.starts_with("tidemark") {
                check_settings(file, &environment);
            }
        }
    }
    let dockerfile = text("Dockerfile");
    assert!(dockerfile.contains("HEALTHCHECK") && dockerfile.contains("/ready"));
    for path in text(".dockerignore").lines().filter_map(|line| line.strip_prefix('!')) {
        assert!(repository(path).exists(), ".dockerignore: {path}");
    }
}

/// Where each folder of ours is mounted.
fn check_mounts(file: &str, compose: &Value, settings: &Value) -> Vec<(PathBuf, String)> {
    let mut ours = Vec::new();
    for volume in settings["volumes"].as_array().into_iter().flatten() {
        let parts: Vec<&str> = volume.as_str().unwrap().split(':').collect();
        match parts[0].strip_prefix("./") {
            Some(path) => {
                assert!(repository(path).is_dir(), "{file}: {path} is not there");
                assert_eq!(parts.get(2), Some(&"ro"), "{file}: {path} can be written to");
                ours.push((repository(path), parts[1].to_owned()));
            }
            None => assert!(compose["volumes"].as_object().unwrap().contains_key(parts[0]), "{file}: {}", parts[0]),
        }
    }
    ours
}

/// Every setting is one that we know, with a value that we take.
fn check_settings(file: &str, environment: &serde_json::Map<String, Value>) {
    let value = |value: &Value| {
        let mut text = value.as_str().unwrap().to_owned();
        while let Some((before, rest)) = text.split_once("${") {
            text = format!("{before}{}{}", "x".repeat(32), rest.split_once('}').unwrap().1);
        }
        text
    };
    let environment = environment.iter().map(|(name, text)| (name.clone(), value(text))).collect();
    let config = Config::from_parts(None, environment).unwrap_or_else(|error| panic!("{file}: {error}"));
    assert_eq!(config.http.host, "0.0.0.0");
    assert!(config.nats.monitor_url.is_some() && config.auth.admin_token.is_some());
    assert_eq!(config.jetstream.replicas, if file.contains("cluster") { 3 } else { 1 });
}

#[test]
fn the_dashboard_shows_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(&text("deploy/grafana/tidemark.json")).unwrap();
    let mut sources = String::new();
    let mut folders = vec![repository("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path => sources.push_str(&std::fs::read_to_string(path).unwrap_or_default()),
            }
        }
    }
    let panels = dashboard["panels"].to_string();
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words: BTreeSet<&str> = panels.split(|letter| !is_name(letter)).collect();
    let metrics: Vec<&&str> = words.iter().filter(|word| word.starts_with("tidemark_") && word.len() > 12).collect();
    assert!(metrics.len() > 20, "{metrics:?}");
    for metric in metrics {
        let written = ["_bucket", "_sum", "_count"].iter().find_map(|end| metric.strip_suffix(end)).unwrap_or(metric);
        assert!(sources.contains(&format!("\"{written}\"")), "{metric} is measured nowhere");
    }
}

/// What a tenant may call, as the declarations say.
fn callable() -> BTreeSet<String> {
    struct Subjects(BTreeSet<String>);
    impl api::Visitor for Subjects {
        fn visit<O: Operation>(&mut self) {
            let pattern = O::INFO.pattern(&name("tm"));
            match O::INFO.scope {
                Scope::Operator | Scope::Elevated => {}
                Scope::Mint => drop(self.0.insert(pattern)),
                _ => drop(self.0.insert(pattern.replacen('*', "acme", 1))),
            }
        }
    }
    let mut subjects = Subjects(BTreeSet::from(["usage.acme.*".to_owned()]));
    api::visit(&mut subjects);
    subjects.0
}

#[test]
fn a_tenants_account_has_the_subjects_of_the_declarations() {
    let written = code(&text("deploy/nats-tenant-acme.conf"));
    let (rights, imports) = written.split_once("imports:").unwrap();
    let (whole_tenant, _) = rights.split_once("acme.api-gateway").unwrap();
    let quoted = |text: &str| -> BTreeSet<String> { text.split('"').skip(1).step_by(2).map(str::to_owned).collect() };
    let (granted, imported) = (quoted(whole_tenant), quoted(imports));
    for subject in callable() {
        assert!(granted.contains(&subject), "{subject} is not granted");
        assert!(imported.contains(&subject), "{subject} is not imported");
    }
    let stray = |subject: &&String| subject.starts_with("tm.") && !subject.starts_with("tm.event.");
    for subject in granted.iter().chain(&imported).filter(stray) {
        assert!(callable().contains(subject), "{subject} is no operation of a tenant's");
    }
}

/// nats-server with the very files of `deploy/`; only where it listens and stores is this test's.
struct Nats {
    _server: Child,
    port: u16,
    monitor: u16,
    passwords: HashMap<String, String>,
}

impl Nats {
    async fn start() -> Self {
        let (port, monitor) = (free_port(0, "").unwrap(), free_port(0, "").unwrap());
        let mut passwords: HashMap<String, String> = required()
            .into_iter()
            .map(|variable| (variable.clone(), format!("tm{}", variable.to_lowercase())))
            .collect();
        passwords.insert("NATS_SERVER_NAME".into(), "nats-1".into());
        passwords.insert("NATS_STORE_DIR".into(), folder().join("deploy-nats").to_str().unwrap().into());
        let mut command = Command::new(tokio::task::spawn_blocking(find_nats_server).await.unwrap().unwrap());
        command.arg("--config").arg(repository("deploy/nats.conf"));
        command.args(["--addr", "127.0.0.1", "--port", &port.to_string(), "--http_port", &monitor.to_string()]);
        command.envs(&passwords);
        let server = Child::spawn("nats-server", command, folder().join("deploy-nats.log"), Signal::SIGTERM).unwrap();
        let nats = Self { _server: server, port, monitor, passwords };
        eventually("nats-server is up", async || {
            let health = reqwest::get(format!("http://127.0.0.1:{monitor}/healthz")).await.ok()?;
            health.status().is_success().then_some(())
        })
        .await;
        nats
    }

    fn url(&self, user: &str, variable: &str) -> String {
        format!("nats://{user}:{}@127.0.0.1:{}", self.passwords[variable], self.port)
    }

    /// A caller, who hears what is refused to him.
    async fn caller(&self, user: &str, variable: &str, inbox: &str) -> Client {
        let refusals = Refusals::default();
        let options = refusals.told_by(ConnectOptions::new().custom_inbox_prefix(inbox));
        let nats = connect_to(options, &self.url(user, variable)).await.unwrap();
        Client::new(nats, name("tm")).hearing(refusals)
    }
}

async fn ask(caller: &Client, subject: &str, body: Value) -> Result<Value, String> {
    let asked = caller.request(subject.to_owned(), Default::default(), body.to_string().into());
    let answer = tokio::time::timeout(Duration::from_secs(10), asked).await.expect("neither an answer nor a refusal");
    answer.map(|body| serde_json::from_slice(&body).unwrap()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn nats_grants_what_its_configuration_says() {
    let nats = Nats::start().await;
    let deployment = Deployment::new().await;
    let server = deployment
        .serve_with(|config| {
            config.nats.url = Secret::new(nats.url("tidemark.service", "TIDEMARK_NATS_PASSWORD"));
            config.nats.monitor_url = Some(format!("http://127.0.0.1:{}", nats.monitor));
        })
        .await;
    let operator = nats.caller("default", "TIDEMARK_NATS_OPERATOR_PASSWORD", "_INBOX").await;
    for key in ["orders", "invoices"] {
        ask(&operator, &format!("tm.id.config.set-increment.{key}"), json!({ "base": 0 })).await.unwrap();
    }
    ask(&operator, "tm.noid.create.books", json!({ "template": ".sdd" })).await.unwrap();
    ask(&operator, "tm.usage.source-register", json!({ "name": "api-gateway" })).await.unwrap();
    let unit = json!({
        "name": "calls", "metric_kind": "gauge", "base_unit": "call", "schema": { "type": "object" },
        "allowed_sources": ["api-gateway"],
    });
    ask(&operator, "tm.usage.unit-register", unit).await.unwrap();

    let refused = async |caller: &Client, subject: &str| {
        let refusal = ask(caller, subject, json!({})).await.expect_err(subject);
        assert!(refusal.contains("Permissions Violation") && refusal.contains(subject), "{subject}: {refusal}");
    };
    // A minting client: its keys alone.
    let shop = nats.caller("acme.shop", "ACME_SHOP_NATS_PASSWORD", "_INBOX_acme_shop").await;
    assert_eq!(ask(&shop, "tm.id.increment.orders", json!({})).await.unwrap(), json!({ "id": [1] }));
    assert_eq!(ask(&shop, "tm.noid.mint.books", json!({})).await.unwrap(), json!(["00"]));
    for subject in ["tm.id.increment.invoices", "tm.id.formatted.orders", "tm.noid.close.books", "usage.acme.shop"] {
        refused(&shop, subject).await;
    }
    // A source: its own usage alone.
    let gateway = nats.caller("acme.api-gateway", "ACME_API_GATEWAY_NATS_PASSWORD", "_INBOX_acme_api-gateway").await;
    let record = |key: &str| {
        json!([{
            "usage_type": "calls", "resource_id": "r", "value": 1, "event_timestamp": chrono::Utc::now(), "idempotency_key": key,
        }])
    };
    let verdict = ask(&gateway, "tm.usage.ingest.acme.api-gateway", record("asked")).await.unwrap();
    assert_eq!(verdict["accepted"], 1, "{verdict}");
    let kept = ask(&gateway, "usage.acme.api-gateway", record("published")).await.unwrap();
    assert_eq!(kept["stream"], "tm_USAGE", "{kept}");
    for subject in ["usage.acme.other", "usage.default.x", "tm.usage.ingest.acme.other", "tm.usage.query.acme"] {
        refused(&gateway, subject).await;
    }
    // A tenant: what is its own.
    let acme = nats.caller("acme", "ACME_NATS_PASSWORD", "_INBOX_acme").await;
    eventually("both records are in the ledger", async || {
        let page = ask(&acme, "tm.usage.query.acme", json!({})).await.unwrap();
        (page["records"].as_array().unwrap().len() == 2).then_some(())
    })
    .await;
    for subject in ["tm.usage.query.default", "tm.usage.backfill-elevated.acme.x", "tm.admin.key-list", "$JS.API.INFO"]
    {
        refused(&acme, subject).await;
    }
    // Nobody hears others' replies, nor gets in without a name.
    let curious = nats.caller("acme", "ACME_NATS_PASSWORD", "_INBOX").await;
    let refusal = ask(&curious, "tm.noid.list", json!({})).await.expect_err("replies of others could be heard");
    assert!(refusal.contains("Permissions Violation for Subscription"), "{refusal}");
    let anonymous = connect_to(ConnectOptions::new(), &format!("nats://127.0.0.1:{}", nats.port)).await;
    assert!(anonymous.is_err(), "a stranger got in");
    server.stop().await;
}
