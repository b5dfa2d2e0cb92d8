//! Backup and restore of both stores.
//!
//! A backup is taken while everything runs, one store after the other, so it is of no single moment, and what happens later is
//! not in it. That ids are never given again all the same is the restore's work: every counter and the stages pass over a
//! margin, worker ids stay with whoever may have them, and timers that were due meanwhile wait for somebody to decide.
//!
//! - [`snapshot`]: streams, as JetStream itself saves and restores them.
//! - [`dump`]: PostgreSQL, by its own `pg_dump` and `pg_restore`.
//! - [`seal`]: whether the files are still what they were.
//! - [`jump`]: what is passed over afterwards.

mod dump;
mod jump;
mod seal;
mod snapshot;

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
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
};

pub use jump::Jumped;
use seal::Seal;
use snapshot::Saved;

const MANIFEST: &str = "manifest.json";
const POSTGRES: &str = "postgres.dump";
const HISTORICAL: &str = "historical.dump";
/// How often it was restored, and by which margins.
const RESTORES: &str = "restores.json";

/// What stands in a backup's folder.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub version: String,
    pub begun_at: DateTime<Utc>,
    pub ended_at: DateTime<Utc>,
    prefix: String,
    streams: Vec<Saved>,
    pub historical: bool,
    files: Seal,
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
    // It has secrets: hashes of keys, payloads of timers.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|source| file(folder, source))?;
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
        files: seal::of(folder).await?,
    };
    // Last: a folder without it is no backup.
    let text = serde_json::to_string_pretty(&manifest).expect("a manifest is JSON");
    write(&folder.join(MANIFEST), &text)?;
    Ok(manifest)
}

/// What the operator decides.
#[derive(Debug, Clone, Copy)]
pub struct Restore {
    pub margins: Margins,
    /// Whether timers that are due later wait for somebody too.
    pub pause_timers: bool,
    /// Whether what the servers have is removed.
    pub replace: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Margins {
    /// Numbers that each counter, pool and the stages pass over.
    pub numbers: u32,
    /// Worker ids of each snowflake key that may have been leased since, beyond those that are known.
    pub workers: u32,
    /// How long a lease may still be held.
    #[serde(skip)]
    pub longest_lease: Duration,
}

/// Puts a backup into empty servers, or over what they have.
pub async fn restore(
    config: &Config,
    folder: &Path,
    wanted: Restore,
    say: &mut dyn FnMut(String),
) -> Result<(Margins, Jumped)> {
    let manifest = read(folder)?;
    if manifest.prefix != config.nats.prefix.as_str() {
        let problem = format!("is of the prefix {}, and nats.prefix is {}", manifest.prefix, config.nats.prefix);
        return Err(BackupError::Folder { path: folder.into(), problem });
    }
    let historical = config.historical.database().filter(|_| manifest.historical);
    if manifest.historical && historical.is_none() {
        return Err(BackupError::Refused("the backup has a historical database: set historical.database_url".into()));
    }
    let nats = jetstream::connect(&config.nats).await?;
    jetstream::require_version(&nats)?;
    let (context, declarations) = (jetstream::jetstream_context(&nats), jetstream::declarations(config));
    let pool = database::pool(&config.database)?;
    // Everything that can be known is looked at before anything is touched.
    seal::check(folder, &manifest.files).await?;
    dump::check(&config.database, &folder.join(POSTGRES)).await?;
    if let Some(database) = &historical {
        dump::check(database, &folder.join(HISTORICAL)).await?;
    }
    if !wanted.replace {
        refuse_what_is_there(&pool, &context, &declarations).await?;
    }
    refuse_if_served(&nats, config).await?;
    let margins = added_up(folder, wanted.margins)?;

    // From here on no process starts until the end: it would take its counters for current ones.
    jetstream::begin_restore(&pool).await?;
    refuse_if_served(&nats, config).await?;
    if wanted.replace {
        dump::empty(&pool).await?;
    }
    dump::load(&config.database, &folder.join(POSTGRES)).await?;
    say("PostgreSQL is restored".into());
    if let Some(database) = &historical {
        if wanted.replace {
            dump::empty(&database::pool(database)?).await?;
        }
        dump::load(database, &folder.join(HISTORICAL)).await?;
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
    let jumped = jump::past_what_was_given(config, &nats, &pool, &manifest, margins, wanted.pause_timers).await?;
    jetstream::end_restore(&pool).await?;
    jetstream::apply_guarded(&pool, &context, &declarations, true).await?;
    Ok((margins, jumped))
}

async fn refuse_if_served(nats: &async_nats::Client, config: &Config) -> Result<()> {
    match crate::nats::is_served(nats, &config.nats.prefix).await {
        true => Err(BackupError::Refused("an instance of this deployment is running: stop all of them first".into())),
        false => Ok(()),
    }
}

/// What is passed over in all: a backup that was restored before has given what came after that margin.
fn added_up(folder: &Path, margins: Margins) -> Result<Margins> {
    let path = folder.join(RESTORES);
    let before: Vec<Margins> = match fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text)
            .map_err(|error| BackupError::Folder { path: path.clone(), problem: format!("can't be read: {error}") })?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(file(&path, source)),
    };
    let all: Vec<Margins> = before.into_iter().chain([margins]).collect();
    let text = serde_json::to_string_pretty(&all).expect("numbers are JSON");
    write(&path, &text)?;
    let sum = |of: fn(&Margins) -> u32| all.iter().map(of).fold(0, u32::saturating_add);
    Ok(Margins { numbers: sum(|one| one.numbers), workers: sum(|one| one.workers), ..margins })
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

/// A new file that only we can read.
fn private(path: &Path) -> Result<File> {
    let opened = File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    opened.map_err(|source| file(path, source))
}

/// Writes such a file, and returns when it is on disk.
fn write(path: &Path, text: &str) -> Result<()> {
    let mut to = private(path)?;
    to.write_all(text.as_bytes()).and_then(|()| to.sync_all()).map_err(|source| file(path, source))
}

fn size(path: &Path) -> Result<u64> {
    fs::metadata(path).map(|metadata| metadata.len()).map_err(|source| file(path, source))
}

fn file(path: &Path, source: std::io::Error) -> BackupError {
    BackupError::File { path: path.into(), source }
}
