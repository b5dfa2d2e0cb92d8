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

pub use crate::database::unavailable;

use crate::database::column;
