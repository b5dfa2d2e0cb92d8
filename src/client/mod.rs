//! What other Rust services import: typed calls over NATS.
//!
//! ```no_run
//! # async fn example() -> tidemark::error::Result<()> {
//! use tidemark::{api::ids::IncrementRequest, client::Client};
//!
//! let client = Client::connect("nats://127.0.0.1:4222").await?;
//! let ids = client.increment(&"orders".parse()?, &IncrementRequest { size: Some(3), ..Default::default() }).await?;
//! println!("{:?}", ids.id);
//! # Ok(())
//! # }
//! ```
//!
//! Every operation has a method of its own name, which comes from its declaration in [`crate::api`].

mod emitter;
mod feed;
mod refusals;
mod snowflake;

use std::time::Duration;

use async_nats::{ConnectOptions, HeaderMap, client::RequestErrorKind};
use serde::de::DeserializeOwned;

use crate::{
    api::{Context, Encoding, IdempotencyKey, Name, Operation, ReplyHeaders, Request},
    error::{self, Code, Error, Result},
    jetstream,
    telemetry::Trace,
};

pub use emitter::{Delivered, Emitter, EmitterCounts, EmitterOptions, OnRejected};
pub use feed::Feed;
pub use refusals::{Heard, Refusals};
pub use snowflake::Snowflakes;

pub const SERVICE_ERROR: &str = "Nats-Service-Error";
pub const SERVICE_ERROR_CODE: &str = "Nats-Service-Error-Code";
pub const CONTENT_TYPE: &str = "Content-Type";
/// On a reply: this answer was given before.
pub const REPEATED: &str = "Tidemark-Repeated";

/// Longer than an operation takes on the other side: a caller who waits for two reservations in a row, each up to
/// `watermark.deadline`, should learn how they ended, and one who waits for the feed what came.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Cheap to clone.
#[derive(Clone)]
pub struct Client {
    nats: async_nats::Client,
    prefix: Name,
    refusals: Option<Refusals>,
}

impl Client {
    /// Connects with the default prefix `tm`; user and password may stand in the URL. For anything else, such as the inbox
    /// prefix that a tenant's user needs (`_INBOX_<tenant>`), connect yourself and use [`Client::new`].
    pub async fn connect(url: &str) -> Result<Self> {
        let refusals = Refusals::default();
        let nats = jetstream::connect_to(refusals.told_by(ConnectOptions::new()), url)
            .await
            .map_err(|error| Error::unavailable("NATS is not reachable").source(error))?;
        Ok(Self::new(nats, "tm".parse()?).hearing(refusals))
    }

    pub fn new(nats: async_nats::Client, prefix: Name) -> Self {
        Self { nats, prefix, refusals: None }
    }

    /// What NATS refuses to its connection is an error at once; without it, such a request times out.
    pub fn hearing(mut self, refusals: Refusals) -> Self {
        self.refusals = Some(refusals);
        self
    }

    /// Calls an operation.
    pub async fn call<O: Operation>(&self, target: &O::Target, request: &O::Request) -> Result<O::Response> {
        self.call_with::<O>(target, request, &Context::default()).await
    }

    /// The same with an idempotency key or a trace.
    pub async fn call_with<O: Operation>(
        &self,
        target: &O::Target,
        request: &O::Request,
        context: &Context,
    ) -> Result<O::Response> {
        let reply = self.send::<O>(target, request, context).await?;
        for name in ReplyHeaders::ALL {
            if let Some(value) = header(&reply.message, name) {
                context.reply.set(name, value);
            }
        }
        let mut answer = reply.read()?;
        if header(&reply.message, REPEATED).is_some() {
            O::repeat(&mut answer);
        }
        Ok(answer)
    }

    async fn send<O: Operation>(&self, target: &O::Target, request: &O::Request, context: &Context) -> Result<Reply> {
        let (encoding, body) = request.write()?;
        let subject = O::INFO.subject(&self.prefix, target);
        Ok(Reply { encoding, message: self.ask(subject, headers(encoding, context), body).await? })
    }

    /// The events of a pattern, such as `timer.acme.>`, from now on.
    pub async fn follow(&self, what: &str) -> Result<async_nats::Subscriber> {
        self.listen(format!("{}.event.{what}", self.prefix)).await
    }

    /// What is published on a subject, from now on.
    pub async fn listen(&self, subject: String) -> Result<async_nats::Subscriber> {
        let unheard = |error: async_nats::Error| Error::unavailable("events can't be heard").source(error);
        let events = self.nats.subscribe(subject).await.map_err(|error| unheard(error.into()))?;
        // Before the server knows of it, events would go by.
        self.nats.flush().await.map_err(|error| unheard(error.into()))?;
        Ok(events)
    }

    /// Sends a request of any kind; an error reply becomes an [`Error`].
    pub async fn request(&self, subject: String, headers: HeaderMap, body: bytes::Bytes) -> Result<bytes::Bytes> {
        let reply = self.ask(subject, headers, body).await?;
        outcome(&reply)?;
        Ok(reply.payload)
    }

    async fn ask(&self, subject: String, headers: HeaderMap, body: bytes::Bytes) -> Result<async_nats::Message> {
        let mut refused = self.refusals.as_ref().map(Refusals::heard);
        let refusal = async {
            match &mut refused {
                Some(refused) => refused.about(&subject, &self.nats.new_inbox()).await,
                None => std::future::pending().await,
            }
        };
        let reply = tokio::select! {
            reply = jetstream::request_within(TIMEOUT, &self.nats, subject.clone(), headers, body) => reply,
            refusal = refusal => return Err(refusal),
        };
        reply.map_err(|error| match error.kind() {
            RequestErrorKind::TimedOut => Error::unavailable(format!("no answer on {subject} in time")),
            RequestErrorKind::NoResponders => Error::unavailable(format!("nobody answers on {subject}")),
            RequestErrorKind::InvalidSubject => Error::invalid(format!("not a subject: {subject}")),
            RequestErrorKind::MaxPayloadExceeded => {
                Error::new(Code::PayloadTooLarge, "the request is larger than this NATS server's messages may be")
            }
            _ => Error::unavailable("the request was not sent").source(error),
        })
    }
}

fn headers(encoding: Encoding, context: &Context) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, encoding.content_type());
    if context.respond_async {
        headers.insert(Context::PREFER_HEADER, "respond-async");
    }
    if let Some(user) = &context.user {
        headers.insert(Context::USER_HEADER, &**user);
    }
    if let Some(key) = &context.idempotency_key {
        headers.insert(IdempotencyKey::HEADER, key.as_str());
    }
    if let Some(trace) = context.trace.header() {
        headers.insert(Trace::HEADER, trace);
    }
    if let Some(name) = &context.named {
        headers.insert(Context::NAME_HEADER, &**name);
    }
    headers
}

/// What came back, not read yet.
struct Reply {
    encoding: Encoding,
    message: async_nats::Message,
}

impl Reply {
    fn read<A: DeserializeOwned>(&self) -> Result<A> {
        outcome(&self.message).and_then(|()| self.encoding.decode_reply(&self.message.payload))
    }
}

fn header<'a>(reply: &'a async_nats::Message, name: &str) -> Option<&'a str> {
    reply.headers.as_ref()?.get(name).map(|value| value.as_str())
}

/// Whether a reply is an answer or an error.
fn outcome(reply: &async_nats::Message) -> Result<()> {
    if header(reply, SERVICE_ERROR_CODE).is_none() {
        return Ok(());
    }
    let body: Result<error::Body> = Encoding::of(header(reply, CONTENT_TYPE)).decode(&reply.payload);
    Err(match body {
        Ok(body) => body.into(),
        Err(_) => {
            let problem = header(reply, SERVICE_ERROR).unwrap_or("failed");
            Error::unavailable(format!("{}: {problem}", reply.subject))
        }
    })
}
