//! The connection to PostgreSQL, and its migrations.

use std::{str::FromStr, time::Duration};

use serde_json::Value;
use sqlx::{
    Connection, PgPool,
    migrate::{MigrateError, Migrator},
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{config, error::Error};

/// The numbered files of `migrations/`.
pub static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// The same for the historical database of usage.
pub static HISTORICAL_MIGRATIONS: Migrator = sqlx::migrate!("./migrations-historical");

/// 15.0, as the server counts.
const MINIMUM_VERSION: i32 = 150_000;

#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("database.url: {0}")]
    Address(sqlx::Error),
    #[error("PostgreSQL is not reachable: {0}")]
    Unreachable(sqlx::Error),
    #[error("PostgreSQL {found} is too old: Tidemark needs 15 or newer")]
    TooOld { found: String },
    #[error("the database was migrated by another version of Tidemark: {0}")]
    OtherVersion(MigrateError),
    #[error("migration: {0}")]
    Migration(MigrateError),
}

impl DatabaseError {
    /// Whether waiting may help.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Migration(error) => matches!(error, MigrateError::Execute(_)),
            Self::Address(_) | Self::TooOld { .. } | Self::OtherVersion(_) => false,
        }
    }
}

/// A pool that connects when it is first used, so that a missing server is no error yet.
pub fn pool(database: &config::Database) -> Result<PgPool, DatabaseError> {
    pool_of(database, database.max_connections)
}

/// The same with so many connections.
pub fn pool_of(database: &config::Database, connections: u32) -> Result<PgPool, DatabaseError> {
    pool_with(database, connections, "")
}

/// For pages out of large tables with many partitions: planned once instead of each time, always along an index, and never
/// for long.
pub fn reading_pool(database: &config::Database, connections: u32) -> Result<PgPool, DatabaseError> {
    let settings = "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set enable_bitmapscan = off;
        set enable_sort = off; set statement_timeout = '10s'; set default_transaction_read_only = on";
    pool_with(database, connections, settings)
}

/// For statements that are given up after a while and tried again: a lock of somebody else's keeps them no longer than that,
/// and so does not take one connection after the other.
pub fn impatient_pool(database: &config::Database, connections: u32) -> Result<PgPool, DatabaseError> {
    pool_with(database, connections, "set lock_timeout = '8s'")
}

/// Whoever vanishes in the middle of a transaction lets go of what he holds. And nothing is compiled: over many partitions a
/// statement looks so expensive that PostgreSQL would, which takes a second where the statement takes a millisecond.
const SESSION: &str = "set idle_in_transaction_session_timeout = '60s'; set tcp_keepalives_idle = 10;
    set tcp_keepalives_interval = 5; set tcp_keepalives_count = 3; set jit = off";

/// A connection that was used a moment ago is not asked whether it is alive. Where many wait, whoever asks may run out of time
/// meanwhile, and his connection is thrown away with his question: then there are ever fewer, and all the time goes into new ones.
const ALIVE: Duration = Duration::from_secs(1);

fn pool_with(database: &config::Database, connections: u32, settings: &'static str) -> Result<PgPool, DatabaseError> {
    let options = PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(3))
        .test_before_acquire(false)
        .before_acquire(|connection, known| {
            Box::pin(async move { Ok(known.idle_for < ALIVE || connection.ping().await.is_ok()) })
        })
        .after_connect(move |connection, _| {
            Box::pin(async move {
                sqlx::raw_sql(SESSION).execute(&mut *connection).await?;
                sqlx::raw_sql(settings).execute(connection).await.map(drop)
            })
        });
    Ok(options.connect_lazy_with(connect_options(database)?))
}

fn connect_options(database: &config::Database) -> Result<PgConnectOptions, DatabaseError> {
    let options = match &database.url {
        Some(url) => PgConnectOptions::from_str(url.expose()).map_err(DatabaseError::Address)?,
        None => {
            let options = PgConnectOptions::new()
                .host(&database.host)
                .port(database.port)
                .username(&database.user)
                .database(&database.name);
            match &database.password {
                Some(password) => options.password(password.expose()),
                None => options,
            }
        }
    };
    Ok(options.application_name("tidemark"))
}

/// Whether waiting may help: the server is away, going or coming, or two transactions stood in each other's way.
pub fn is_passing(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => error.code().is_some_and(|code| {
            // Connection exceptions, too many of them, locks that others hold, operator's intervention, serialization failures and deadlocks.
            ["08", "53", "55P", "57P", "40"].iter().any(|class| code.starts_with(class))
        }),
        _ => false,
    }
}

/// Whether a lock of somebody else was not to be had in time.
pub fn is_locked(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(error) if error.code().as_deref() == Some("55P03"))
}

/// An error of the database as callers see it.
pub fn unavailable(error: sqlx::Error) -> Error {
    // A statement that was canceled because of its timeout.
    if matches!(&error, sqlx::Error::Database(error) if error.code().as_deref() == Some("57014")) {
        return Error::unavailable("PostgreSQL took too long for this: ask for less").source(error);
    }
    match is_passing(&error) {
        true => Error::unavailable("PostgreSQL is away, or too busy to answer").source(error),
        false => Error::internal(error),
    }
}

/// Text that PostgreSQL can keep: it takes no NUL.
pub fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// JSON that it can keep as `jsonb`.
pub fn json_without_nul(value: &Value) -> String {
    value.to_string().replace("\\u0000", "\\ufffd")
}

/// What a statement for many rows takes: one list for each column.
pub fn column<R, T>(rows: impl IntoIterator<Item = R>, get: impl Fn(R) -> T) -> Vec<T> {
    rows.into_iter().map(get).collect()
}

/// Whether the error is about what was to be written, so that writing it again won't help: a data exception, a constraint, a
/// limit of the server, or something that has no form on the wire. Everything else is the server's or ours to mend.
pub fn is_about_data(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Encode(_) => true,
        sqlx::Error::Database(error) => {
            error.code().is_some_and(|code| ["22", "23", "54"].iter().any(|class| code.starts_with(class)))
        }
        _ => false,
    }
}

/// Brings the database up to date. Any number of processes may try at once; one does it.
pub async fn migrate(pool: &PgPool, migrations: &Migrator) -> Result<(), DatabaseError> {
    let number: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int")
        .fetch_one(pool)
        .await
        .map_err(DatabaseError::Unreachable)?;
    if number < MINIMUM_VERSION {
        return Err(DatabaseError::TooOld { found: format!("{}.{}", number / 10_000, number % 10_000) });
    }
    migrations.run(pool).await.map_err(|error| match error {
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) | MigrateError::VersionTooOld(..) => {
            DatabaseError::OtherVersion(error)
        }
        other => DatabaseError::Migration(other),
    })
}
