//! `serve`: finds its servers, hosts its roles, answers until told to stop, and leaves cleanly.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    access::{Gate, Grant},
    api::{
        Name,
        admin::{CreateKey, ListKeys, RevokeKey},
        ids::{Increment, SetIncrement},
    },
    client::Client,
    clock::Clock,
    config::Config,
    database::{self, DatabaseError},
    error::chain,
    gateway::{Gateway, Hosted},
    http::{self, App, Health, Ready},
    ids::Ids,
    jetstream::{self, ApplyError, ConnectError},
    nats,
    registry::{Registry, keys::Keys},
    roles::Role,
    watermark::Bucket,
};

/// Why the process can't run. Everything else is waited for.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("http.port: {address} can't be listened on: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error(transparent)]
    Nats(#[from] ConnectError),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Streams(#[from] ApplyError),
    #[error("an API key could not be registered: {0}")]
    Keys(crate::error::Error),
}

/// A key that exists outside the registry and is to be known there.
#[derive(Debug, Clone)]
pub struct KnownKey {
    pub key: String,
    pub tenant: Name,
    pub source: Name,
    pub roles: Vec<Grant>,
}

/// One process of Tidemark.
pub struct Server {
    config: Arc<Config>,
    app: Arc<App>,
    database: PgPool,
    listener: Option<TcpListener>,
    is_ready: watch::Sender<bool>,
    /// A vanished or remade stream is meant.
    pub fresh: bool,
    pub known_keys: Vec<KnownKey>,
}

/// What runs once the servers are found.
struct Running {
    nats: async_nats::Client,
    services: nats::Services,
    ids: Option<Arc<Ids>>,
    registry: JoinHandle<()>,
}

impl Server {
    /// Takes the HTTP port, if there is an HTTP role, but asks no server for anything yet.
    pub async fn bind(config: Config) -> Result<Self, ServeError> {
        let config = Arc::new(config);
        let database = database::pool(&config.database)?;
        let listener = if config.roles.contains(&Role::Http) {
            let address = format!("{}:{}", config.http.host, config.http.port);
            let bound = TcpListener::bind(&address).await;
            Some(bound.map_err(|source| ServeError::Listen { address, source })?)
        } else {
            None
        };
        let app = App { config: config.clone(), health: Health::new(database.clone()), ready: Default::default() };
        Ok(Self {
            config,
            app: Arc::new(app),
            database,
            listener,
            is_ready: watch::Sender::new(false),
            fresh: false,
            known_keys: Vec::new(),
        })
    }

    /// Where HTTP listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Turns true when everything is found and served.
    pub fn is_ready(&self) -> watch::Receiver<bool> {
        self.is_ready.subscribe()
    }

    /// Runs until told to stop, or until something is wrong that waiting won't mend.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), ServeError> {
        crate::telemetry::metrics();
        let http_stop = CancellationToken::new();
        let http = self.listener.take().map(|listener| {
            tracing::info!(address = %listener.local_addr().map_or_else(|_| "?".into(), |a| a.to_string()), "HTTP listens");
            let routes = http::router(self.app.clone());
            let stopped = http_stop.clone().cancelled_owned();
            tokio::spawn(async move { axum::serve(listener, routes).with_graceful_shutdown(stopped).await })
        });
        let background = CancellationToken::new();
        let outcome = tokio::select! {
            () = stop.cancelled() => Ok(None),
            started = self.start(background.clone()) => started.map(Some),
        };
        let running = match outcome {
            Ok(Some(running)) => {
                self.app.health.waits_for(None);
                self.is_ready.send_replace(true);
                tracing::info!(roles = %roles(&self.config.roles), "ready");
                stop.cancelled().await;
                Some(running)
            }
            Ok(None) => None,
            Err(error) => {
                http_stop.cancel();
                return Err(error);
            }
        };
        tracing::info!("stopping");
        self.app.health.drain();
        let drained =
            timeout(self.config.shutdown.drain_timeout, self.drain(running, http, http_stop, background)).await;
        match drained {
            Ok(()) => tracing::info!("stopped"),
            Err(_) => tracing::warn!("some requests did not finish in time"),
        }
        Ok(())
    }

    /// Finds the servers, waiting for what is away, and hosts the roles.
    async fn start(&self, background: CancellationToken) -> Result<Running, ServeError> {
        let nats = self.until("NATS", || jetstream::connect(&self.config.nats)).await?;
        jetstream::require_version(&nats)?;
        self.app.health.connected(nats.clone());
        let jetstream = jetstream_context(&nats);
        self.until("PostgreSQL", || database::migrate(&self.database)).await?;
        let declarations = jetstream::declarations(&self.config.nats.prefix, self.config.jetstream.replicas);
        let apply = || jetstream::refuse_or_remember(&self.database, &jetstream, &declarations, self.fresh);
        for drift in self.until("the streams", apply).await? {
            for change in drift.changes.iter().filter(|change| change.loses.is_some()) {
                let (stream, field, why) = (&drift.stream, &change.field, change.loses.as_deref());
                tracing::warn!(stream, field, live = %change.live, declared = %change.declared, why, "left as it is");
            }
        }
        self.warn_of_lax_sync().await;

        let registry = Registry::new(jetstream.clone(), &self.config.nats.prefix);
        let follow = tokio::spawn(registry.clone().follow(background));
        self.app.health.waits_for(Some("reading the registry".into()));
        registry.loaded().await;

        let clock = Clock::system();
        let mut hosted = Hosted::default();
        let keys = Arc::new(Keys::new(registry.clone(), clock.clone()));
        for known in &self.known_keys {
            let KnownKey { key, tenant, source, roles } = known.clone();
            keys.ensure(&key, tenant, source, roles).await.map_err(ServeError::Keys)?;
        }
        hosted.add::<CreateKey>(&keys);
        hosted.add::<ListKeys>(&keys);
        hosted.add::<RevokeKey>(&keys);
        let ids = self.config.roles.contains(&Role::Ids).then(|| {
            let bucket = Bucket::new(jetstream.clone(), &self.config.nats.prefix);
            Arc::new(Ids::new(registry.clone(), bucket, &self.config, clock.clone()))
        });
        if let Some(ids) = &ids {
            hosted.add::<Increment>(ids);
            hosted.add::<SetIncrement>(ids);
        }
        let services = self.until("the NATS services", || nats::serve(&nats, &self.config.nats, &hosted)).await?;
        let client = Client::new(nats.clone(), self.config.nats.prefix.clone());
        let ready = Ready { gateway: Gateway::new(hosted, client), gate: Gate::new(&self.config.auth, registry) };
        self.app.ready.set(ready).ok();
        Ok(Running { nats, services, ids, registry: follow })
    }

    /// Tries until it works, saying what it waits for. Errors that waiting won't mend end it.
    async fn until<T, E, F>(&self, what: &str, mut attempt: impl FnMut() -> F) -> Result<T, ServeError>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<Obstacle>,
    {
        let mut pause = Duration::from_millis(100);
        loop {
            let reason = match attempt().await.map_err(Into::into) {
                Ok(found) => return Ok(found),
                Err(Obstacle::Final(error)) => return Err(error),
                Err(Obstacle::Passing(reason)) => reason,
            };
            tracing::warn!(reason, "waiting for {what}");
            self.app.health.waits_for(Some(format!("waiting for {what}: {reason}")));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    async fn warn_of_lax_sync(&self) {
        let Some(url) = &self.config.nats.monitor_url else { return };
        match crate::doctor::sync_policy(url).await {
            Ok(policy) if policy.is_always() => {}
            Ok(policy) => {
                tracing::warn!(%policy, "NATS acknowledges writes before they are on disk; see `tidemark doctor`")
            }
            Err(error) => tracing::warn!(error, "the sync policy of NATS is not known"),
        }
    }

    /// No new requests; those under way finish; what was reserved is given back.
    async fn drain(
        &self,
        running: Option<Running>,
        http: Option<JoinHandle<std::io::Result<()>>>,
        http_stop: CancellationToken,
        background: CancellationToken,
    ) {
        http_stop.cancel();
        if let Some(http) = http {
            // An error of the listener was logged by its connections, and there is nobody left to tell.
            let _ = http.await;
        }
        if let Some(Running { nats, services, ids, registry }) = running {
            services.stop().await;
            if let Some(ids) = ids {
                ids.stop().await;
            }
            background.cancel();
            let _ = registry.await;
            if let Err(error) = nats.drain().await {
                tracing::debug!(%error, "the connection to NATS was gone already");
            }
        }
        self.database.close().await;
    }
}

/// Requests to JetStream that fail fast enough to be repeated.
fn jetstream_context(nats: &async_nats::Client) -> async_nats::jetstream::Context {
    let mut context = async_nats::jetstream::new(nats.clone());
    context.set_timeout(Duration::from_secs(2));
    context
}

fn roles(roles: &[Role]) -> String {
    roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(",")
}

/// What stands in the way of the start.
enum Obstacle {
    Passing(String),
    Final(ServeError),
}

impl From<ConnectError> for Obstacle {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Connect(error) => Self::Passing(chain(&error)),
            error => Self::Final(error.into()),
        }
    }
}

impl From<DatabaseError> for Obstacle {
    fn from(error: DatabaseError) -> Self {
        if error.is_passing() { Self::Passing(chain(&error)) } else { Self::Final(error.into()) }
    }
}

impl From<ApplyError> for Obstacle {
    fn from(error: ApplyError) -> Self {
        match error {
            ApplyError::Identity(_) => Self::Final(error.into()),
            error => Self::Passing(chain(&error)),
        }
    }
}

impl From<async_nats::Error> for Obstacle {
    fn from(error: async_nats::Error) -> Self {
        Self::Passing(error.to_string())
    }
}
