//! How many requests one tenant may make.

use std::{collections::HashMap, num::NonZeroU32, time::Duration};

use governor::{
    DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter, clock::Clock, clock::DefaultClock,
};

use crate::{
    api::Name,
    config,
    error::{Code, Error, Result},
};

pub struct Rates {
    /// For tenants of which nothing else is said. None if there is no limit.
    others: Option<DefaultKeyedRateLimiter<Name>>,
    /// Tenants with a limit of their own, or with none.
    own: HashMap<Name, Option<DefaultDirectRateLimiter>>,
}

impl Rates {
    pub fn new(timers: &config::Timers) -> Self {
        let own = timers.tenants.iter().filter_map(|(name, tenant)| {
            let limiter = NonZeroU32::new(tenant.rate_limit?).map(|rate| RateLimiter::direct(Quota::per_second(rate)));
            Some((name.clone(), limiter))
        });
        let keyed = |rate| RateLimiter::keyed(Quota::per_second(rate));
        Self { others: NonZeroU32::new(timers.rate_limit).map(keyed), own: own.collect() }
    }

    /// Whether a tenant may make one more request now.
    pub fn admit(&self, tenant: &Name) -> Result<()> {
        let refused = match (self.own.get(tenant), &self.others) {
            (Some(Some(own)), _) => own.check().err(),
            (None, Some(others)) => others.check_key(tenant).err(),
            (Some(None), _) | (None, None) => None,
        };
        let Some(refused) = refused else { return Ok(()) };
        let wait = refused.wait_time_from(DefaultClock::default().now()).max(Duration::from_millis(1));
        Err(Error::new(Code::RateLimited, format!("too many requests of tenant {tenant}")).retry_after(wait))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenant_has_a_limit_of_its_own() {
        let file =
            "[timers]\nrate_limit = 2\n[timers.tenants.big]\nrate_limit = 5\n[timers.tenants.free]\nrate_limit = 0";
        let config = config::Config::from_parts(Some(file), Default::default()).unwrap();
        let rates = Rates::new(&config.timers);
        let admitted = |tenant: &str| (0..10).filter(|_| rates.admit(&tenant.parse().unwrap()).is_ok()).count();
        assert_eq!([admitted("one"), admitted("two"), admitted("big"), admitted("free")], [2, 2, 5, 10]);
        let refused = rates.admit(&"one".parse().unwrap()).unwrap_err();
        assert_eq!(refused.code, Code::RateLimited);
        assert!(refused.details.unwrap()["retry_after_ms"].as_u64().unwrap() > 0);
    }
}
