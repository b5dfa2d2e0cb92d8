//! All pools.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use chrono::{DateTime, Utc};
use futures::{StreamExt, stream};

use super::{KEYS, Pools};
use crate::{
    api::{
        Call, Handle, Name,
        noid::{ListPools, NoidStats, Statistics},
    },
    error::{Code, Result},
};

/// Pools read at the same time.
const AT_ONCE: usize = 64;

/// When pools were made, as far as this process has looked. That never changes, so each is read once.
#[derive(Default)]
pub struct Births(Mutex<HashMap<Name, DateTime<Utc>>>);

impl Births {
    fn known(&self, name: &Name) -> Option<DateTime<Utc>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied()
    }

    fn learn(&self, name: Name, created: DateTime<Utc>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name, created);
    }
}

impl Pools {
    pub(super) async fn names(&self) -> Result<Vec<Name>> {
        let keys = self.cells.bucket().keys(&format!("{KEYS}*")).await?;
        // A key that is no name was not written by us.
        Ok(keys.iter().filter_map(|key| key.strip_prefix(KEYS)?.parse().ok()).collect())
    }

    /// When a pool was made. None if its value is broken: that pool is harmed, and not the list.
    async fn birth(&self, name: &Name) -> Result<Option<DateTime<Utc>>> {
        if let Some(known) = self.births.known(name) {
            return Ok(Some(known));
        }
        match self.read(name).await {
            Ok(pool) => {
                self.births.learn(name.clone(), pool.created);
                Ok(Some(pool.created))
            }
            Err(error) if error.code == Code::Unavailable => Err(error),
            Err(error) => {
                error.log("noid.list");
                Ok(None)
            }
        }
    }
}

impl Pools {
    /// Tells what a process that ended could not tell any more.
    pub async fn announce_what_is_due(&self) -> Result<()> {
        let mut pools = stream::iter(self.names().await?)
            .map(async |name| (self.read(&name).await, name))
            .buffer_unordered(AT_ONCE);
        while let Some((pool, name)) = pools.next().await {
            if pool.is_ok_and(|pool| pool.has_news()) {
                self.announcer.announce(&name);
            }
        }
        Ok(())
    }
}

impl Handle<ListPools> for Pools {
    async fn handle(&self, _: Call<ListPools>) -> Result<Vec<String>> {
        let mut pools = Vec::new();
        let mut births = stream::iter(self.names().await?)
            .map(async |name| (self.birth(&name).await, name))
            .buffer_unordered(AT_ONCE);
        while let Some((birth, name)) = births.next().await {
            let birth = birth?;
            pools.push((birth.is_none(), birth, name));
        }
        pools.sort();
        Ok(pools.into_iter().map(|(.., name)| name.to_string()).collect())
    }
}

impl Handle<NoidStats> for Pools {
    async fn handle(&self, _: Call<NoidStats>) -> Result<Statistics> {
        Ok(Statistics {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pools: self.names().await?.len() as u64,
            minted: self.meters.minted(),
            started: self.started,
        })
    }
}
