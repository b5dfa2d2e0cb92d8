//! Counters as high-water marks in a JetStream bucket.
//!
//! - [`Bucket`] reads and writes keys: compare-and-set, alone or several in one atomic batch.
//! - [`Cells`] changes keys with group commit: all callers that wait share one synced write, in strict order.
//! - [`Ranges`] reserves numbers ahead and serves them from memory, for callers that want latency.
//! - [`once`] gives a repeated request its first answer again.
//!
//! The promise of the whole: a number may be skipped, but it is never given twice.

mod bucket;
mod cells;
pub mod once;
mod ranges;

pub use bucket::{Bucket, Entry, Write};
pub use cells::{Cells, Committed};
pub use once::Once;
pub use ranges::{Mark, RangeSettings, Ranges, Steps};
