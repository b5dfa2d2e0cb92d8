//! One kind of record in the registry, held in memory.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, RwLock},
};

use serde::{Serialize, de::DeserializeOwned};

use crate::api::Name;

/// A kind of record. Its table's name is the first token of its keys in the bucket.
pub trait Record: Serialize + DeserializeOwned + Send + Sync + 'static {
    const TABLE: &'static str;

    /// Where a record stands in the bucket.
    fn bucket_key(id: &Name) -> String {
        format!("{}.{id}", Self::TABLE)
    }
}

/// Cheap to clone; all clones see the same rows. Rows are ordered by id.
pub struct Table<R>(Arc<RwLock<Rows<R>>>);

type Rows<R> = BTreeMap<Name, Row<R>>;

/// A record and the revision to change it at, as they belong together.
pub struct Row<R> {
    /// None where there never was a record, where it was removed, or where it is broken.
    pub record: Option<Arc<R>>,
    /// 0 if there never was a record.
    pub revision: u64,
}

impl<R: Record> Table<R> {
    pub fn get(&self, id: &str) -> Row<R> {
        let rows = self.read();
        let row = rows.get(id);
        Row { record: row.and_then(|row| row.record.clone()), revision: row.map_or(0, |row| row.revision) }
    }

    pub fn all(&self) -> Vec<(Name, Arc<R>)> {
        self.read().iter().filter_map(|(id, row)| Some((id.clone(), row.record.clone()?))).collect()
    }

    /// Keeps the rows whose keys in the bucket are present.
    pub(super) fn retain(&self, present: &HashSet<String>) {
        self.write().retain(|id, _| present.contains(&R::bucket_key(id)));
    }

    /// Takes over what the bucket says. A broken record harms itself only: it is as good as absent, and logged.
    pub(super) fn apply(&self, id: &str, value: &[u8], revision: u64) {
        let Ok(id) = id.parse::<Name>() else {
            tracing::error!(table = R::TABLE, id, "a record in the registry whose id is no name is passed over");
            return;
        };
        let record = serde_json::from_slice::<Option<R>>(value).unwrap_or_else(|error| {
            tracing::error!(table = R::TABLE, %id, %error, "a broken record in the registry is passed over");
            None
        });
        let record = record.map(Arc::new);
        self.write().insert(id, Row { record, revision });
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Rows<R>> {
        self.0.read().expect("no panic while a table is held")
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Rows<R>> {
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
