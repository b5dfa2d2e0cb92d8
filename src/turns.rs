//! Turns: what is scarce is shared between those who want it, so that none can take all of it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Error, Result};

pub struct Turns {
    /// Of each.
    most: usize,
    known: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// Those that are remembered although they have no turn.
const IDLE: usize = 1000;

impl Turns {
    pub fn new(most: usize) -> Self {
        Self { most, known: Mutex::default() }
    }

    fn of(&self, whose: &str) -> Arc<Semaphore> {
        let mut known = self.known.lock().expect("no panic while turns are held");
        if known.len() > IDLE {
            known.retain(|_, turns| Arc::strong_count(turns) > 1 || turns.available_permits() < self.most);
        }
        known.entry(whose.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(self.most))).clone()
    }

    /// Waits for a turn, which lasts as long as what is returned.
    pub async fn take(&self, whose: &str) -> Result<OwnedSemaphorePermit> {
        self.of(whose).acquire_owned().await.map_err(Error::internal)
    }

    /// A turn, if there is one right now.
    pub fn try_take(&self, whose: &str) -> Option<OwnedSemaphorePermit> {
        self.of(whose).try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_has_its_own() {
        let turns = Turns::new(1);
        let first = turns.take("one").await.unwrap();
        assert!(turns.try_take("one").is_none() && turns.try_take("two").is_some());
        drop(first);
        assert!(turns.try_take("one").is_some());
        for number in 0..IDLE + 10 {
            turns.try_take(&number.to_string());
        }
        assert!(turns.known.lock().unwrap().len() <= IDLE + 1);
    }
}
