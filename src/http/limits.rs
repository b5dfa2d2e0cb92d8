//! How many requests one credential may make.

use std::{num::NonZeroU32, time::Duration};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter, clock::Clock as _, clock::DefaultClock};

use crate::{
    access,
    api::{Info, Surface},
    config,
    error::{Code, Error, Result},
};

/// Tokens that nobody used for this many requests' time are forgotten once there are this many.
const MANY: usize = 10_000;

#[derive(Default)]
pub struct Limits {
    /// By the credential's hash. None if ids are not limited.
    ids: Option<DefaultKeyedRateLimiter<[u8; 32]>>,
}

impl Limits {
    pub fn new(config: &config::Config) -> Self {
        let limiter = |rate| RateLimiter::keyed(Quota::per_second(rate));
        Self { ids: NonZeroU32::new(config.ids.rate_limit).map(limiter) }
    }

    pub fn admit(&self, operation: &Info, credential: &str) -> Result<()> {
        let Some(limiter) = self.ids.as_ref().filter(|_| operation.surface == Surface::Ids) else { return Ok(()) };
        if limiter.len() > MANY {
            limiter.retain_recent();
        }
        limiter.check_key(&access::hash(credential)).map_err(|refused| {
            let wait = refused.wait_time_from(DefaultClock::default().now()).max(Duration::from_millis(1));
            Error::new(Code::RateLimited, "too many requests with this token").retry_after(wait)
        })
    }
}
