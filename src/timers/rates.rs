//! How many requests one tenant may make.

use std::collections::HashMap;

use crate::{api::Name, config, error::Result, limiter::Limiter};

pub struct Rates {
    /// For tenants of which nothing else is said. None if there is no limit.
    others: Option<Limiter<Name>>,
    /// Tenants with a limit of their own, or with none.
    own: HashMap<Name, Option<Limiter<Name>>>,
}

impl Rates {
    pub fn new(timers: &config::Timers) -> Self {
        let own = |(name, tenant): (&Name, &config::TimerTenant)| {
            Some((name.clone(), Limiter::per_second(tenant.rate_limit?)))
        };
        Self { others: Limiter::per_second(timers.rate_limit), own: timers.tenants.iter().filter_map(own).collect() }
    }

    /// Whether a tenant may make one more request now.
    pub fn admit(&self, tenant: &Name) -> Result<()> {
        match self.own.get(tenant).unwrap_or(&self.others) {
            Some(limiter) => limiter.admit(tenant, || format!("too many requests of tenant {tenant}")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

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
