//! How often somebody may ask, counted in this process.

use std::{
    hash::Hash,
    num::NonZeroU32,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use governor::{
    DefaultKeyedRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};

use crate::error::{Code, Error, Result};

/// Who is below his limit again is forgotten, every so many requests.
const TIDYING: u32 = 10_000;

/// So many requests a second for each key.
pub struct Limiter<K: Hash + Eq + Clone> {
    by_key: DefaultKeyedRateLimiter<K>,
    requests: AtomicU32,
}

impl<K: Hash + Eq + Clone> Limiter<K> {
    /// None for a rate of 0, which means no limit.
    pub fn per_second(rate: u32) -> Option<Self> {
        let by_key = RateLimiter::keyed(Quota::per_second(NonZeroU32::new(rate)?));
        Some(Self { by_key, requests: 0.into() })
    }

    /// Counts a request. A refused one gets the message, and when asking again may help.
    pub fn admit(&self, key: &K, message: impl FnOnce() -> String) -> Result<()> {
        if self.requests.fetch_add(1, Ordering::Relaxed) % TIDYING == TIDYING - 1 {
            self.by_key.retain_recent();
        }
        self.by_key.check_key(key).map_err(|refused| {
            let wait = refused.wait_time_from(DefaultClock::default().now()).max(Duration::from_millis(1));
            Error::new(Code::RateLimited, message()).retry_after(wait)
        })
    }
}
