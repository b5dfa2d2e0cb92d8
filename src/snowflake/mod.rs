//! Snowflakes: ids made of a timestamp, a worker id and a sequence.
//!
//! The [`Layout`] says which bits are which; the [`Generator`] mints with a worker id that is leased. Used by the client,
//! and by the service for callers that can't hold a lease.

mod generator;
mod keeper;
mod layout;

pub use generator::{Fence, Generator, Refusal};
pub use keeper::Keeper;
pub use layout::Layout;
