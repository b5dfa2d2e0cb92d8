//! Identifiers: increment keys on the watermark.

mod increment;

pub use increment::{Ids, IncrementRecord};
