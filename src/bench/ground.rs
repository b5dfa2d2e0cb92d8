//! What is measured on: servers of its own, a deployment, and an echo to compare with.

use std::path::PathBuf;

use async_nats::{ConnectOptions, service::ServiceExt};
use futures::StreamExt;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::Effort;
use crate::{
    api::Name,
    client::Client,
    config::{Config, Secret},
    embedded::{Up, UpOptions},
    jetstream::connect_to,
    roles::Role,
    server::Server,
};

/// The subject of the emptiest endpoint there is.
pub const ECHO: &str = "bench.echo";

pub const ADMIN_TOKEN: &str = "the admin token of a benchmark, known to all";

pub struct Ground {
    pub url: String,
    pub effort: Effort,
    folder: PathBuf,
    up: Up,
    config: Config,
    serving: Serving,
    echo: JoinHandle<()>,
}

impl Ground {
    /// Starts servers in a temporary folder, and one instance with all roles.
    pub async fn prepare(effort: Effort) -> Self {
        let folder = std::env::temp_dir().join(format!("tidemark-bench-{}", std::process::id()));
        let options = UpOptions { data: folder.clone(), http_port: 0, nats_port: 0, pg_port: 0, tenants: Vec::new() };
        let mut config = Config::from_parts(None, Default::default()).expect("the defaults are valid");
        let up = Up::start(&options, &config).await.expect("the servers start");
        up.configure(&mut config);
        config.auth.admin_token = Some(Secret::new(ADMIN_TOKEN));
        config.timers.rate_limit = 0;
        config.usage.backfill_rate = 1_000_000;
        for limits in [&mut config.usage.limits.tenant, &mut config.usage.limits.source] {
            (limits.sustained_rate, limits.burst_size) = (1_000_000_000, 1_000_000_000);
            limits.max_bytes_per_sec = u32::MAX;
        }
        let echo = tokio::spawn(echo(connect(&config).await));
        let (serving, url) = Serving::start(&config, 1).await;
        Self { url, effort, folder, up, config, serving, echo }
    }

    /// Serves another deployment on the same servers, by as many instances.
    pub async fn serve_beside(&self, prefix: &str, instances: usize) -> Beside {
        let mut config = self.config.clone();
        config.nats.prefix = prefix.parse().expect("a name");
        config.http.port = 0;
        config.usage.subject = format!("usage-{prefix}").parse().expect("a name");
        // Timers and usage are the database's, and that is the first deployment's.
        config.roles.retain(|role| !matches!(role, Role::Timers | Role::Usage));
        let (serving, _) = Serving::start(&config, instances).await;
        Beside { client: self.client_of(prefix).await, serving }
    }

    /// Makes sure that so many timers wait for a far day.
    pub async fn have_far_timers(&self, count: i64) {
        let database = self.database().await;
        let fill = "insert into timers (id, tenant, created_at, updated_at, execute_at, due_at, callback_type,
                 callback_config, destination)
             select gen_random_uuid(), 'far', now(), now(), far, far, 'nats', '{\"type\":\"nats\",\"topic\":\"a.b\"}', 'nats'
             from (select now() + interval '30 days' + number * interval '1 second' as far
                 from generate_series(1, $1 - (select count(*) from timers where tenant = 'far')) as number) as made";
        sqlx::query(fill).bind(count).execute(&database).await.expect("the rows are made");
        sqlx::query("vacuum analyze timers").execute(&database).await.expect("the rows are counted");
        database.close().await;
    }

    /// What a process of its own is told to serve another deployment on the same servers, at this port.
    pub fn environment(&self, prefix: &str, port: u16) -> Vec<(String, String)> {
        let url = self.config.database.url.as_ref().expect("up has one");
        let variables = [
            ("NATS_URL", self.config.nats.url.expose().to_owned()),
            ("DATABASE_URL", url.expose().to_owned()),
            ("PORT", port.to_string()),
            ("TIDEMARK__NATS__PREFIX", prefix.to_owned()),
            ("TIDEMARK__USAGE__SUBJECT", format!("usage-{prefix}")),
            ("TIDEMARK__AUTH__ADMIN_TOKEN", ADMIN_TOKEN.to_owned()),
            ("TIDEMARK__TELEMETRY__LOG_LEVEL", "error".to_owned()),
        ];
        variables.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// Which versions it all runs on.
    pub async fn servers(&self) -> String {
        let nats = self.nats().await.server_info().version;
        let show = sqlx::query_scalar("show server_version");
        let postgres: String = show.fetch_one(&self.database().await).await.expect("a version");
        let postgres = postgres.split(' ').next().unwrap_or_default();
        format!("nats-server {nats} (`sync_interval: always`) and PostgreSQL {postgres}")
    }

    pub async fn database(&self) -> sqlx::PgPool {
        let url = self.config.database.url.as_ref().expect("up has one");
        sqlx::PgPool::connect(url.expose()).await.expect("PostgreSQL answers")
    }

    pub async fn nats(&self) -> async_nats::Client {
        connect(&self.config).await
    }

    pub async fn client(&self) -> Client {
        self.client_of("tm").await
    }

    async fn client_of(&self, prefix: &str) -> Client {
        Client::new(self.nats().await, prefix.parse::<Name>().expect("a name"))
    }

    pub async fn clear(self) {
        self.serving.stop().await;
        self.echo.abort();
        self.up.stop().await;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A second deployment while it runs.
pub struct Beside {
    pub client: Client,
    serving: Serving,
}

impl Beside {
    pub async fn stop(self) {
        self.serving.stop().await;
    }
}

/// Instances that run.
struct Serving {
    stop: CancellationToken,
    instances: JoinSet<()>,
}

impl Serving {
    /// Starts them, and tells where the last of them listens.
    async fn start(config: &Config, count: usize) -> (Self, String) {
        let (mut serving, mut url) =
            (Self { stop: CancellationToken::new(), instances: JoinSet::new() }, String::new());
        for _ in 0..count {
            let server = Server::bind(config.clone()).await.expect("the server binds");
            url = server.address().map(|address| format!("http://{address}")).unwrap_or_default();
            let (mut ready, stop) = (server.is_ready(), serving.stop.clone());
            serving.instances.spawn(async move { server.run(stop).await.expect("a clean stop") });
            ready.wait_for(|ready| *ready).await.expect("the server starts");
        }
        (serving, url)
    }

    async fn stop(mut self) {
        self.stop.cancel();
        while self.instances.join_next().await.is_some() {}
    }
}

async fn connect(config: &Config) -> async_nats::Client {
    connect_to(ConnectOptions::new(), config.nats.url.expose()).await.expect("NATS answers")
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
