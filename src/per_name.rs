//! Something that a process keeps for each name that it has met, made at the first meeting.

use std::{
    collections::HashMap,
    sync::{Arc, RwLock},
};

use crate::api::Name;

pub struct PerName<T>(RwLock<HashMap<Name, Arc<T>>>);

impl<T> PerName<T> {
    /// What is kept for a name, or what is made for it now.
    pub fn get(&self, name: &Name, make: impl FnOnce() -> T) -> Arc<T> {
        if let Some(known) = self.0.read().expect(UNBROKEN).get(name) {
            return known.clone();
        }
        self.0.write().expect(UNBROKEN).entry(name.clone()).or_insert_with(|| Arc::new(make())).clone()
    }

    pub fn all(&self) -> Vec<(Name, Arc<T>)> {
        self.0.read().expect(UNBROKEN).iter().map(|(name, kept)| (name.clone(), kept.clone())).collect()
    }

    /// Keeps nothing any more.
    pub fn take_all(&self) -> Vec<Arc<T>> {
        self.0.write().expect(UNBROKEN).drain().map(|(_, kept)| kept).collect()
    }
}

const UNBROKEN: &str = "no panic while the names are held";

impl<T> Default for PerName<T> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}
