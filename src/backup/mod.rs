//! Backup and restore of both stores.
//!
//! A backup is taken while everything runs, one store after the other, so it is of no single moment, and what happens later is
//! not in it. That ids are never given again all the same is the restore's work: every counter and the stages pass over a
//! margin, worker ids stay with whoever may have them, and timers that were due meanwhile wait for somebody to decide.
//!
//! - [`snapshot`]: streams, as JetStream itself saves and restores them.
//! - [`dump`]: PostgreSQL, by its own `pg_dump` and `pg_restore`.
//! - [`jump`]: what is passed over afterwards.

mod dump;
mod jump;
mod snapshot;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{
    config::Config,
    database::{self, DatabaseError},
    error::Error,
    jetstream::{self, ApplyError, ConnectError, Declaration},
    nats,
};

pub use jump::Jumped;
use snapshot::Saved;

const MANIFEST: &str = "manifest.json";
const POSTGRES: &str = "postgres.dump";
const HISTORICAL: &str = "historical.dump";

/// What stands in a backup's folder.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub version: String,
    pub begun_at: DateTime<Utc>,
    pub ended_at: DateTime<Utc>,
    prefix: String,
    streams: Vec<Saved>,
    pub historical: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}: {problem}", path.display())]
    Folder { path: PathBuf, problem: String },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error("PostgreSQL: {0}")]
    Statement(#[from] sqlx::Error),
    #[error(transparent)]
    Streams(#[from] ApplyError),
    #[error("the stream {stream}: {problem}")]
    Stream { stream: String, problem: String },
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Jump(#[from] Error),
}

type Result<T, E = BackupError> = std::result::Result<T, E>;

/// Saves everything into a folder, which is made.
pub async fn backup(config: &Config, folder: &Path, say: &mut dyn FnMut(String)) -> Result<Manifest> {
    let begun_at = Utc::now();
    let nats = jetstream::connect(&config.nats).await?;
    jetstream::require_version(&nats)?;
    fs::create_dir_all(folder).map_err(|source| file(folder, source))?;
    if fs::read_dir(folder).map_err(|source| file(folder, source))?.next().is_some() {
        return Err(BackupError::Folder { path: folder.into(), problem: "is not empty".into() });
    }
    // Usage before PostgreSQL: what is written to the ledger meanwhile is then in both, and counts once; the other way round
    // it would be in neither. A key's record before its counter: a counter without a key harms nobody.
    let mut streams = Vec::new();
    for name in order(&jetstream::declarations(config)) {
        let saved = snapshot::save(&nats, &name, folder).await?;
        say(format!("{name}: {} messages, {} bytes", saved.messages, saved.bytes));
        streams.push(saved);
    }
    dump::save(&config.database, &folder.join(POSTGRES)).await?;
    say(format!("PostgreSQL: {} bytes", size(&folder.join(POSTGRES))?));
    let historical = config.historical.database();
    if let Some(database) = &historical {
        dump::save(database, &folder.join(HISTORICAL)).await?;
        say(format!("the historical database: {} bytes", size(&folder.join(HISTORICAL))?));
    }
    let manifest = Manifest {
        version: env!("CARGO_PKG_VERSION").into(),
        begun_at,
        ended_at: Utc::now(),
        prefix: config.nats.prefix.to_string(),
        streams,
        historical: historical.is_some(),
    };
    // Last: a folder without it is no backup.
    let text = serde_json::to_string_pretty(&manifest).expect("a manifest is JSON");
    let path = folder.join(MANIFEST);
    fs::write(&path, text).map_err(|source| file(&path, source))?;
    Ok(manifest)
}

/// What the operator decides.
#[derive(Debug, Clone, Copy)]
pub struct Margins {
    /// Numbers that each counter, pool and the stages pass over.
    pub numbers: u32,
    /// Worker ids of each snowflake key that may have been leased since, beyond those that are known.
    pub workers: u32,
    /// How long a lease may still be held.
    pub longest_lease: Duration,
}

/// Puts a backup into empty servers, or over what they have.
pub async fn restore(
    config: &Config,
    folder: &Path,
    margins: Margins,
    replace: bool,
    say: &mut dyn FnMut(String),
) -> Result<Jumped> {
    let manifest = read(folder)?;
    if manifest.prefix != config.nats.prefix.as_str() {
        let problem = format!("is of the prefix {}, and nats.prefix is {}", manifest.prefix, config.nats.prefix);
        return Err(BackupError::Folder { path: folder.into(), problem });
    }
    if manifest.historical && config.historical.database_url.is_none() {
        return Err(BackupError::Refused("the backup has a historical database: set historical.database_url".into()));
    }
    let nats = jetstream::connect(&config.nats).await?;
    jetstream::require_version(&nats)?;
    if nats::is_served(&nats, &config.nats.prefix).await {
        return Err(BackupError::Refused("an instance of this deployment is running: stop all of them first".into()));
    }
    let context = jetstream::jetstream_context(&nats);
    let declarations = jetstream::declarations(config);
    let pool = database::pool(&config.database)?;
    match replace {
        true => dump::empty(&pool).await?,
        false => refuse_what_is_there(&pool, &context, &declarations).await?,
    }
    dump::load(&config.database, &folder.join(POSTGRES)).await?;
    say("PostgreSQL is restored".into());
    // From here on no process starts until the end: it would take its counters for current ones.
    sqlx::query("update jetstream_identity set created = 'a restore is not finished'").execute(&pool).await?;
    if let Some(database) = config.historical.database().filter(|_| manifest.historical) {
        if replace {
            dump::empty(&database::pool(&database)?).await?;
        }
        dump::load(&database, &folder.join(HISTORICAL)).await?;
        say("the historical database is restored".into());
    }
    for declaration in &declarations {
        snapshot::remove(&context, declaration.name()).await?;
    }
    for saved in &manifest.streams {
        snapshot::load(&nats, saved, folder).await?;
        say(format!("{} is restored: {} messages", saved.stream, saved.messages));
    }
    database::migrate(&pool, &database::MIGRATIONS).await?;
    for declaration in &declarations {
        jetstream::apply(&context, declaration).await?;
    }
    let jumped = jump::past_what_was_given(config, &nats, &pool, margins).await?;
    jetstream::apply_guarded(&pool, &context, &declarations, true).await?;
    Ok(jumped)
}

pub fn read(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    let text = fs::read_to_string(&path).map_err(|source| file(&path, source))?;
    serde_json::from_str(&text)
        .map_err(|error| BackupError::Folder { path, problem: format!("is no manifest of a backup: {error}") })
}

/// The streams that are worth keeping. Limiters forget within seconds, and wake-ups of timers are made anew from the table.
fn order(declarations: &[Declaration]) -> Vec<String> {
    let kept = |declaration: &&Declaration| !declaration.is_in_memory() && !declaration.has_schedules();
    let mut names: Vec<String> = declarations.iter().filter(kept).map(|kept| kept.name().to_owned()).collect();
    let rank = |name: &String| {
        ["_USAGE", "_registry", "_stage_contents"].iter().position(|end| name.ends_with(end)).unwrap_or(usize::MAX)
    };
    names.sort_by_key(rank);
    names
}

async fn refuse_what_is_there(
    pool: &sqlx::PgPool,
    context: &async_nats::jetstream::Context,
    declarations: &[Declaration],
) -> Result<()> {
    let tables: i64 = sqlx::query_scalar("select count(*) from pg_tables where schemaname = current_schema()")
        .fetch_one(pool)
        .await?;
    let mut there: Vec<String> = (tables > 0).then(|| format!("{tables} tables in the database")).into_iter().collect();
    for declaration in declarations {
        if !jetstream::diff(context, declaration).await?.missing {
            there.push(format!("the stream {}", declaration.name()));
        }
    }
    match there.is_empty() {
        true => Ok(()),
        false => Err(BackupError::Refused(format!(
            "there is something already: {}. --replace removes it first, and what is only there is lost",
            there.join(", ")
        ))),
    }
}

fn size(path: &Path) -> Result<u64> {
    fs::metadata(path).map(|metadata| metadata.len()).map_err(|source| file(path, source))
}

fn file(path: &Path, source: std::io::Error) -> BackupError {
    BackupError::File { path: path.into(), source }
}
