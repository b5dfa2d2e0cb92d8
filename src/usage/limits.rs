//! What may be asked of the ledger: defaults, and what differs for a tenant or a source of it.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Usage, audit::Change};
use crate::{
    api::{
        Call, Context, Handle, Name,
        usage::{EffectiveLimits, GetLimits, GetSourceLimits, LimitOverrides, Limits, SetLimits, SetSourceLimits},
    },
    config,
    error::{Code, Error, Result},
    registry::{Record, Registry, Row},
};

/// What was set for a tenant and its sources. Changes are known everywhere as soon as the registry's watch brings them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TenantLimits {
    tenant: Option<Set>,
    #[serde(default)]
    sources: BTreeMap<Name, Set>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Set {
    overrides: LimitOverrides,
    updated_at: DateTime<Utc>,
}

impl Record for TenantLimits {
    const TABLE: &'static str = "rate_limit_config";
}

/// Sources of one tenant that may have limits of their own.
const MOST_SOURCES: usize = 1000;

/// The limits that hold right now. Cheap to clone.
#[derive(Clone)]
pub struct LimitTable {
    registry: Registry,
    defaults: config::UsageLimits,
    grace_period: Duration,
    future_tolerance: Duration,
}

/// Both levels for one request, or one message.
#[derive(Debug, Clone, Copy)]
pub struct Nested {
    pub tenant: EffectiveLimits,
    pub source: EffectiveLimits,
    pub grace_period: Duration,
    pub future_tolerance: Duration,
}

impl Nested {
    /// Of both, the tighter.
    pub fn max_batch_size(&self) -> usize {
        self.tenant.max_batch_size.min(self.source.max_batch_size) as usize
    }

    pub fn max_record_bytes(&self) -> usize {
        self.tenant.max_record_bytes.min(self.source.max_record_bytes) as usize
    }
}

impl LimitTable {
    pub fn new(registry: Registry, usage: &config::Usage) -> Self {
        Self {
            registry,
            defaults: usage.limits,
            grace_period: usage.grace_period,
            future_tolerance: usage.future_tolerance,
        }
    }

    pub fn of(&self, tenant: &str, source: &str) -> Nested {
        let set = self.registry.limits.get(tenant).record;
        let of_tenant = set.as_ref().and_then(|set| set.tenant.as_ref()).map(|set| &set.overrides);
        let of_source = set.as_ref().and_then(|set| set.sources.get(source)).map(|set| &set.overrides);
        let with = |defaults: EffectiveLimits, overrides: Option<&LimitOverrides>| match overrides {
            Some(overrides) => defaults.with(overrides),
            None => defaults,
        };
        Nested {
            tenant: with(self.defaults.tenant, of_tenant),
            source: with(self.defaults.source, of_source),
            grace_period: of_tenant.and_then(|set| set.grace_period).unwrap_or(self.grace_period),
            future_tolerance: of_tenant.and_then(|set| set.future_tolerance).unwrap_or(self.future_tolerance),
        }
    }

    fn show(&self, tenant: Name, source: Option<Name>, set: Option<&Set>) -> Limits {
        let set = set.cloned().unwrap_or_default();
        let defaults = if source.is_some() { self.defaults.source } else { self.defaults.tenant };
        let effective = defaults.with(&set.overrides);
        let updated_at = (set.updated_at != DateTime::UNIX_EPOCH).then_some(set.updated_at);
        Limits { tenant_id: tenant, source_id: source, overrides: set.overrides, effective, updated_at }
    }
}

impl Usage {
    fn limits_of(&self, tenant: Name, source: Option<Name>) -> Result<Limits> {
        self.registry.ready()?;
        let record = self.registry.limits.get(tenant.as_str()).record;
        let set = match (&record, &source) {
            (None, _) => None,
            (Some(record), None) => record.tenant.as_ref(),
            (Some(record), Some(source)) => record.sources.get(source),
        };
        Ok(self.limits.show(tenant, source, set))
    }

    async fn set_limits_of(
        &self,
        tenant: Name,
        source: Option<Name>,
        overrides: LimitOverrides,
        context: &Context,
    ) -> Result<Limits> {
        if source.is_some() && (overrides.grace_period.is_some() || overrides.future_tolerance.is_some()) {
            let field = if overrides.grace_period.is_some() { "grace_period" } else { "future_tolerance" };
            return Err(Error::field_as(Code::ValidationError, field, "is the tenant's, not a source's"));
        }
        check_time("grace_period", overrides.grace_period)?;
        check_time("future_tolerance", overrides.future_tolerance)?;
        let set = Set { overrides, updated_at: self.clock.now() };
        let shown = self.limits.show(tenant.clone(), source.clone(), Some(&set));
        if let Some((field, problem)) = shown.effective.problem() {
            return Err(Error::field_as(Code::ValidationError, field, problem));
        }
        let Row { record, revision } = self.registry.find(&self.registry.limits, &tenant).await?;
        let mut record = record.map(|record| TenantLimits::clone(&record)).unwrap_or_default();
        match source {
            None => record.tenant = Some(set),
            Some(source) => {
                if record.sources.len() >= MOST_SOURCES && !record.sources.contains_key(&source) {
                    return Err(Error::new(Code::ValidationError, "the tenant has limits for 1,000 sources already"));
                }
                record.sources.insert(source, set);
            }
        }
        let change = Change { operation: "limits-set", tenant: Some(&tenant), details: json!(shown) };
        self.audited(change, context, self.registry.store(&tenant, &record, revision)).await?;
        Ok(shown)
    }
}

impl Handle<GetLimits> for Usage {
    async fn handle(&self, call: Call<GetLimits>) -> Result<Limits> {
        self.limits_of(call.target, None)
    }
}

impl Handle<SetLimits> for Usage {
    async fn handle(&self, call: Call<SetLimits>) -> Result<Limits> {
        self.set_limits_of(call.target, None, call.request, &call.context).await
    }
}

impl Handle<GetSourceLimits> for Usage {
    async fn handle(&self, call: Call<GetSourceLimits>) -> Result<Limits> {
        let (tenant, source) = call.target;
        self.limits_of(tenant, Some(source))
    }
}

impl Handle<SetSourceLimits> for Usage {
    async fn handle(&self, call: Call<SetSourceLimits>) -> Result<Limits> {
        let (tenant, source) = call.target;
        self.set_limits_of(tenant, Some(source), call.request, &call.context).await
    }
}

/// A time that sums with any other.
pub fn check_time(field: &str, time: Option<Duration>) -> Result<()> {
    match time {
        Some(time) if time > Duration::from_secs(10 * 366 * 86_400) => {
            Err(Error::field_as(Code::ValidationError, field, "must not be above ten years"))
        }
        _ => Ok(()),
    }
}
