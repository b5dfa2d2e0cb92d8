//! One call of an operation, as the domain sees it, whatever transport brought it.

use std::{
    fmt,
    future::Future,
    str::FromStr,
    sync::{Arc, Mutex},
};

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
    /// Whether the caller would rather have an answer than the outcome.
    pub respond_async: bool,
    /// Who called, for the audit, where this process has seen his credentials.
    pub actor: Option<Arc<str>>,
    /// The one user for whom the caller may speak, if he is bound to one.
    pub user: Option<Arc<str>>,
    /// What goes back with the answer.
    pub reply: ReplyHeaders,
}

impl Context {
    /// The header that narrows a request to one user's, on NATS. Over HTTP the caller's key says it.
    pub const USER_HEADER: &str = "Tidemark-User";
    /// The header of RFC 7240, on both transports.
    pub const PREFER_HEADER: &str = "Prefer";

    /// Whether a header asks for an answer without the outcome.
    pub fn prefers_async(header: Option<&str>) -> bool {
        let is_async = |preference: &str| preference.trim().eq_ignore_ascii_case("respond-async");
        header.is_some_and(|header| header.split([',', ';']).any(is_async))
    }

    /// The header that names a request, on both transports.
    pub const NAME_HEADER: &str = "X-Request-ID";

    /// Who asks, for the audit. Over NATS it is the server that knows.
    pub fn actor(&self) -> &str {
        self.actor.as_deref().unwrap_or("nats")
    }

    /// What the request is remembered by.
    pub fn request_id(&self) -> Option<Arc<str>> {
        let key = || self.idempotency_key.as_ref().map(|key| key.0.clone());
        self.named.clone().or_else(key).or_else(|| self.trace.id().map(Arc::from))
    }

    /// Whether a short text of a caller's can be kept as it is.
    pub fn check_text(field: &str, text: &str) -> Result<()> {
        match (1..=255).contains(&text.chars().count()) && !text.contains('\0') {
            true => Ok(()),
            false => Err(Error::field(field, "must have 1 to 255 characters, and no NUL")),
        }
    }

    /// A name that is too long to keep is cut, and one that can't be kept is none: it is for people.
    pub fn name(header: Option<&str>) -> Option<Arc<str>> {
        let text = header.filter(|text| !text.contains('\0'))?;
        let end = text.char_indices().nth(128).map_or(text.len(), |(end, _)| end);
        (!text.is_empty()).then(|| text[..end].into())
    }
}

/// Headers of the reply, whether it is an answer or an error. Transports open them where an operation has any to set.
#[derive(Debug, Clone, Default)]
pub struct ReplyHeaders(Option<Arc<Mutex<Vec<ReplyHeader>>>>);

type ReplyHeader = (&'static str, String);

impl ReplyHeaders {
    pub const LIMIT: &str = "X-RateLimit-Limit";
    pub const REMAINING: &str = "X-RateLimit-Remaining";
    pub const RESET: &str = "X-RateLimit-Reset";
    /// Where the next page of the feed begins, for those who ask for it before they read this one.
    pub const NEXT_POSITION: &str = "Tidemark-Next-Position";
    /// Positions behind that one, each as far from the one before as this page was long, for those who read several at once.
    pub const POSITIONS_AHEAD: &str = "Tidemark-Positions-Ahead";
    pub const ALL: [&str; 5] = [Self::LIMIT, Self::REMAINING, Self::RESET, Self::NEXT_POSITION, Self::POSITIONS_AHEAD];

    /// Ones that can be set, if the operation does.
    pub fn of(info: &super::Info) -> Self {
        Self((info.surface == super::Surface::Usage).then(Arc::default))
    }

    pub fn set(&self, name: &'static str, value: impl fmt::Display) {
        if let Some(headers) = &self.0 {
            let mut headers = headers.lock().expect("no panic while headers are held");
            headers.retain(|(known, _)| *known != name);
            headers.push((name, value.to_string()));
        }
    }

    pub fn take(&self) -> Vec<ReplyHeader> {
        let taken = |headers: &Arc<Mutex<Vec<_>>>| std::mem::take(&mut *headers.lock().expect("no panic while held"));
        self.0.as_ref().map(taken).unwrap_or_default()
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
        Context::check_text(Self::HEADER, text)?;
        Ok(Self(text.into()))
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
