//! Counters as high-water marks in a JetStream bucket.
//!
//! - [`Cells`] changes keys with group commit: all callers that wait share one synced write, in strict order.
//! - [`Ranges`] reserves numbers ahead and serves them from memory, for callers that want latency.
//! - [`once`] gives a repeated request its first answer again.
//!
//! The promise of the whole: a number may be skipped, but it is never given twice.

mod cells;
pub mod once;
mod ranges;

use crate::{api::Name, jetstream::Bucket};

pub use cells::{Cells, Committed};
pub use once::Once;
pub use ranges::{Mark, RangeSettings, Ranges, Steps, lost};

/// The bucket that the counters live in.
pub fn bucket(jetstream: async_nats::jetstream::Context, prefix: &Name) -> Bucket {
    Bucket::new(jetstream, format!("{prefix}_counters"))
}
