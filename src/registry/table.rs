//! One kind of record in the registry, held in memory.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, RwLock},
};

use serde::{Serialize, de::DeserializeOwned};

/// A kind of record. Its table's name is the first token of its keys in the bucket.
pub trait Record: Serialize + DeserializeOwned + Send + Sync + 'static {
    const TABLE: &'static str;
}

/// Cheap to clone; all clones see the same rows. Rows are ordered by id.
pub struct Table<R>(Arc<RwLock<BTreeMap<String, Row<R>>>>);

struct Row<R> {
    /// None where a record was removed, or is broken: the revision is still needed to write over it.
    record: Option<Arc<R>>,
    revision: u64,
}

impl<R: Record> Table<R> {
    pub fn get(&self, id: &str) -> Option<Arc<R>> {
        self.read().get(id)?.record.clone()
    }

    /// The revision to change a record at; 0 if there never was one.
    pub fn revision(&self, id: &str) -> u64 {
        self.read().get(id).map_or(0, |row| row.revision)
    }

    pub fn all(&self) -> Vec<(String, Arc<R>)> {
        self.read().iter().filter_map(|(id, row)| Some((id.clone(), row.record.clone()?))).collect()
    }

    /// Keeps the rows whose keys in the bucket are present.
    pub(super) fn retain(&self, present: &HashSet<String>) {
        self.write().retain(|id, _| present.contains(&format!("{}.{id}", R::TABLE)));
    }

    /// Takes over what the bucket says. A broken record harms itself only: it is as good as absent, and logged.
    pub(super) fn apply(&self, id: &str, value: &[u8], revision: u64) {
        let record = serde_json::from_slice::<Option<R>>(value).unwrap_or_else(|error| {
            tracing::error!(table = R::TABLE, id, %error, "a broken record in the registry is passed over");
            None
        });
        let record = record.map(Arc::new);
        self.write().insert(id.to_owned(), Row { record, revision });
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<String, Row<R>>> {
        self.0.read().expect("no panic while a table is held")
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<String, Row<R>>> {
        self.0.write().expect("no panic while a table is held")
    }
}

impl<R> Clone for Table<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R> Default for Table<R> {
    fn default() -> Self {
        Self(Arc::default())
    }
}
