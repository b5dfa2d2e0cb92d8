//! What is measured of pools. The handles are found once per pool.

use std::{
    collections::HashMap,
    sync::{
        Arc, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use metrics::{Counter, Gauge};

use crate::api::Name;

/// Ask it for pools that exist only: a label must not have a value per caller's whim.
#[derive(Default)]
pub struct Meters {
    pools: RwLock<HashMap<Name, Arc<Meter>>>,
    minted: Arc<AtomicU64>,
}

pub struct Meter {
    minted: Counter,
    remaining: Gauge,
    minted_by_all: Arc<AtomicU64>,
}

impl Meters {
    pub fn of(&self, pool: &Name) -> Arc<Meter> {
        if let Some(known) = self.pools.read().expect("no panic while meters are held").get(pool) {
            return known.clone();
        }
        let meter = Meter {
            minted: metrics::counter!("tidemark_noid_minted_total", "pool" => pool.to_string()),
            remaining: metrics::gauge!("tidemark_noid_remaining", "pool" => pool.to_string()),
            minted_by_all: self.minted.clone(),
        };
        let mut pools = self.pools.write().expect("no panic while meters are held");
        pools.entry(pool.clone()).or_insert_with(|| Arc::new(meter)).clone()
    }

    /// Ids minted from all pools.
    pub fn minted(&self) -> u64 {
        self.minted.load(Ordering::Relaxed)
    }
}

impl Meter {
    pub fn minted(&self, ids: usize, left: u64) {
        self.minted.increment(ids as u64);
        self.remaining.set(left as f64);
        self.minted_by_all.fetch_add(ids as u64, Ordering::Relaxed);
    }
}
