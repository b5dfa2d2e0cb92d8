//! What every instance must know at once: API keys, the configuration of id keys, generations of webhook secrets.
//!
//! It lives in the bucket `tm_registry`. Every instance watches the bucket and holds all of it in memory, so a change
//! reaches all of them within milliseconds, and neither authentication nor an id needs a lookup, let alone PostgreSQL.

pub mod keys;
mod table;

use std::{collections::HashSet, convert::Infallible, time::Duration};

use async_nats::jetstream::{self, kv};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use table::{Record, Row, Table};

use crate::{
    api::{Name, usage::Unit},
    error::{Code, Error, Result},
    ids::KeyRecord,
    jetstream::{Bucket, CasError, Write},
    timers::Rotation,
    usage::{SourceRecord, TenantLimits},
};

/// How often a change is made to a record that others change at the same moment.
const TRIES: usize = 5;

/// Cheap to clone.
#[derive(Clone)]
pub struct Registry {
    pub keys: Table<keys::ApiKey>,
    pub ids: Table<KeyRecord>,
    pub webhooks: Table<Rotation>,
    pub units: Table<Unit>,
    pub sources: Table<SourceRecord>,
    pub limits: Table<TenantLimits>,
    /// The newest revision that the tables have, once they have been read.
    seen: watch::Sender<Option<u64>>,
    bucket: Bucket,
}

impl Registry {
    /// A registry that knows nothing until [`Registry::follow`] runs.
    pub fn new(jetstream: jetstream::Context, prefix: &Name) -> Self {
        Self {
            keys: Table::default(),
            ids: Table::default(),
            webhooks: Table::default(),
            units: Table::default(),
            sources: Table::default(),
            limits: Table::default(),
            seen: watch::Sender::new(None),
            bucket: Bucket::new(jetstream, format!("{prefix}_registry")),
        }
    }

    /// Follows the bucket until told to stop, across every loss of the connection. Its first pass makes us ready.
    pub async fn follow(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            tokio::select! {
                () = stop.cancelled() => return,
                Err(error) = self.watch() => tracing::warn!(%error, "the registry's watch ended and is begun again"),
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
            }
        }
    }

    async fn watch(&self) -> Result<Infallible, async_nats::Error> {
        let store = self.bucket.jetstream().get_key_value(self.bucket.name()).await?;
        let empty = store.status().await?.info.state.messages == 0;
        let mut entries = store.watch_with_history(">").await?;
        if empty {
            self.begin_with(&HashSet::new(), 0);
        }
        // What was removed while nobody watched is not in the history, so the first pass notes what is there.
        let mut first_pass = (!empty).then(HashSet::new);
        while let Some(entry) = entries.next().await {
            let entry = entry?;
            self.apply(&entry);
            match &mut first_pass {
                Some(present) => {
                    present.insert(entry.key);
                    if entry.delta == 0 {
                        self.begin_with(present, entry.revision);
                        first_pass = None;
                    }
                }
                None => drop(self.seen.send_replace(Some(entry.revision))),
            }
        }
        Err("the watch has no more entries".into())
    }

    /// The end of a first pass: whatever is not in the bucket any more goes.
    fn begin_with(&self, present: &HashSet<String>, revision: u64) {
        self.keys.retain(present);
        self.ids.retain(present);
        self.webhooks.retain(present);
        self.units.retain(present);
        self.sources.retain(present);
        self.limits.retain(present);
        self.seen.send_replace(Some(revision));
    }

    fn apply(&self, entry: &kv::Entry) {
        // Operators may delete a key with the tools they have.
        let value = if entry.operation == kv::Operation::Put { &*entry.value } else { b"null" };
        match entry.key.split_once('.') {
            Some((keys::ApiKey::TABLE, id)) => self.keys.apply(id, value, entry.revision),
            Some((KeyRecord::TABLE, id)) => self.ids.apply(id, value, entry.revision),
            Some((Rotation::TABLE, id)) => self.webhooks.apply(id, value, entry.revision),
            Some((Unit::TABLE, id)) => self.units.apply(id, value, entry.revision),
            Some((SourceRecord::TABLE, id)) => self.sources.apply(id, value, entry.revision),
            Some((TenantLimits::TABLE, id)) => self.limits.apply(id, value, entry.revision),
            _ => tracing::debug!(key = entry.key, "an entry of a newer version is left alone"),
        }
    }

    /// Whether the bucket has been read once.
    pub fn ready(&self) -> Result<()> {
        match *self.seen.borrow() {
            Some(_) => Ok(()),
            None => Err(Error::unavailable("the registry has not been read yet")),
        }
    }

    /// Waits for the first pass.
    pub async fn loaded(&self) {
        // The sender lives in `self`, so the wait can't end by its loss.
        let _ = self.seen.subscribe().wait_for(Option::is_some).await;
    }

    /// A record from memory, or, if it is not there, as the bucket has it: another instance may have made it a moment
    /// ago, and "not found" would be untrue.
    pub async fn find<R: Record>(&self, table: &Table<R>, id: &Name) -> Result<Row<R>> {
        let row = table.get(id.as_str());
        if row.record.is_some() {
            return Ok(row);
        }
        // Boxed because it is rare, and every caller's state would have to hold it.
        let read_through = async {
            match self.bucket.read(&R::bucket_key(id)).await? {
                Some(entry) => self.sees(entry.revision).await,
                None => Ok(()),
            }
        };
        Box::pin(read_through).await?;
        Ok(table.get(id.as_str()))
    }

    /// Waits until this instance has seen everything that was written until now.
    pub async fn catch_up(&self) -> Result<()> {
        let stream = self.bucket.jetstream().get_stream(format!("KV_{}", self.bucket.name())).await;
        let stream = stream.map_err(|error| Error::unavailable("the registry can't be read").source(error))?;
        self.sees(stream.cached_info().state.last_sequence).await
    }

    /// Waits until this instance has seen a revision.
    async fn sees(&self, revision: u64) -> Result<()> {
        let mut seen = self.seen.subscribe();
        let caught_up = seen.wait_for(|seen| seen.is_some_and(|seen| seen >= revision));
        match tokio::time::timeout(Duration::from_secs(5), caught_up).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::unavailable("this instance has not seen the newest registry yet")),
        }
    }

    /// Makes a change. Where somebody else changed the same record at the same moment, the change is made to what he left.
    pub async fn until_stored<T, F: Future<Output = Result<T>>>(&self, change: impl Fn() -> F) -> Result<T> {
        for _ in 1..TRIES {
            match change().await {
                Err(error) if error.code == Code::Conflict => self.catch_up().await?,
                changed => return changed,
            }
        }
        change().await
    }

    /// Stores a record if nobody changed it since `revision` (0: it must be new), and returns when this instance sees it.
    pub async fn store<R: Record>(&self, id: &Name, record: &R, revision: u64) -> Result<()> {
        self.write::<R>(id, Some(record), revision).await
    }

    /// Removes a record, and returns when this instance no longer sees it.
    pub async fn remove<R: Record>(&self, id: &Name, revision: u64) -> Result<()> {
        self.write::<R>(id, None, revision).await
    }

    /// What is removed is written over with nothing: its revision goes on, so nobody can bring back an old state.
    async fn write<R: Record>(&self, id: &Name, record: Option<&R>, revision: u64) -> Result<()> {
        let value = Bytes::from(serde_json::to_vec(&record).map_err(Error::internal)?);
        let write = Write { expected: Some(revision), ..Write::to(R::bucket_key(id), value) };
        let revision = self.bucket.write(&[write]).await.map_err(|error| match error {
            CasError::Conflict | CasError::UnderWay => changed_meanwhile(id),
            CasError::NotStored(source) | CasError::Unknown(source) => {
                Error::unavailable("the registry could not be written").source(source)
            }
        })?;
        self.sees(revision).await
    }
}

/// Two changed the same thing, and one was first.
pub fn changed_meanwhile(id: &Name) -> Error {
    Error::new(Code::Conflict, format!("{id} was changed by somebody else at the same moment; look again and repeat"))
}
