//! Turns: what is scarce is shared between tenants, so that none can take all of it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    api::Name,
    error::{Error, Result},
};

pub struct Turns {
    /// Each tenant's.
    most: usize,
    tenants: Mutex<HashMap<Name, Arc<Semaphore>>>,
}

/// Tenants that are remembered although they have no turn.
const IDLE: usize = 1000;

impl Turns {
    pub fn new(most: usize) -> Self {
        Self { most, tenants: Mutex::default() }
    }

    fn of(&self, tenant: &Name) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock().expect("no panic while turns are held");
        if tenants.len() > IDLE {
            tenants.retain(|_, turns| Arc::strong_count(turns) > 1 || turns.available_permits() < self.most);
        }
        tenants.entry(tenant.clone()).or_insert_with(|| Arc::new(Semaphore::new(self.most))).clone()
    }

    /// Waits for a turn, which lasts as long as what is returned.
    pub async fn take(&self, tenant: &Name) -> Result<OwnedSemaphorePermit> {
        self.of(tenant).acquire_owned().await.map_err(Error::internal)
    }

    /// A turn, if there is one right now.
    pub fn try_take(&self, tenant: &Name) -> Option<OwnedSemaphorePermit> {
        self.of(tenant).try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_tenant_has_its_own() {
        let turns = Turns::new(1);
        let (one, two): (Name, Name) = ("one".parse().unwrap(), "two".parse().unwrap());
        let first = turns.take(&one).await.unwrap();
        assert!(turns.try_take(&one).is_none() && turns.try_take(&two).is_some());
        drop(first);
        assert!(turns.try_take(&one).is_some());
        for number in 0..IDLE + 10 {
            turns.try_take(&format!("tenant-{number}").parse().unwrap());
        }
        assert!(turns.tenants.lock().unwrap().len() <= IDLE + 1);
    }
}
