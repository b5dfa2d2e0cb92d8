//! JetStream: connecting, the streams and buckets that we declare, publishing that knows what happened to it.

mod batch;
mod bucket;
mod connect;
mod decide;
mod identity;
mod log;
mod memory;
mod publish;
mod request;
pub mod stored;
mod streams;

pub use batch::publish_batch;
pub use bucket::{Bucket, Entry, Write};
pub use connect::{
    ConnectError, MINIMUM_SERVER, connect, connect_telling, connect_to, connect_with, jetstream_context,
    require_version,
};
pub use decide::{Undecided, pause_before, step_back, until_decided};
pub use identity::{apply_guarded, begin_restore, end_restore};
pub use log::{Entry as LogEntry, Log};
pub use memory::keep_in_memory;
pub use publish::{Ack, CasError, Message, PublishError, publish, publish_once};
pub use request::{request_within, round_trip};
pub use streams::{ApplyError, Change, Declaration, Drift, apply, declarations, diff};
