//! A whole `tidemark up`, with two tenants.

use std::{collections::HashMap, path::PathBuf};

use tokio::sync::OnceCell;

use super::{Http, Process, servers::folder};

pub struct UpInstance {
    pub process: Process,
    pub data: PathBuf,
    /// What `DIR/env` sets.
    pub env: HashMap<String, String>,
}

impl UpInstance {
    /// One that all tests share.
    pub async fn shared() -> &'static UpInstance {
        static SHARED: OnceCell<UpInstance> = OnceCell::const_new();
        SHARED.get_or_init(|| Self::start(folder().join("up"))).await
    }

    pub async fn start(data: PathBuf) -> Self {
        let arguments =
            ["up", "--data", data.to_str().unwrap(), "--http-port", "0", "--nats-port", "0", "--pg-port", "0"];
        let tenants = HashMap::from([("TIDEMARK_TENANTS".to_owned(), "acme,glo-bex".to_owned())]);
        let mut process = Process::spawn(&arguments, tenants);
        process.prints("Tidemark is up").await;
        let env = exported(&data.join("env"));
        Self { process, data, env }
    }

    pub fn http(&self) -> Http {
        Http::new(&self.env["TIDEMARK_URL"])
    }

    /// What `DIR/service.env` sets.
    pub fn service_env(&self) -> HashMap<String, String> {
        exported(&self.data.join("service.env"))
    }
}

fn exported(file: &std::path::Path) -> HashMap<String, String> {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines()
        .map(|line| {
            let (name, value) = line.strip_prefix("export ").unwrap().split_once('=').unwrap();
            (name.to_owned(), value.trim_matches('\'').to_owned())
        })
        .collect()
}
