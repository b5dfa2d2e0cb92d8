//! The connection to NATS.

use std::{sync::Arc, time::Duration};

use async_nats::{Client, ConnectOptions, Event, ServerAddr};
use semver::Version;
use tokio::sync::Notify;

use crate::config;

/// Scheduled messages, atomic batches and their fixes need it.
pub const MINIMUM_SERVER: Version = Version::new(2, 14, 7);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("nats.url: {0}")]
    Address(std::io::Error),
    #[error("nats.credentials: {0}")]
    Credentials(std::io::Error),
    #[error("NATS is not reachable: {0}")]
    Connect(#[from] async_nats::ConnectError),
    #[error("nats-server {found} is too old: Tidemark needs {MINIMUM_SERVER} or newer")]
    TooOld { found: String },
}

/// Connects as the service itself. From then on the client reconnects by itself, for ever, and says so in the log.
pub async fn connect(nats: &config::Nats) -> Result<Client, ConnectError> {
    connect_telling(nats, Arc::default()).await
}

/// The same, and tells whenever the connection is made.
pub async fn connect_telling(nats: &config::Nats, connected: Arc<Notify>) -> Result<Client, ConnectError> {
    let options = ConnectOptions::new()
        .ping_interval(Duration::from_secs(5))
        .reconnect_delay_callback(|attempts| Duration::from_millis((50 << attempts.min(5)).min(1000)))
        .event_callback(move |event| {
            report(&event);
            if event == Event::Connected {
                connected.notify_one();
            }
            std::future::ready(())
        });
    connect_with(options, nats, "tidemark", nats.inbox_prefix.as_str()).await
}

/// Requests to JetStream that fail fast enough to be repeated.
pub fn jetstream_context(nats: &Client) -> async_nats::jetstream::Context {
    let mut context = async_nats::jetstream::new(nats.clone());
    context.set_timeout(Duration::from_secs(2));
    context
}

/// Connects with other options, to the configured servers with the configured credentials.
pub async fn connect_with(
    options: ConnectOptions,
    nats: &config::Nats,
    name: &str,
    inbox_prefix: &str,
) -> Result<Client, ConnectError> {
    let mut options = options.name(name).custom_inbox_prefix(inbox_prefix).connection_timeout(Duration::from_secs(2));
    if let Some(path) = &nats.credentials {
        options = options.credentials_file(path).await.map_err(ConnectError::Credentials)?;
    }
    connect_to(options, nats.url.expose()).await
}

/// Connects to servers given as URLs, separated by commas. The library leaves the user and the password of a URL unused;
/// people expect them to count.
pub async fn connect_to(mut options: ConnectOptions, urls: &str) -> Result<Client, ConnectError> {
    let addresses: Vec<ServerAddr> =
        urls.split(',').map(|url| url.trim().parse()).collect::<Result<_, _>>().map_err(ConnectError::Address)?;
    let decoded = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
    if let Some((user, password)) = addresses.iter().find_map(|url| Some((url.username()?, url.password()?))) {
        options = options.user_and_password(decoded(user), decoded(password));
    }
    Ok(options.connect(addresses).await?)
}

/// Refuses a server that lacks what we build on.
pub fn require_version(client: &Client) -> Result<(), ConnectError> {
    let found = client.server_info().version;
    if is_new_enough(&found) { Ok(()) } else { Err(ConnectError::TooOld { found }) }
}

/// A pre-release counts as its release: whoever runs one knows why.
fn is_new_enough(found: &str) -> bool {
    Version::parse(found)
        .is_ok_and(|version| Version::new(version.major, version.minor, version.patch) >= MINIMUM_SERVER)
}

fn report(event: &Event) {
    match event {
        Event::Connected => tracing::info!("connected to NATS"),
        Event::Disconnected => {
            metrics::counter!("tidemark_nats_connections_lost_total").increment(1);
            tracing::warn!("the connection to NATS is lost; reconnecting");
        }
        Event::ServerError(error) => tracing::error!(%error, "NATS refused something"),
        Event::ClientError(error) => tracing::warn!(%error, "NATS client"),
        Event::SlowConsumer(id) => tracing::warn!(subscription = id, "requests arrive faster than they are handled"),
        Event::LameDuckMode => tracing::info!("the NATS server is going down for maintenance"),
        Event::Draining | Event::Closed => tracing::debug!(%event, "NATS"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_lack_what_we_build_on_are_refused() {
        for (version, accepted) in [
            ("2.9.10", false),
            ("2.14.6", false),
            ("2.14.7", true),
            ("2.15.1", true),
            ("2.15.0-RC.1", true),
            ("3.0.0", true),
            ("", false),
            ("nonsense", false),
        ] {
            assert_eq!(is_new_enough(version), accepted, "{version}");
        }
    }
}
