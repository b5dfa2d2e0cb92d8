//! A `tidemark` that runs as a process of its own.

use std::{collections::HashMap, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::watch,
    time::timeout,
};

use super::Http;

const PATIENCE: Duration = Duration::from_secs(60);

/// Killed when dropped.
pub struct Process {
    child: Child,
    /// Everything that it has printed so far.
    printed: watch::Receiver<String>,
}

impl Process {
    pub async fn spawn(arguments: &[&str], environment: HashMap<String, String>) -> Self {
        let mut child = command(arguments, environment).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (printer, printed) = watch::channel(String::new());
        let (mut out, mut err) = (
            BufReader::new(child.stdout.take().unwrap()).lines(),
            BufReader::new(child.stderr.take().unwrap()).lines(),
        );
        tokio::spawn(async move {
            let (mut out_open, mut err_open) = (true, true);
            while out_open || err_open {
                let line = tokio::select! {
                    line = out.next_line(), if out_open => { out_open = matches!(line, Ok(Some(_))); line }
                    line = err.next_line(), if err_open => { err_open = matches!(line, Ok(Some(_))); line }
                };
                if let Ok(Some(line)) = line {
                    printer.send_modify(|text| text.extend([line.as_str(), "\n"]));
                }
            }
        });
        Self { child, printed }
    }

    /// Waits until it has printed this, and returns the line.
    pub async fn prints(&mut self, text: &str) -> String {
        let line = |printed: &String| printed.lines().find(|line| line.contains(text)).map(str::to_owned);
        let seen = timeout(PATIENCE, self.printed.wait_for(|printed| line(printed).is_some())).await;
        let seen = seen.is_ok_and(|seen| seen.is_ok());
        let printed = self.printed.borrow();
        line(&printed).filter(|_| seen).unwrap_or_else(|| panic!("never printed {text:?}:\n{}", *printed))
    }

    pub async fn is_ready(&mut self) {
        self.prints("\"message\":\"ready\"").await;
    }

    /// Its HTTP side, from the line that says where it listens.
    pub async fn http(&mut self) -> Http {
        let line: serde_json::Value = serde_json::from_str(&self.prints("HTTP listens").await).unwrap();
        Http::new(&format!("http://{}", line["address"].as_str().unwrap()))
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().unwrap() as i32), signal).unwrap();
    }

    /// As a power failure would.
    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// Waits for its end: the exit code, and everything that it printed.
    pub async fn ended(&mut self) -> (Option<i32>, String) {
        let status = timeout(PATIENCE, self.child.wait()).await.expect("it never ended").unwrap();
        // The pipes close with the process; then all of it is read.
        while self.printed.changed().await.is_ok() {}
        (status.code(), self.printed.borrow().clone())
    }
}

/// Runs a command to its end: exit code, stdout, stderr.
pub async fn tidemark(arguments: &[&str], environment: HashMap<String, String>) -> (Option<i32>, String, String) {
    let output = timeout(PATIENCE, command(arguments, environment).output()).await.expect("it never ended").unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn command(arguments: &[&str], environment: HashMap<String, String>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidemark"));
    // Nothing of the machine's own settings, but what finding the servers needs.
    let kept = ["PATH", "HOME", "XDG_CACHE_HOME", "TIDEMARK_NATS_SERVER", "TIDEMARK_PG_BIN"];
    let is_kept = |name: &str| kept.contains(&name) || name.starts_with("PIP_");
    command.args(arguments).env_clear().envs(std::env::vars().filter(|(name, _)| is_kept(name)));
    command.envs(environment).current_dir(std::env::temp_dir()).stdin(Stdio::null()).kill_on_drop(true);
    command
}
