//! The ledger's tables: every statement that touches them, each for many rows at once.

mod heads;
mod minutes;
mod partitions;
mod quarantine;
mod records;
mod shards;
mod tallies;

pub use heads::{Head, heads, move_heads};
pub use minutes::{Count, MinuteKey, add_minutes, forget_minutes, minutes};
pub use partitions::extend_partitions;
pub use quarantine::{
    Refused, Reviewed, Size, forget_quarantined, mark_replayed, quarantine, quarantined, refuse_again, waiting,
    waiting_sizes,
};
pub use records::{Neighbours, NewRow, Stored, insert, neighbours, stored};
pub use shards::{move_position, position, shards, take_shard};
pub use tallies::{Tally, TallyKey, add_tallies, tallies};

use crate::error::Error;

/// An error of the database as callers see it.
pub fn unavailable(error: sqlx::Error) -> Error {
    match crate::database::is_passing(&error) {
        true => Error::unavailable("PostgreSQL is away, or too busy to answer").source(error),
        false => Error::internal(error),
    }
}

/// What a statement for many rows takes: one list for each column.
fn column<R, T>(rows: impl IntoIterator<Item = R>, get: impl Fn(R) -> T) -> Vec<T> {
    rows.into_iter().map(get).collect()
}
