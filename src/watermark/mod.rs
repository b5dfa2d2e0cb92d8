//! Counters as high-water marks in a JetStream bucket.
//!
//! - [`Cells`] changes keys with group commit: all callers that wait share one synced write, in strict order.
//! - [`Ranges`] reserves numbers ahead and serves them from memory, for callers that want latency.
//! - [`leases`] hands out numbers for a while, each to one holder at a time.
//! - [`once`] gives a repeated request its first answer again.
//! - [`Passed`] tells what a restore has passed over.
//!
//! The promise of the whole: a number may be skipped, but it is never given twice.

mod cell;
mod cells;
mod group;
pub mod leases;
mod numbers;
pub mod once;
mod passed;
mod ranges;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{api::Name, jetstream::Bucket};

pub use cells::{Cells, Committed, Older, Parts, Past, State};
pub use numbers::{Absent, Bounds, Mark, Steps, lost};
pub use once::Once;
pub use passed::Passed;
pub use ranges::{RangeSettings, Ranges};

/// The caller's or the proxy's name for a request, kept beside what it took. It grants and decides nothing.
pub type RequestId = Option<Arc<str>>;

/// Tells a request's name where it is needed, which is once in a thousand requests.
pub type Requester<'a> = &'a (dyn Fn() -> RequestId + Send + Sync);

/// Numbers of one counter that a process has reserved and not given yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AtHand {
    pub counter: String,
    pub numbers: i64,
}

/// Where the marks live, with their history.
pub fn bucket(jetstream: async_nats::jetstream::Context, prefix: &Name) -> Bucket {
    Bucket::new(jetstream, format!("{prefix}_counters"))
}

/// Where the leases live.
pub fn lease_bucket(jetstream: async_nats::jetstream::Context, prefix: &Name) -> Bucket {
    Bucket::new(jetstream, format!("{prefix}_leases"))
}
