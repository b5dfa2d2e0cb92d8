//! How many requests one caller may make.

use std::{
    net::IpAddr,
    num::NonZeroU32,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter, clock::Clock as _, clock::DefaultClock};

use super::address;
use crate::{
    access::Caller,
    api::{Info, Surface},
    clock::Clock,
    config::{Config, RateLimit},
    error::{Code, Error, Result},
    sliding_log::{Admission, SlidingLog},
};

/// Who is below his limit again is forgotten, every so many requests.
const TIDYING: u32 = 10_000;

pub struct Limits {
    /// By caller. None if ids are not limited.
    ids: Option<DefaultKeyedRateLimiter<[u8; 32]>>,
    requests: AtomicU32,
    /// By client address, over all instances. None if stages are not limited.
    stages: Option<SlidingLog>,
    stage_rule: RateLimit,
}

impl Limits {
    pub fn new(config: &Config, jetstream: async_nats::jetstream::Context, clock: Clock) -> Self {
        let limiter = |rate| RateLimiter::keyed(Quota::per_second(rate));
        let (prefix, stage_rule) = (&config.nats.prefix, config.stages.rate_limit);
        let stages = (stage_rule.requests > 0).then(|| SlidingLog {
            jetstream,
            stream: format!("{prefix}_STAGE_LIMITS"),
            subject: format!("{prefix}_stage_limits"),
            window: stage_rule.window,
            clock,
        });
        Self { ids: NonZeroU32::new(config.ids.rate_limit).map(limiter), requests: 0.into(), stages, stage_rule }
    }

    /// Whether a client may ask for a stage now, whoever he is.
    pub async fn admit_client(&self, client: IpAddr) -> Result<()> {
        let Some(log) = &self.stages else { return Ok(()) };
        match log.admit(&address::token(client)).await? {
            Admission::Admitted => Ok(()),
            Admission::Refused(wait) => {
                let RateLimit { requests, window } = self.stage_rule;
                tracing::info!(%client, rule = format!("{requests} requests / {window:?}"), "rate limited");
                metrics::counter!("tidemark_stage_limited_total").increment(1);
                Err(Error::new(Code::RateLimited, "Too many requests.").retry_after(wait))
            }
        }
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
