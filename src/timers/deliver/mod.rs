//! Making callbacks.

mod guard;
mod http;
mod nats;
mod signature;

use std::time::Duration;

pub use self::{http::HttpCaller, nats::NatsCaller};
pub use signature::{Rotation, Signer};

use crate::api::timers::CapturedResponse;

/// What came of one attempt.
#[derive(Debug, Default)]
pub struct Report {
    /// None if it succeeded.
    pub error: Option<String>,
    /// How long the receiver asks us to wait.
    pub retry_after: Option<Duration>,
    pub response: Option<CapturedResponse>,
}

impl Report {
    pub fn success() -> Self {
        Self::default()
    }

    pub fn failure(error: impl Into<String>) -> Self {
        Self { error: Some(kept(&error.into())), ..Self::default() }
    }
}

/// Errors that can be kept: PostgreSQL takes no NUL, and nobody reads a megabyte.
fn kept(error: &str) -> String {
    const LONGEST: usize = 1000;
    let mut kept = crate::database::without_nul(error);
    if let Some((end, _)) = kept.char_indices().nth(LONGEST) {
        kept.truncate(end);
        kept.push('…');
    }
    kept
}
