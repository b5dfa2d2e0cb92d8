//! Whether the process lives, and whether it can work.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_nats::connection::State as ConnectionState;
use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::Utc;
use serde_json::{Map, json};
use sqlx::PgPool;
use tokio::time::timeout;

use super::App;
use crate::error::chain;

/// A server that hangs must not hang us: `/ready` answers within four seconds, whatever happens.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the process knows of its servers.
pub struct Health {
    database: PgPool,
    /// The connections for requests and for the stores.
    nats: OnceLock<[async_nats::Client; 2]>,
    /// Why the start is not over yet.
    waiting_for: Mutex<Option<String>>,
    draining: AtomicBool,
}

impl Health {
    pub fn new(database: PgPool) -> Self {
        Self {
            database,
            nats: OnceLock::new(),
            waiting_for: Mutex::new(Some("starting".into())),
            draining: AtomicBool::new(false),
        }
    }

    pub fn connected(&self, requests: async_nats::Client, stores: async_nats::Client) {
        self.nats.set([requests, stores]).ok();
    }

    /// What the start waits for; none when it is over.
    pub fn waits_for(&self, reason: Option<String>) {
        *self.waiting_for.lock().expect("no panic while the reason is held") = reason;
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    async fn nats(&self) -> Result<(), String> {
        let Some(clients @ [_, stores]) = self.nats.get() else { return Err("not connected yet".into()) };
        if clients.iter().any(|client| client.connection_state() != ConnectionState::Connected) {
            return Err("the connection is lost; reconnecting".into());
        }
        let jetstream = async_nats::jetstream::new(stores.clone());
        match timeout(PATIENCE, jetstream.query_account()).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(format!("JetStream does not answer: {error}")),
            Err(_) => Err(format!("JetStream did not answer within {PATIENCE:?}")),
        }
    }

    async fn database(&self) -> Result<(), String> {
        match timeout(PATIENCE, sqlx::query("select 1").execute(&self.database)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(chain(&error)),
            Err(_) => Err(format!("no answer within {PATIENCE:?}")),
        }
    }
}

/// Whether the process lives. Nothing else is asked, so that an outage does not get it killed.
pub async fn live() -> impl IntoResponse {
    Json(json!({ "status": "up" }))
}

/// Whether it can work: 503 with the reasons if not.
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let health = &app.health;
    let (nats, database) = tokio::join!(health.nats(), health.database());
    let start = match health.waiting_for.lock().expect("no panic while the reason is held").clone() {
        Some(reason) => Err(reason),
        None if health.draining.load(Ordering::Relaxed) => Err("stopping".to_owned()),
        None => Ok(()),
    };
    let checks = [("nats", nats), ("postgres", database), ("process", start)];
    let (status, word) = match checks.iter().all(|(_, check)| check.is_ok()) {
        true => (StatusCode::OK, "ready"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    let checks: Map<_, _> = checks
        .into_iter()
        .map(|(name, check)| (name.to_owned(), check.err().unwrap_or_else(|| "ok".to_owned()).into()))
        .collect();
    (status, Json(json!({ "status": word, "checks": checks }))).into_response()
}

/// The timer platform's health check.
pub async fn healthz(State(app): State<Arc<App>>) -> Response {
    let connected = app.health.database().await.is_ok();
    let (status, code, message, word, database) = match connected {
        true => (StatusCode::OK, 0, "healthy", "up", "connected"),
        false => (StatusCode::INTERNAL_SERVER_ERROR, 1, "database connection failed", "degraded", "disconnected"),
    };
    let data = json!({ "status": word, "database": database, "timestamp": Utc::now() });
    (status, Json(json!({ "code": code, "message": message, "data": data }))).into_response()
}
