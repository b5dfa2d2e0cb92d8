//! How many requests one caller may make.

use std::{
    num::NonZeroU32,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter, clock::Clock as _, clock::DefaultClock};

use crate::{
    access::Caller,
    api::{Info, Surface},
    config,
    error::{Code, Error, Result},
};

/// Who is below his limit again is forgotten, every so many requests.
const TIDYING: u32 = 10_000;

pub struct Limits {
    /// By caller. None if ids are not limited.
    ids: Option<DefaultKeyedRateLimiter<[u8; 32]>>,
    requests: AtomicU32,
}

impl Limits {
    pub fn new(config: &config::Config) -> Self {
        let limiter = |rate| RateLimiter::keyed(Quota::per_second(rate));
        Self { ids: NonZeroU32::new(config.ids.rate_limit).map(limiter), requests: 0.into() }
    }

    pub fn admit(&self, operation: &Info, caller: &Caller) -> Result<()> {
        let Some(limiter) = self.ids.as_ref().filter(|_| operation.surface == Surface::Ids) else { return Ok(()) };
        if self.requests.fetch_add(1, Ordering::Relaxed) % TIDYING == TIDYING - 1 {
            limiter.retain_recent();
        }
        limiter.check_key(&caller.fingerprint()).map_err(|refused| {
            let wait = refused.wait_time_from(DefaultClock::default().now()).max(Duration::from_millis(1));
            Error::new(Code::RateLimited, "too many requests with this token").retry_after(wait)
        })
    }
}
