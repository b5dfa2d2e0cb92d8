//! The HTTP bridge: maps routes to operations and speaks each surface's dialect. No domain rule lives here.

mod address;
mod bridge;
mod dialect;
mod edge;
mod health;
mod limits;
mod listen;
mod openapi;
mod params;

use std::sync::{Arc, OnceLock};

use axum::{
    Router,
    extract::{Request, State},
    http::HeaderMap,
    middleware,
    response::{Html, Response},
    routing::get,
};
use tower_http::compression::CompressionLayer;

pub use health::Health;
pub use limits::Limits;
pub use listen::serve;
pub use openapi::document as openapi_document;

use crate::{
    access::Gate,
    api::{Encoding, Surface},
    config::Config,
    error::{Code, Error, Result},
    gateway::Gateway,
    telemetry,
};

/// What the routes share.
pub struct App {
    pub config: Arc<Config>,
    pub health: Health,
    /// Set when the process has found its servers. Until then every operation is unavailable, and `/ready` says why.
    pub ready: OnceLock<Ready>,
}

pub struct Ready {
    pub gateway: Gateway,
    pub gate: Gate,
    pub limits: Limits,
}

impl App {
    fn ready(&self) -> Result<&Ready> {
        self.ready.get().ok_or_else(|| Error::unavailable("the process is starting"))
    }

    /// Whether a surface lets strangers in.
    fn is_open(&self, surface: Surface) -> bool {
        surface.open_by_default() && self.config.auth.open_pools_and_stages
    }
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    let documents = Router::new()
        .route("/openapi.json", get(async || axum::Json(openapi_document())))
        .route("/docs", get(async || Html(include_str!("docs.html"))));
    guarded(bridge::routes().merge(documents).merge(monitor()), app)
}

/// What a process without the bridge shows.
pub fn monitor_router(app: Arc<App>) -> Router {
    guarded(monitor(), app)
}

fn monitor() -> Router<Arc<App>> {
    Router::new()
        .route("/health", get(health::live))
        .route("/ready", get(health::ready))
        .route("/healthz", get(health::healthz))
        .route("/metrics", get(async || telemetry::metrics().render()))
}

fn guarded(routes: Router<Arc<App>>, app: Arc<App>) -> Router {
    routes
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn_with_state(app.clone(), edge::guard))
        .layer(CompressionLayer::new())
        .with_state(app)
}

/// A header as text, if it is there and is text.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

async fn no_such_path(State(app): State<Arc<App>>, request: Request) -> Response {
    let problem = format!("there is nothing at {} {}", request.method(), request.uri().path());
    refusal(&app, &request, Error::new(Code::NotFound, problem))
}

async fn no_such_method(State(app): State<Arc<App>>, request: Request) -> Response {
    let problem = format!("{} is not supported at {}", request.method(), request.uri().path());
    refusal(&app, &request, Error::new(Code::MethodNotAllowed, problem))
}

/// Strangers learn nothing about the paths of a closed surface.
fn refusal(app: &App, request: &Request, error: Error) -> Response {
    let surface = Surface::of_path(request.uri().path());
    let known = match surface {
        Surface::Native => Ok(()),
        _ if app.is_open(surface) => Ok(()),
        _ => app.ready().and_then(|ready| ready.gate.identify(bridge::credential(request.headers()))).map(drop),
    };
    dialect::failure(surface, Encoding::Json, &known.err().unwrap_or(error))
}
