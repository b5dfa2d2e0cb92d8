//! The historical database: a second one, optional, for records that are old and quiet.
//!
//! [`moving`] takes a week of ids there, whole: it is copied, and then given up here if nobody has written to it meanwhile.
//! [`reading`] shows both as one. What is to be corrected comes back first ([`thawing`]): where both have a record, the
//! operational database is right. [`retaining`] lets go there what is kept no longer.
//!
//! Ingest never asks it. Counters are compared with the floors that were kept here, and a key that is as old as a week that
//! moved is refused.

mod moving;
mod reading;
mod retaining;
mod thawing;

pub use retaining::There;

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use sqlx::{PgPool, pool::PoolConnection};
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::store::{historical, moved::bind_historical, unavailable};
use crate::{
    clock::Clock,
    config::Config,
    database::{self, DatabaseError, HISTORICAL_MIGRATIONS, is_passing},
    error::{Error, Result},
};

/// Connections for whoever reads. Each holds one for pages as well, of which there are more.
const READERS: u32 = 2;

/// Connections for whoever moves, and lets go.
const WRITERS: u32 = 2;

pub struct Historical {
    /// The operational one.
    database: PgPool,
    second: Option<Second>,
    /// How old what moves is.
    after: Duration,
    clock: Clock,
}

/// The pools of the second database.
struct Second {
    reading: PgPool,
    writing: PgPool,
    /// Its tables are there, and it is the one that it was: this one.
    ready: OnceCell<Uuid>,
    /// When it was found away: not everybody has to wait for that.
    missed_at: Mutex<Option<Instant>>,
}

impl Second {
    fn was_just_missed(&self) -> bool {
        self.missed_at.lock().expect("no panic while held").is_some_and(|at| at.elapsed() < MISSED)
    }
}

/// How long one that is away is believed to be.
const MISSED: Duration = Duration::from_secs(1);

impl Historical {
    pub fn new(database: PgPool, config: &Config, clock: Clock) -> Result<Self, DatabaseError> {
        let second = match config.historical.database() {
            Some(second) => Some(Second {
                reading: database::reading_pool(&second, READERS)?,
                writing: database::pool_of(&second, WRITERS)?,
                ready: OnceCell::new(),
                missed_at: Mutex::new(None),
            }),
            None => None,
        };
        Ok(Self { database, second, after: config.historical.after, clock })
    }

    /// The second database, as it must be.
    async fn second(&self) -> Result<&Second> {
        let second = self.second.as_ref().ok_or_else(|| {
            Error::unavailable("records of that time were moved, and historical.database_url is not set")
        })?;
        second.ready.get_or_try_init(|| self.prepare(second)).await?;
        Ok(second)
    }

    async fn prepare(&self, second: &Second) -> Result<Uuid> {
        if second.was_just_missed() {
            return Err(Error::unavailable("the historical database is away"));
        }
        if let Err(error) = database::migrate(&second.writing, &HISTORICAL_MIGRATIONS).await {
            *second.missed_at.lock().expect("no panic while held") = Some(Instant::now());
            let message = match error.is_passing() {
                true => "the historical database is away".to_owned(),
                false => format!("historical.database_url: {error}"),
            };
            return Err(Error::unavailable(message).source(error));
        }
        let found = historical::identity(&second.writing).await.map_err(away)?;
        match bind_historical(&self.database, found).await.map_err(unavailable)? == found {
            true => Ok(found),
            false => Err(Error::unavailable(
                "historical.database_url is another database than the one that records were moved to",
            )),
        }
    }

    /// A connection to read there.
    async fn reader(&self) -> Result<PoolConnection<sqlx::Postgres>> {
        self.second().await?.reading.acquire().await.map_err(away)
    }
}

/// An error of the historical database as callers see it.
fn away(error: sqlx::Error) -> Error {
    match is_passing(&error) {
        true => Error::unavailable("the historical database is away, and records of that time are there").source(error),
        false => unavailable(error),
    }
}
