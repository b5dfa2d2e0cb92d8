//! What is measured of pools. The handles are found once per pool.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge};

use crate::{api::Name, per_name::PerName};

/// Ask it for pools that exist only: a label must not have a value per caller's whim.
#[derive(Default)]
pub struct Meters {
    pools: PerName<Meter>,
    minted: AtomicU64,
}

struct Meter {
    minted: Counter,
    remaining: Gauge,
}

impl Meters {
    /// Counts ids that were minted from a pool, and notes what is left in it.
    pub fn count(&self, pool: &Name, ids: usize, left: u64) {
        let meter = self.pools.get(pool, || Meter {
            minted: metrics::counter!("tidemark_noid_minted_total", "pool" => pool.to_string()),
            remaining: metrics::gauge!("tidemark_noid_remaining", "pool" => pool.to_string()),
        });
        meter.minted.increment(ids as u64);
        meter.remaining.set(left as f64);
        self.minted.fetch_add(ids as u64, Ordering::Relaxed);
    }

    /// Ids minted from all pools.
    pub fn minted(&self) -> u64 {
        self.minted.load(Ordering::Relaxed)
    }
}
