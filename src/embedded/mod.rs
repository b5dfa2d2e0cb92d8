//! Starts a real nats-server and a real PostgreSQL as children, for `tidemark up` and for the tests.

mod child;
mod find;
mod nats;
mod permissions;
mod postgres;
mod unprivileged;
mod up;

pub use child::Child;
pub use find::{nats_server as find_nats_server, postgres_program as find_postgres_program};
pub use nats::NatsServer;
pub use permissions::{Callers, User};
pub use postgres::{Durability, Postgres};
pub use up::{Up, UpOptions};

use std::net::TcpListener;

/// What went wrong, in one sentence that says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct EmbeddedError(String);

impl EmbeddedError {
    pub fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}

pub type Result<T, E = EmbeddedError> = std::result::Result<T, E>;

/// Adds what was being done to an error of the system.
trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Doing<T> for std::io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| EmbeddedError(format!("{}: {error}", what())))
    }
}

/// A port that is free: the wanted one, or any if that is 0.
pub fn free_port(wanted: u16, option: &str) -> Result<u16> {
    if wanted == 0 {
        // Below the ports that systems give to outgoing connections: one of those could take it before its server does.
        let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        let mut candidates = std::iter::repeat_with(|| rand::random_range(10_000..32_000)).take(1000);
        return candidates.find(is_free).ok_or_else(|| EmbeddedError::new("no port is free"));
    }
    match TcpListener::bind(("127.0.0.1", wanted)) {
        Ok(_) => Ok(wanted),
        Err(error) => Err(EmbeddedError(format!(
            "port {wanted} is not free ({error}): choose another with {option}, 0 for any free one"
        ))),
    }
}
