//! Every example, run as its first lines say.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout},
    time::timeout,
};

use crate::support::{UpInstance, tidemark};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

/// Runs a program to its end and returns what it printed.
async fn run(mut command: Command, environment: &HashMap<String, String>) -> String {
    command.envs(environment);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{errors}");
    printed.into_owned()
}

#[tokio::test]
async fn curl() {
    let up = UpInstance::shared().await;
    let printed = run(Command::new(example("curl.sh")), &up.env).await;
    assert!(printed.contains(r#""id":[1,2,3]"#), "{printed}");
    assert!(printed.contains(r#"["000000000","02870v844"]"#), "{printed}");
    let stages: Vec<&str> = printed.lines().filter(|line| line.contains("stage_id")).collect();
    assert!(stages.len() == 2 && stages[0] == stages[1], "{printed}");
    assert!(printed.contains("total_records"), "{printed}");
}

#[tokio::test]
async fn plain_nats_from_python() {
    let up = UpInstance::shared().await;
    let library = tempfile::tempdir().unwrap();
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--target"]).arg(library.path()).arg("nats-py");
    run(pip, &HashMap::new()).await;
    let mut python = Command::new("python3");
    python.arg(example("plain_nats.py")).env("PYTHONPATH", library.path());
    let printed = run(python, &up.env).await;
    for line in ["ids [101, 102, 103]", "timer pending", "usage is kept in tm_USAGE", "refused: 404", "heard {'hello"] {
        assert!(printed.contains(line), "{line}: {printed}");
    }
}

#[tokio::test]
async fn a_service_in_rust() {
    let up = UpInstance::shared().await;
    let (code, _, err) = tidemark(&["id", "config", "set-increment", "orders"], up.env.clone()).await;
    assert_eq!(code, Some(0), "{err}");
    let unit = json!({
        "name": "orders_placed", "metric_kind": "gauge", "base_unit": "order", "schema": { "type": "object" },
        "allowed_sources": ["default"],
    });
    let (code, _, err) = tidemark(&["call", "tm.usage.unit-register", &unit.to_string()], up.env.clone()).await;
    assert_eq!(code, Some(0), "{err}");
    // Built with the tests, beside them.
    let build = Path::new(env!("CARGO_BIN_EXE_tidemark")).parent().unwrap();
    let printed = run(Command::new(build.join("examples/service")), &up.env).await;
    for line in ["order ", "stage ", "is pending", "1 usage records accepted"] {
        assert!(printed.contains(line), "{line}: {printed}");
    }
}

/// The receiver while it runs.
struct Receiver {
    _process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    url: String,
}

impl Receiver {
    async fn start(secret: &str) -> Self {
        let mut process = tokio::process::Command::new("python3")
            .arg(example("webhook_receiver.py"))
            .arg("0")
            .env("TIDEMARK_WEBHOOK_SECRET", secret)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let first = lines.next_line().await.unwrap().unwrap();
        let url = format!("http://127.0.0.1:{}/", first.rsplit(' ').next().unwrap());
        Self { _process: process, lines, url }
    }

    async fn next(&mut self) -> String {
        let line = timeout(Duration::from_secs(30), self.lines.next_line()).await;
        line.expect("it prints a line").unwrap().unwrap()
    }
}

#[tokio::test]
async fn a_receiver_believes_what_is_signed() {
    let up = UpInstance::shared().await;
    let http = up.http().key(&up.env["TIDEMARK_API_KEY"]);
    let fire = async |url: &str| {
        let callback = json!({ "type": "http", "url": url, "payload": { "order": 17 } });
        let answer = http.post("/timers", json!({ "execute_in": "5s", "callback": callback })).await;
        let timer: Value = answer.json()["data"].clone();
        let fired = http.post(&format!("/timers/{}/fire", timer["id"].as_str().unwrap()), json!({})).await;
        assert_eq!(fired.status, 200, "{}", fired.text);
    };
    let mut receiver = Receiver::start(&up.env["TIDEMARK_WEBHOOK_SECRET"]).await;
    fire(&receiver.url).await;
    let line = receiver.next().await;
    assert!(line.starts_with("received ") && line.contains(r#""order":17"#), "{line}");

    let mut stranger = Receiver::start("whsec_c29tZWJvZHkgZWxzZSdzIHNlY3JldA==").await;
    fire(&stranger.url).await;
    assert_eq!(stranger.next().await, "refused");
}
