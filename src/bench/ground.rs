//! What is measured on: servers of its own, a deployment, and an echo to compare with.

use std::path::PathBuf;

use async_nats::{ConnectOptions, service::ServiceExt};
use futures::StreamExt;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    api::Name,
    client::Client,
    config::{Config, Secret},
    embedded::{Up, UpOptions},
    jetstream::connect_to,
    server::Server,
};

/// The subject of the emptiest endpoint there is.
pub const ECHO: &str = "bench.echo";

const ADMIN_TOKEN: &str = "the admin token of a benchmark, known to all";

pub struct Ground {
    pub url: String,
    folder: PathBuf,
    up: Up,
    config: Config,
    stop: CancellationToken,
    serving: JoinSet<()>,
    echo: JoinHandle<()>,
}

impl Ground {
    /// Starts servers in a temporary folder, and one instance with all roles.
    pub async fn prepare() -> Self {
        let folder = std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id()));
        let options = UpOptions { data: folder.clone(), http_port: 0, nats_port: 0, pg_port: 0, tenants: Vec::new() };
        let mut config = Config::from_parts(None, Default::default()).expect("the defaults are valid");
        let up = Up::start(&options, &config).await.expect("the servers start");
        up.configure(&mut config);
        config.auth.admin_token = Some(Secret::new(ADMIN_TOKEN));
        let nats = connect_to(ConnectOptions::new(), config.nats.url.expose()).await.expect("NATS answers");
        let (stop, mut serving) = (CancellationToken::new(), JoinSet::new());
        let url = serve(config.clone(), &stop, &mut serving).await;
        Self { url, folder, up, config, stop, serving, echo: tokio::spawn(echo(nats)) }
    }

    /// Serves another deployment on the same servers, by as many instances.
    pub async fn serve_beside(&self, prefix: &str, instances: usize) -> Beside {
        let (stop, mut serving) = (CancellationToken::new(), JoinSet::new());
        let mut config = self.config.clone();
        config.nats.prefix = prefix.parse().expect("a name");
        for _ in 0..instances {
            config.http.port = 0;
            serve(config.clone(), &stop, &mut serving).await;
        }
        Beside { client: self.client_of(prefix).await, stop, serving }
    }

    pub async fn nats(&self) -> async_nats::Client {
        connect_to(ConnectOptions::new(), self.config.nats.url.expose()).await.expect("NATS answers")
    }

    pub async fn client(&self) -> Client {
        self.client_of("tm").await
    }

    async fn client_of(&self, prefix: &str) -> Client {
        Client::new(self.nats().await, prefix.parse::<Name>().expect("a name"))
    }

    pub fn admin_token(&self) -> &'static str {
        ADMIN_TOKEN
    }

    pub async fn clear(mut self) {
        self.stop.cancel();
        while self.serving.join_next().await.is_some() {}
        self.echo.abort();
        self.up.stop().await;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A second deployment while it runs.
pub struct Beside {
    pub client: Client,
    stop: CancellationToken,
    serving: JoinSet<()>,
}

impl Beside {
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.serving.join_next().await.is_some() {}
    }
}

async fn serve(config: Config, stop: &CancellationToken, serving: &mut JoinSet<()>) -> String {
    let server = Server::bind(config).await.expect("the server binds");
    let url = server.address().map(|address| format!("http://{address}")).unwrap_or_default();
    let (mut ready, stop) = (server.is_ready(), stop.clone());
    serving.spawn(async move { server.run(stop).await.expect("a clean stop") });
    ready.wait_for(|ready| *ready).await.expect("the server starts");
    url
}

async fn echo(client: async_nats::Client) {
    let service = client.service_builder().start("echo", "1.0.0").await.expect("the echo starts");
    let endpoint = service.endpoint(ECHO).await.expect("the echo listens");
    endpoint
        .for_each_concurrent(1024, async |request| {
            request.respond(Ok(request.message.payload.clone())).await.expect("the echo answers");
        })
        .await;
}
