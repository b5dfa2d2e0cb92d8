//! nats-server with JetStream, every write synced.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::{Child, Doing, EmbeddedError, Result, find, free_port};

/// How long a start may take, large stores included.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running nats-server on loopback.
pub struct NatsServer {
    child: Child,
    binary: PathBuf,
    folder: PathBuf,
    pub port: u16,
    pub monitor_port: u16,
}

impl NatsServer {
    /// Starts it in a folder. `callers` is the part of the configuration that says who may do what.
    pub async fn start(folder: &Path, port: u16, callers: &str) -> Result<Self> {
        let binary = tokio::task::spawn_blocking(find::nats_server).await.expect("the search does not panic")?;
        let monitor_port = free_port(0, "")?;
        std::fs::create_dir_all(folder).doing(|| format!("making {}", folder.display()))?;
        let quoted = |path: PathBuf| serde_json::Value::from(path.to_string_lossy()).to_string();
        let configuration = format!(
            "# Written by `tidemark up` at every start.\n\
             server_name: tidemark\n\
             listen: \"127.0.0.1:{port}\"\n\
             http: \"127.0.0.1:{monitor_port}\"\n\
             # A stored message is on disk before it is acknowledged.\n\
             jetstream {{ store_dir: {store}, sync_interval: always }}\n\
             {callers}",
            store = quoted(folder.join("jetstream")),
        );
        super::up::write_private(&folder.join("nats.conf"), &configuration)?;
        let child = spawn(&binary, folder)?;
        let mut server = Self { child, binary, folder: folder.to_owned(), port, monitor_port };
        server.wait().await?;
        Ok(server)
    }

    pub fn monitor_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.monitor_port)
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Starts it again after a stop or a kill, on the same ports and data.
    pub async fn restart(&mut self) -> Result<()> {
        self.child = spawn(&self.binary, &self.folder)?;
        self.wait().await
    }

    pub fn stop(&mut self) {
        self.child.stop(Duration::from_secs(10));
    }

    pub fn kill(&mut self) {
        self.child.kill();
    }

    async fn wait(&mut self) -> Result<()> {
        let url = format!("{}/healthz", self.monitor_url());
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.child.check()?;
            if reqwest::get(&url).await.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let words = self.child.last_words();
                return Err(EmbeddedError::new(format!("nats-server is not ready after {PATIENCE:?}: {words}")));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn spawn(binary: &Path, folder: &Path) -> Result<Child> {
    let mut command = Command::new(binary);
    command.arg("--config").arg(folder.join("nats.conf"));
    Child::spawn("nats-server", command, folder.join("nats.log"), Signal::SIGTERM)
}
