//! `serve`: finds its servers, hosts its roles, answers until told to stop, and leaves cleanly.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    access::{Gate, Grant},
    api::{
        Name,
        admin::{CreateKey, ListKeys, RevokeKey},
    },
    client::Client,
    clock::Clock,
    config::Config,
    database::{self, DatabaseError},
    error::{Code, Error, chain},
    events::Events,
    gateway::{Gateway, Hosted},
    http::{self, App, Health, Limits, Ready},
    ids::{self, Ids},
    instance::Instance,
    jetstream::{self, ApplyError, ConnectError},
    nats,
    noid::Pools,
    registry::{Registry, keys::Keys},
    roles::Role,
    stages::Stages,
    telemetry,
    timers::{self, Timers},
    usage::{self, Usage},
    watermark::{self, Cells, leases::Leases},
};

/// Why the process can't run. Everything else is waited for.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{setting}: {address} can't be listened on: {source}")]
    Listen { setting: &'static str, address: String, source: std::io::Error },
    #[error(transparent)]
    Nats(#[from] ConnectError),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Streams(#[from] ApplyError),
    #[error("an API key could not be registered: {0}")]
    Keys(Error),
    #[error("this instance could not take a number: {0}")]
    Number(Error),
    #[error("the counters could not begin again: {0}")]
    BeginAgain(Error),
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
    instance: Arc<Instance>,
    /// The system's, unless a test moves it.
    pub clock: Clock,
    database: PgPool,
    /// The bridge, and the few routes that a process without one may have.
    bridge: Option<TcpListener>,
    monitor: Option<TcpListener>,
    is_ready: watch::Sender<bool>,
    /// A stream that lost its identity is meant, and keys begin again.
    pub fresh: bool,
    pub known_keys: Vec<KnownKey>,
}

/// What runs once the servers are found.
struct Running {
    /// For requests, for the stores, and for what usage publishers send.
    connections: Vec<async_nats::Client>,
    services: nats::Services,
    ids: Option<Arc<Ids>>,
    timers: Option<timers::Running>,
    usage: Option<usage::Running>,
    leases: Cells<Leases>,
}

impl Server {
    /// Takes the HTTP ports, but asks no server for anything yet.
    pub async fn bind(config: Config) -> Result<Self, ServeError> {
        let config = Arc::new(config);
        let database = database::pool(&config.database)?;
        let host = &config.http.host;
        let bridge = match config.roles.contains(&Role::Http) {
            true => Some(listen("http.port", host, config.http.port).await?),
            false => None,
        };
        let monitor = match config.telemetry.port {
            Some(port) => Some(listen("telemetry.port", host, port).await?),
            None => None,
        };
        let clock = Clock::system();
        let instance = Arc::new(Instance::new(&config.roles, &clock));
        let app = App { config: config.clone(), health: Health::new(database.clone()), ready: Default::default() };
        Ok(Self {
            config,
            app: Arc::new(app),
            instance,
            clock,
            database,
            bridge,
            monitor,
            is_ready: watch::Sender::new(false),
            fresh: false,
            known_keys: Vec::new(),
        })
    }

    /// Where the bridge listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.bridge.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Turns true when everything is found and served.
    pub fn is_ready(&self) -> watch::Receiver<bool> {
        self.is_ready.subscribe()
    }

    /// Runs until told to stop, or until something is wrong that waiting won't mend.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), ServeError> {
        // Ends whatever runs in the background, however we leave.
        let background = CancellationToken::new();
        let _end = background.clone().drop_guard();
        telemetry::metrics();
        tokio::spawn(telemetry::upkeep(background.clone()));
        let mut http = JoinSet::new();
        // Once we leave nothing new is begun, and nobody waits for what may come.
        let leaving = background.child_token();
        for (listener, routes) in [
            (self.bridge.take(), http::router as fn(Arc<App>) -> axum::Router),
            (self.monitor.take(), http::monitor_router),
        ] {
            let Some(listener) = listener else { continue };
            let address = listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
            tracing::info!(address, "HTTP listens");
            let (routes, idle_timeout) = (routes(self.app.clone()), self.config.http.idle_timeout);
            http.spawn(http::serve(listener, routes, idle_timeout, leaving.clone()));
        }
        let started = tokio::select! {
            () = stop.cancelled() => None,
            started = self.start(background.clone(), leaving.clone()) => Some(started?),
        };
        if started.is_some() {
            self.app.health.waits_for(None);
            self.is_ready.send_replace(true);
            tracing::info!(roles = %roles(&self.config.roles), "ready");
            stop.cancelled().await;
        }
        tracing::info!("stopping");
        self.app.health.drain();
        leaving.cancel();
        self.drain(started, http, background).await;
        tracing::info!("stopped");
        Ok(())
    }

    /// Requests under way finish; what was reserved is given back, also when some caller does not let go.
    async fn drain(&self, running: Option<Running>, mut http: JoinSet<()>, background: CancellationToken) {
        let limit = self.config.shutdown.drain_timeout;
        let http = timeout(limit, async { while http.join_next().await.is_some() {} });
        let Some(Running { connections, services, ids, timers, usage, leases }) = running else {
            let _ = http.await;
            return;
        };
        let (http, nats_requests) = tokio::join!(http, timeout(limit, services.stop()));
        if http.is_err() || nats_requests.is_err() {
            tracing::warn!("some requests did not finish within {limit:?}");
        }
        if let Some(timers) = timers {
            timers.stop(limit).await;
        }
        if let Some(usage) = usage {
            usage.stop(limit).await;
        }
        if let Some(ids) = ids
            && timeout(limit, ids.stop()).await.is_err()
        {
            tracing::warn!("reserved ids could not be given back and are skipped");
        }
        let _ = timeout(limit, self.instance.give_number_back(&leases, &self.clock)).await;
        // Whoever follows a stream would take the end of the connection for a loss.
        background.cancel();
        // The last replies are still in the client's buffer, and closing does not wait for them.
        for nats in connections {
            let closed = async { nats.flush().await.is_ok() && nats.drain().await.is_ok() };
            if !timeout(limit, closed).await.unwrap_or(false) {
                tracing::debug!("the connection to NATS was gone already");
            }
        }
        self.database.close().await;
    }

    /// Finds the servers, waiting for what is away, and hosts the roles.
    async fn start(&self, background: CancellationToken, leaving: CancellationToken) -> Result<Running, ServeError> {
        let nats = self.until("NATS", || jetstream::connect(&self.config.nats)).await?;
        jetstream::require_version(&nats)?;
        // Requests and replies come by the thousand, and a write that others wait for should not queue among them.
        let connected = Arc::default();
        let connect = || jetstream::connect_telling(&self.config.nats, Arc::clone(&connected));
        let store = self.until("NATS", connect).await?;
        self.app.health.connected(nats.clone(), store.clone());
        let jetstream = jetstream::jetstream_context(&store);
        self.until("PostgreSQL", || database::migrate(&self.database, &database::MIGRATIONS)).await?;
        let declarations = jetstream::declarations(&self.config);
        let apply = || jetstream::apply_guarded(&self.database, &jetstream, &declarations, self.fresh);
        for drift in self.until("the streams", apply).await? {
            for change in drift.changes.iter().filter(|change| change.loses.is_some()) {
                let (stream, field, why) = (&drift.stream, &change.field, change.loses.as_deref());
                tracing::warn!(stream, field, live = %change.live, declared = %change.declared, why, "left as it is");
            }
        }
        tokio::spawn(jetstream::keep_in_memory(jetstream.clone(), declarations, connected, background.clone()));
        self.warn_of_lax_servers(&nats).await;

        let registry = Registry::new(jetstream.clone(), &self.config.nats.prefix);
        tokio::spawn(registry.clone().follow(background.clone()));
        self.app.health.waits_for(Some("reading the registry".into()));
        registry.loaded().await;

        let clock = &self.clock;
        let mut hosted = Hosted::default();
        let keys = Arc::new(Keys::new(registry.clone(), clock.clone()));
        for known in &self.known_keys {
            let KnownKey { key, tenant, source, roles } = known.clone();
            keys.ensure(&key, tenant, source, roles).await.map_err(ServeError::Keys)?;
        }
        hosted.add::<CreateKey>(&keys);
        hosted.add::<ListKeys>(&keys);
        hosted.add::<RevokeKey>(&keys);
        let (prefix, deadline) = (&self.config.nats.prefix, self.config.watermark.deadline);
        let events = Events::new(nats.clone(), prefix.clone());
        let name = self.instance.name();
        let lease_bucket = watermark::lease_bucket(jetstream.clone(), prefix);
        let leases = Cells::new(lease_bucket.clone(), name.clone(), deadline);
        self.until("a number", || self.instance.take_number(&leases, clock)).await?;
        tokio::spawn(self.instance.clone().keep_number(leases.clone(), clock.clone(), background.clone()));
        let ids = self.config.roles.contains(&Role::Ids).then(|| {
            let stores = ids::Stores {
                registry: registry.clone(),
                counters: watermark::bucket(jetstream.clone(), prefix),
                leases: lease_bucket,
            };
            Arc::new(Ids::new(stores, &self.config, clock.clone(), name.clone()))
        });
        if let Some(ids) = &ids {
            if self.fresh {
                ids.begin_again().await.map_err(ServeError::BeginAgain)?;
            }
            ids.host(&mut hosted);
        }
        if self.config.roles.contains(&Role::Noid) {
            let counters = watermark::bucket(jetstream.clone(), prefix);
            let pools = Arc::new(Pools::new(counters, events.clone(), &self.config, clock.clone(), name.clone()));
            pools.host(&mut hosted);
            tokio::spawn(async move {
                if let Err(error) = pools.announce_what_is_due().await {
                    error.log("noid.announce");
                }
            });
        }
        if self.config.roles.contains(&Role::Stages) {
            let stages = Stages::new(jetstream.clone(), events.clone(), &self.config, clock.clone(), name.clone());
            Arc::new(stages).host(&mut hosted);
        }
        let timers = match self.config.roles.contains(&Role::Timers) {
            false => None,
            true => {
                let parts = timers::Parts {
                    database: self.database.clone(),
                    // Requests that keep the database busy must not keep timers from firing.
                    firing_database: database::impatient_pool(&self.config.database, timers::CONNECTIONS)?,
                    nats: nats.clone(),
                    jetstream: jetstream.clone(),
                    registry: registry.clone(),
                    events: events.clone(),
                    clock: clock.clone(),
                    instance: name,
                };
                let (timers, running) = Timers::start(parts, &self.config, background.clone()).await;
                timers.host(&mut hosted);
                Some(running)
            }
        };
        let mut connections = vec![nats.clone(), store];
        let usage = match self.config.roles.contains(&Role::Usage) {
            false => None,
            true => {
                let sink_nats = self.until("NATS", || jetstream::connect(&self.config.nats)).await?;
                connections.push(sink_nats.clone());
                // Sinks hold their connections, and writing must not wait for requests.
                let sink_database = database::pool_of(&self.config.database, usage::connections(&self.config))?;
                let reading = database::reading_pool(&self.config.database, self.config.usage.readers)?;
                let start = || {
                    let parts = usage::Parts {
                        database: self.database.clone(),
                        sink_database: sink_database.clone(),
                        reading: reading.clone(),
                        nats: nats.clone(),
                        sink_nats: sink_nats.clone(),
                        jetstream: jetstream.clone(),
                        registry: registry.clone(),
                        events: events.clone(),
                        clock: clock.clone(),
                        leaving: leaving.clone(),
                    };
                    Usage::start(parts, &self.config, background.clone())
                };
                let (usage, running) = self.until("usage verdicts", start).await?;
                usage.host(&mut hosted);
                Some(running)
            }
        };
        let (instance, reserving) = (self.instance.clone(), ids.clone());
        let report = move || instance.report(reserving.as_ref().map(|ids| ids.at_hand()).unwrap_or_default());
        let serve = || nats::serve(&nats, &self.config.nats, &hosted, report.clone());
        let services = self.until("the NATS services", serve).await?;
        let client = Client::new(nats.clone(), self.config.nats.prefix.clone());
        let ready = Ready {
            gateway: Gateway::new(hosted, client),
            gate: Gate::new(&self.config.auth, registry, clock.clone()),
            limits: Limits::new(&self.config, jetstream, clock.clone()),
        };
        self.app.ready.set(ready).ok();
        Ok(Running { connections, services, ids, timers, usage, leases })
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

    async fn warn_of_lax_servers(&self, nats: &async_nats::Client) {
        if !nats.server_info().auth_required {
            tracing::warn!("NATS lets everyone in: whoever reaches it is operator; see `tidemark doctor`");
        }
        let Some(url) = &self.config.nats.monitor_url else { return };
        match crate::doctor::sync_policy(url).await {
            Ok(policy) if policy.is_always() => {}
            Ok(policy) => {
                tracing::warn!(%policy, "NATS acknowledges writes before they are on disk; see `tidemark doctor`")
            }
            Err(error) => tracing::warn!(error, "the sync policy of NATS is not known"),
        }
    }
}

async fn listen(setting: &'static str, host: &str, port: u16) -> Result<TcpListener, ServeError> {
    let address = format!("{host}:{port}");
    TcpListener::bind(&address).await.map_err(|source| ServeError::Listen { setting, address, source })
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

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        if error.code == Code::Unavailable {
            Self::Passing(chain(&error))
        } else {
            Self::Final(ServeError::Number(error))
        }
    }
}

impl From<async_nats::Error> for Obstacle {
    fn from(error: async_nats::Error) -> Self {
        Self::Passing(error.to_string())
    }
}
