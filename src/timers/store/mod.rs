//! The timers' rows: every statement that touches them, each for many rows at once where many come.

mod attempts;
mod change;
mod claim;
mod due;
mod insert;
mod list;
mod restored;
mod row;
mod settle;

use std::{future::Future, str::FromStr, time::Duration};

use serde::de::DeserializeOwned;
use sqlx::{PgPool, Row, error::BoxDynError, postgres::PgRow};
use tokio::time::timeout;

pub use change::Transition;
pub use claim::Claimed;
pub use due::Entry;
pub use insert::{Inserted, Inserter};
pub use list::Page;
pub use restored::pause_what_may_have_fired;
pub use row::{TimerRow, not_found};
pub use settle::{Settled, Settlement};

pub use crate::database::unavailable;

use crate::database::column;

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

/// A server that hangs must not hang the scheduler: what takes this long is tried again.
const PATIENCE: Duration = Duration::from_secs(10);

async fn bounded<T>(asked: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
    timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
        let hangs = format!("PostgreSQL did not answer within {PATIENCE:?}");
        Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, hangs)))
    })
}

/// A column of JSON, read as text.
fn json<T: DeserializeOwned>(row: &PgRow, column: &str) -> Result<Option<T>, sqlx::Error> {
    let text: Option<&str> = row.try_get(column)?;
    let broken =
        |error: serde_json::Error| sqlx::Error::ColumnDecode { index: column.to_owned(), source: error.into() };
    text.map(serde_json::from_str).transpose().map_err(broken)
}

/// A column of text that stands for something.
fn parsed<T: FromStr<Err: Into<BoxDynError>>>(row: &PgRow, column: &str) -> Result<T, sqlx::Error> {
    let text: &str = row.try_get(column)?;
    text.parse().map_err(|error: T::Err| sqlx::Error::ColumnDecode { index: column.to_owned(), source: error.into() })
}
