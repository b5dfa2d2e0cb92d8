//! Serves routes on a port. As axum does it, but for connections that say nothing: these are closed, so that nobody can hold
//! all that the process may have.

use std::{net::SocketAddr, time::Duration};

use axum::{Router, extract::ConnectInfo, serve::Listener};
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Until told to stop, and then until what is under way is answered.
pub async fn serve(mut listener: TcpListener, routes: Router, idle_timeout: Duration, stop: CancellationToken) {
    let routes = TowerToHyperService::new(routes);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(idle_timeout);
    let connections = GracefulShutdown::new();
    while let Some((stream, peer)) = stop.run_until_cancelled(Listener::accept(&mut listener)).await {
        let routes = routes.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo::<SocketAddr>(peer));
            routes.call(request)
        });
        let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::trace!(%peer, %error, "a connection was given up");
            }
        });
    }
    // Whoever comes now is told at once that nobody is there.
    drop(listener);
    connections.shutdown().await;
}
