//! The ledger's tables: every statement that touches them, each for many rows at once.

pub mod backfills;
mod corrections;
mod feed;
mod heads;
pub mod historical;
mod ledger;
mod minutes;
pub mod moved;
mod parked;
pub mod partitions;
mod quarantine;
pub mod ranges;
mod records;
pub mod retention;
mod shards;
mod tallies;

pub use corrections::{NewChange, Next, deprecate, hold_record, note_change, revise};
pub use feed::{Entry, Lane, Listed, append_feed, feed_heads, find, listed};
pub use heads::{Head, heads, mend_heads, move_heads};
pub use ledger::{Place, Row, Selection, changes, cursor_secret, page, versions};
pub use minutes::{Count, MinuteKey, add_minutes, forget_minutes, minutes};
pub use parked::{NewParked, Released, Waiters, park, released, unpark, waiters};
pub use quarantine::{
    Refused, Reviewed, Size, forget_quarantined, mark_replayed, quarantine, quarantined, refuse_again, waiting,
    waiting_sizes,
};
pub use records::{Neighbours, NewRow, Stored, insert, neighbours, stored};
pub use shards::{Written, begin_shard, forget_positions, move_position, shards, take_shard, written};
pub use tallies::{Tally, TallyKey, add_tallies, tallies};

pub use crate::database::unavailable;

use crate::database::column;
