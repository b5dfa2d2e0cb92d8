//! JetStream: connecting, the streams and buckets that we declare, publishing that knows what happened to it.

mod batch;
mod bucket;
mod connect;
mod identity;
mod publish;
mod request;
mod streams;

pub use batch::publish_batch;
pub use bucket::{Bucket, Entry, Write, Written};
pub use connect::{ConnectError, MINIMUM_SERVER, connect, connect_to, connect_with, require_version};
pub use identity::apply_guarded;
pub use publish::{
    Ack, CasError, DUPLICATE_IN_PROCESS, Message, PublishError, TOO_MANY_MESSAGES, publish, publish_once,
};
pub use request::{request_within, round_trip};
pub use streams::{ApplyError, Change, Declaration, Drift, apply, declarations, diff};
