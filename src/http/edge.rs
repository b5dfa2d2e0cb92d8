//! What happens to every request before and after its route: trace, deadline, panic guard, metrics.

use std::{
    net::{IpAddr, SocketAddr},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Instant,
};

use axum::{
    extract::{ConnectInfo, MatchedPath, Request, State},
    http::Method,
    middleware::Next,
    response::Response,
};
use futures::FutureExt;
use tokio::time::timeout;
use tracing::Instrument;

use super::{App, address, dialect, text};
use crate::{
    api::{Encoding, Surface},
    error::Error,
    telemetry::Trace,
};

/// The address of a request's client.
#[derive(Clone, Copy)]
pub struct Client(pub IpAddr);

pub async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let trace = Trace::from_header(text(request.headers(), Trace::HEADER)).or_begin();
    let peer = request.extensions().get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| peer.ip());
    let peer = peer.expect("the server is told who connects");
    let client = address::client(peer, request.headers(), &app.config.http.trusted_proxies);
    let span = tracing::info_span!(
        "http",
        %client,
        method = %request.method(),
        path = request.uri().path(),
        trace_id = trace.id(),
        request_id = text(request.headers(), "x-request-id"),
    );
    let surface = Surface::of_path(request.uri().path());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = known(request.method());
    request.extensions_mut().insert(trace);
    request.extensions_mut().insert(Client(client));

    let limit = app.config.http.request_timeout;
    let answer = timeout(limit, AssertUnwindSafe(next.run(request)).catch_unwind());
    let response = match answer.instrument(span.clone()).await {
        Ok(Ok(response)) => response,
        Ok(Err(_)) => span.in_scope(|| failed(surface, Error::internal("the handler panicked"))),
        Err(_) => span.in_scope(|| failed(surface, Error::unavailable(format!("not answered within {limit:?}")))),
    };

    let labels = [
        ("method", method.to_owned()),
        // The route's pattern, not the path: a label must not have a value per id.
        ("route", route.map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned())),
        ("status", response.status().as_str().to_owned()),
    ];
    metrics::counter!("tidemark_http_requests_total", &labels).increment(1);
    metrics::histogram!("tidemark_http_request_seconds", &labels[..2]).record(began.elapsed().as_secs_f64());
    span.in_scope(|| {
        let (status, took_ms) = (response.status().as_u16(), began.elapsed().as_millis() as u64);
        // Who asks for stages is known by name; ids come by the ten thousands.
        match surface {
            Surface::Stages => tracing::info!(status, took_ms, "answered"),
            _ => tracing::debug!(status, took_ms, "answered"),
        }
    });
    response
}

fn failed(surface: Surface, error: Error) -> Response {
    error.log("http");
    dialect::failure(surface, Encoding::Json, &error)
}

/// A label must not have a value per caller's whim, and a method may be any word.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}
