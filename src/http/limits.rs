//! How many requests one caller may make.

use std::net::IpAddr;

use super::address;
use crate::{
    access::Caller,
    api::{Info, Surface},
    clock::Clock,
    config::{Config, RateLimit},
    error::{Code, Error, Result},
    limiter::Limiter,
    sliding_log::{Admission, SlidingLog},
};

pub struct Limits {
    /// By caller. None if ids are not limited.
    ids: Option<Limiter<[u8; 32]>>,
    /// By client address, over all instances. None if stages are not limited.
    stages: Option<SlidingLog>,
    stage_rule: RateLimit,
}

impl Limits {
    pub fn new(config: &Config, jetstream: async_nats::jetstream::Context, clock: Clock) -> Self {
        let (prefix, stage_rule) = (&config.nats.prefix, config.stages.rate_limit);
        let stages = (stage_rule.requests > 0).then(|| SlidingLog {
            jetstream,
            stream: format!("{prefix}_STAGE_LIMITS"),
            subject: format!("{prefix}_stage_limits"),
            window: stage_rule.window,
            clock,
        });
        Self { ids: Limiter::per_second(config.ids.rate_limit), stages, stage_rule }
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
        limiter.admit(&caller.fingerprint(), || "too many requests with this token".to_owned())
    }
}
