//! What every instance must know at once: API keys and the configuration of id keys.
//!
//! It lives in the bucket `tm_registry`. Every instance watches the bucket and holds all of it in memory, so a change
//! reaches all of them within milliseconds, and neither authentication nor an id needs a lookup, let alone PostgreSQL.

pub mod keys;
mod table;

use std::{collections::HashSet, convert::Infallible, sync::Arc, time::Duration};

use async_nats::jetstream::{self, kv};
use futures::StreamExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use table::{Record, Table};

use crate::{
    api::Name,
    error::{Code, Error, Result},
    ids::IncrementRecord,
    jetstream::{CasError, compare_and_set},
};

/// Cheap to clone.
#[derive(Clone)]
pub struct Registry {
    pub keys: Table<keys::ApiKey>,
    pub increments: Table<IncrementRecord>,
    seen: watch::Sender<Option<u64>>,
    connection: Arc<Connection>,
}

struct Connection {
    jetstream: jetstream::Context,
    bucket: String,
}

impl Registry {
    /// A registry that knows nothing until [`Registry::follow`] runs.
    pub fn new(jetstream: jetstream::Context, prefix: &Name) -> Self {
        Self {
            keys: Table::default(),
            increments: Table::default(),
            seen: watch::Sender::new(None),
            connection: Arc::new(Connection { jetstream, bucket: bucket(prefix) }),
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
        let Connection { jetstream, bucket } = &*self.connection;
        let store = jetstream.get_key_value(bucket).await?;
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
        self.increments.retain(present);
        self.seen.send_replace(Some(revision));
    }

    fn apply(&self, entry: &kv::Entry) {
        let value = matches!(entry.operation, kv::Operation::Put).then_some(&*entry.value);
        match entry.key.split_once('.') {
            Some((keys::ApiKey::TABLE, id)) => self.keys.apply(id, value, entry.revision),
            Some((IncrementRecord::TABLE, id)) => self.increments.apply(id, value, entry.revision),
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

    /// Stores a record if nobody changed it since `revision` (0: it must be new), and returns when this instance sees it.
    pub async fn store<R: Record>(&self, id: &Name, record: &R, revision: u64) -> Result<()> {
        let value = serde_json::to_vec(record).map_err(Error::internal)?;
        self.write::<R>(id, revision, value.into(), None).await
    }

    /// Removes a record, and returns when this instance no longer sees it.
    pub async fn remove<R: Record>(&self, id: &Name, revision: u64) -> Result<()> {
        self.write::<R>(id, revision, Default::default(), Some("DEL")).await
    }

    async fn write<R: Record>(
        &self,
        id: &Name,
        revision: u64,
        value: bytes::Bytes,
        operation: Option<&str>,
    ) -> Result<()> {
        let Connection { jetstream, bucket } = &*self.connection;
        let subject = format!("$KV.{bucket}.{}.{id}", R::TABLE);
        let mut headers = async_nats::HeaderMap::new();
        if let Some(operation) = operation {
            headers.insert("KV-Operation", operation);
        }
        let written = compare_and_set(&jetstream.client(), subject, headers, value, revision).await;
        let revision = written.map_err(|error| match error {
            CasError::Conflict => Error::new(
                Code::Conflict,
                format!("{id} was changed by somebody else at the same moment; look again and repeat"),
            ),
            CasError::NotStored(source) | CasError::Unknown(source) => {
                Error::unavailable("the registry could not be written").source(source)
            }
        })?;
        let mut seen = self.seen.subscribe();
        let caught_up = seen.wait_for(|seen| seen.is_some_and(|seen| seen >= revision));
        match tokio::time::timeout(Duration::from_secs(5), caught_up).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::unavailable("stored, but this instance has not seen it yet")),
        }
    }
}

/// The bucket's name under a prefix.
pub fn bucket(prefix: &Name) -> String {
    format!("{prefix}_registry")
}
