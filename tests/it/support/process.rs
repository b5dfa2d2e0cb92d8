//! A `tidemark` that runs as a process of its own.

use std::{
    collections::HashMap,
    fs::File,
    io::Read,
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use nix::sys::signal::Signal;
use tidemark::embedded::Child;
use tokio::{io::AsyncWriteExt, time::timeout};

use super::{Http, servers::folder};

const PATIENCE: Duration = Duration::from_secs(60);

/// Killed when dropped, and when the tests end.
pub struct Process(Child);

impl Process {
    pub fn spawn(arguments: &[&str], environment: HashMap<String, String>) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let log = folder().join(format!("process-{}.log", COUNT.fetch_add(1, Ordering::Relaxed)));
        Self(Child::spawn("tidemark", command(arguments, environment), log, Signal::SIGTERM).unwrap())
    }

    /// Everything that it has printed so far.
    fn printed(&self) -> String {
        std::fs::read_to_string(self.0.log()).unwrap()
    }

    /// Waits until it has printed this, and returns the line.
    pub async fn prints(&mut self, text: &str) -> String {
        let look = async {
            loop {
                let ended = self.0.ended().unwrap();
                if let Some(line) = self.printed().lines().find(|line| line.contains(text)) {
                    return line.to_owned();
                }
                assert!(ended.is_none(), "ended without printing {text:?}:\n{}", self.printed());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        match timeout(PATIENCE, look).await {
            Ok(line) => line,
            Err(_) => panic!("never printed {text:?}:\n{}", self.printed()),
        }
    }

    /// The lines so far that begin like this.
    pub fn printed_lines(&self, start: &str) -> Vec<String> {
        self.printed().lines().filter(|line| line.starts_with(start)).map(str::to_owned).collect()
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
        self.0.signal(signal);
    }

    /// As a power failure would.
    pub fn kill(&mut self) {
        self.0.kill();
    }

    /// Waits for its end: the exit code, and everything that it printed.
    pub async fn ended(&mut self) -> (Option<i32>, String) {
        let look = async {
            loop {
                if let Some(status) = self.0.ended().unwrap() {
                    return status.code();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let code = timeout(PATIENCE, look).await.expect("it never ended");
        (code, self.printed())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a command to its end: exit code, stdout, stderr.
pub async fn tidemark(arguments: &[&str], environment: HashMap<String, String>) -> (Option<i32>, String, String) {
    tidemark_reading(arguments, environment, "").await
}

/// The same with something on stdin.
pub async fn tidemark_reading(
    arguments: &[&str],
    environment: HashMap<String, String>,
    input: &str,
) -> (Option<i32>, String, String) {
    let mut command = tokio::process::Command::from(command(arguments, environment));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    // One that does not read is no error.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes()).await;
    let output = timeout(PATIENCE, child.wait_with_output()).await.expect("it never ended").unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The same on a terminal: exit code, and what a person sees.
pub async fn tidemark_on_a_terminal(arguments: &[&str], environment: HashMap<String, String>) -> (Option<i32>, String) {
    let pty = nix::pty::openpty(None, None).unwrap();
    let shown = tokio::task::spawn_blocking(move || {
        let (mut terminal, mut shown, mut buffer) = (File::from(pty.master), Vec::new(), [0; 4096]);
        // An error is how a terminal says that everybody has left it.
        while let Ok(length @ 1..) = terminal.read(&mut buffer) {
            shown.extend_from_slice(&buffer[..length]);
        }
        String::from_utf8(shown).unwrap().replace("\r\n", "\n")
    });
    let mut command = tokio::process::Command::from(command(arguments, environment));
    command.env("TERM", "xterm").kill_on_drop(true);
    command.stdout(pty.slave.try_clone().unwrap()).stderr(pty.slave);
    let mut child = command.spawn().unwrap();
    drop(command);
    let status = timeout(PATIENCE, child.wait()).await.expect("it never ended").unwrap();
    (status.code(), shown.await.unwrap())
}

fn command(arguments: &[&str], environment: HashMap<String, String>) -> Command {
    let mut command = Command::new(PathBuf::from(env!("CARGO_BIN_EXE_tidemark")));
    // Nothing of the machine's own settings, but what finding the servers needs.
    let kept = ["PATH", "HOME", "XDG_CACHE_HOME", "TIDEMARK_CACHE", "TIDEMARK_NATS_SERVER", "TIDEMARK_PG_BIN"];
    let is_kept = |name: &str| kept.contains(&name) || name.starts_with("PIP_");
    command.args(arguments).env_clear().envs(std::env::vars().filter(|(name, _)| is_kept(name)));
    command.envs(environment).current_dir(std::env::temp_dir()).stdin(Stdio::null());
    command
}
