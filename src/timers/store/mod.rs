//! The timers' rows: every statement that touches them, each for many rows at once where many come.

mod attempts;
mod change;
mod claim;
mod due;
mod insert;
mod list;
mod row;
mod settle;

use sqlx::PgPool;

pub use change::Transition;
pub use claim::Claimed;
pub use due::Entry;
pub use insert::{Inserted, Inserter};
pub use list::Page;
pub use row::{TimerRow, not_found};
pub use settle::Settlement;

use crate::error::Error;

/// Cheap to clone.
#[derive(Clone)]
pub struct Store {
    pub(super) pool: PgPool,
}

impl Store {
    pub fn new(pool: PgPool) -> Self {
        Self { pool }
    }
}

/// An error of the database as callers see it.
pub fn unavailable(error: sqlx::Error) -> Error {
    match crate::database::is_passing(&error) {
        true => Error::unavailable("PostgreSQL is away").source(error),
        false => Error::internal(error),
    }
}

/// JSON that we wrote ourselves.
fn decoded<T: serde::de::DeserializeOwned>(column: &str, text: &str) -> Result<T, sqlx::Error> {
    serde_json::from_str(text)
        .map_err(|error| sqlx::Error::ColumnDecode { index: column.to_owned(), source: error.into() })
}
