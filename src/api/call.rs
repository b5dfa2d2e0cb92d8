//! One call of an operation, as the domain sees it, whatever transport brought it.

use std::{fmt, future::Future, str::FromStr, sync::Arc};

use super::Operation;
use crate::{
    error::{Error, Result},
    telemetry::Trace,
};

/// One call of an operation.
pub struct Call<O: Operation> {
    pub target: O::Target,
    pub request: O::Request,
    pub context: Context,
}

/// What comes with a call besides what is asked. Nothing in here grants anything.
#[derive(Debug, Clone, Default)]
pub struct Context {
    pub idempotency_key: Option<IdempotencyKey>,
    pub trace: Trace,
    /// How the caller or a proxy calls the request, for the records.
    pub named: Option<Arc<str>>,
}

impl Context {
    /// The header that names a request, on both transports.
    pub const NAME_HEADER: &str = "X-Request-ID";

    /// What the request is remembered by.
    pub fn request_id(&self) -> Option<Arc<str>> {
        let key = || self.idempotency_key.as_ref().map(|key| key.0.clone());
        self.named.clone().or_else(key).or_else(|| self.trace.id().map(Arc::from))
    }

    /// A name that is too long to keep is cut: it is for people.
    pub fn name(header: Option<&str>) -> Option<Arc<str>> {
        let text = header?;
        let end = text.char_indices().nth(128).map_or(text.len(), |(end, _)| end);
        (!text.is_empty()).then(|| text[..end].into())
    }
}

/// A domain module's answer to an operation.
pub trait Handle<O: Operation>: Send + Sync + 'static {
    fn handle(&self, call: Call<O>) -> impl Future<Output = Result<O::Response>> + Send;
}

/// The caller's name for one request: the same name gets the same answer again.
#[derive(Clone, PartialEq, Eq)]
pub struct IdempotencyKey(Arc<str>);

impl IdempotencyKey {
    /// The header on both transports.
    pub const HEADER: &str = "Idempotency-Key";

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// One that can't be read is refused: passing it over would answer the repeat as a new request.
    pub fn from_header(value: &[u8]) -> Result<Self> {
        std::str::from_utf8(value).map_err(|_| Error::field(Self::HEADER, "must be UTF-8"))?.parse()
    }
}

impl FromStr for IdempotencyKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if (1..=255).contains(&text.chars().count()) {
            Ok(Self(text.into()))
        } else {
            Err(Error::field(Self::HEADER, "must have 1 to 255 characters"))
        }
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
