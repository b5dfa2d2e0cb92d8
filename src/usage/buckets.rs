//! Token buckets that hold for all instances together.
//!
//! A bucket is a key in a bucket of the server's memory. An instance draws what it needs for a moment by compare-and-set
//! and spends it without asking again, so a busy tenant costs some ten writes a second and no more. What was drawn and
//! not spent goes back with the next draw.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex as AsyncMutex;

use super::limits::Nested;
use crate::{
    api::{Name, usage::EffectiveLimits},
    clock::Clock,
    error::{Code, Error, Result},
    events::Events,
    jetstream::{Bucket, CasError, Write},
};

/// What is drawn at once: the demand of so long.
const AHEAD: TimeDelta = TimeDelta::milliseconds(100);

/// How long it may be spent without asking again.
const HELD: TimeDelta = TimeDelta::seconds(1);

/// Clocks of instances differ by less.
const TOLERANCE: TimeDelta = TimeDelta::seconds(1);

/// Buckets that are remembered here. Idle ones go first.
const MOST_REMEMBERED: usize = 10_000;

const ATTEMPTS: usize = 20;

pub struct Buckets {
    bucket: Bucket,
    events: Events,
    clock: Clock,
    here: Mutex<HashMap<Key, Arc<AsyncMutex<Local>>>>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    tenant: Name,
    source: Option<Name>,
}

impl Key {
    fn in_bucket(&self) -> String {
        match &self.source {
            Some(source) => format!("{}.{source}", self.tenant),
            None => self.tenant.to_string(),
        }
    }

    fn describe(&self) -> String {
        match &self.source {
            Some(source) => format!("source {source} of tenant {}", self.tenant),
            None => format!("tenant {}", self.tenant),
        }
    }
}

/// Records and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Tokens {
    records: f64,
    bytes: f64,
}

impl Tokens {
    fn both(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self { records: combine(self.records, other.records), bytes: combine(self.bytes, other.bytes) }
    }

    fn covers(self, need: Self) -> bool {
        self.records >= need.records && self.bytes >= need.bytes
    }
}

/// A bucket as all instances see it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Shared {
    left: Tokens,
    at: DateTime<Utc>,
}

impl Shared {
    fn full(limits: &EffectiveLimits, now: DateTime<Utc>) -> Self {
        Self { left: capacity(limits), at: now }
    }

    /// The same later. A clock that is a little behind another instance's gains nothing; one that is far behind would gain
    /// nothing for as long, so it counts as right.
    fn at(self, now: DateTime<Utc>, limits: &EffectiveLimits) -> Self {
        let at = if self.at - now > TOLERANCE { now } else { self.at };
        let passed = (now - at).as_seconds_f64().max(0.0);
        let gained = Tokens { records: rate(limits).records * passed, bytes: rate(limits).bytes * passed };
        let left = self.left.both(gained, |left, gained| left + gained).both(capacity(limits), f64::min);
        Self { left, at: at.max(now) }
    }
}

fn rate(limits: &EffectiveLimits) -> Tokens {
    Tokens { records: limits.sustained_rate.into(), bytes: limits.max_bytes_per_sec.into() }
}

/// As many seconds of bytes as of records may come at once.
fn capacity(limits: &EffectiveLimits) -> Tokens {
    let seconds = (f64::from(limits.burst_size) / f64::from(limits.sustained_rate)).max(1.0);
    Tokens { records: limits.burst_size.into(), bytes: rate(limits).bytes * seconds }
}

/// A bucket as this instance sees it.
#[derive(Default, Clone, Copy)]
struct Local {
    /// Drawn and not spent.
    drawn: Tokens,
    drawn_at: DateTime<Utc>,
    /// Spent since it was drawn, which is what tells the demand.
    spent: Tokens,
    /// What was last seen, and at which revision. Others can only have taken from it.
    shared: Option<(Shared, u64)>,
    /// The share that was last warned of.
    warned: u8,
}

/// What is left after a request, for the headers of its answer.
#[derive(Debug, Clone, Copy)]
pub struct Left {
    pub limit: u32,
    pub remaining: u32,
    pub reset_at: DateTime<Utc>,
}

impl Left {
    /// Of both, the tighter.
    fn less(self, other: Self) -> Self {
        if other.remaining < self.remaining { other } else { self }
    }
}

/// Whether a request may pass, and what its answer should say.
pub type Admission = (Result<()>, Left);

impl Buckets {
    pub fn new(bucket: Bucket, events: Events, clock: Clock) -> Self {
        Self { bucket, events, clock: clock.running(), here: Mutex::default() }
    }

    /// Takes the tokens of a request out of both buckets, or out of none. Sources that nobody knows have no bucket of their
    /// own.
    pub async fn admit(
        &self,
        tenant: &Name,
        source: Option<&Name>,
        limits: &Nested,
        records: usize,
        bytes: usize,
    ) -> Result<Admission> {
        let need = Tokens { records: records as f64, bytes: bytes as f64 };
        let now = self.clock.now();
        // The source's first, so that one who is over his own limit costs the tenant nothing. Always in this order.
        let inner = source.map(|source| Key { tenant: tenant.clone(), source: Some(source.clone()) });
        let inner = inner.map(|key| (self.local(&key), key));
        let mut inner = match &inner {
            Some((local, key)) => Some((local.lock().await, key)),
            None => None,
        };
        let outer = Key { tenant: tenant.clone(), source: None };
        let of_tenant = self.local(&outer);
        let mut of_tenant = of_tenant.lock().await;
        let mut admitted = match &mut inner {
            Some((of_source, key)) => self.cover(key, of_source, &limits.source, need, now).await?,
            None => Ok(()),
        };
        if admitted.is_ok() {
            admitted = self.cover(&outer, &mut of_tenant, &limits.tenant, need, now).await?;
        }
        if admitted.is_ok() {
            of_tenant.spend(need);
            self.warn(&outer, &mut of_tenant, &limits.tenant, now);
            if let Some((of_source, key)) = &mut inner {
                of_source.spend(need);
                self.warn(key, of_source, &limits.source, now);
            }
        }
        let left = of_tenant.left(now, &limits.tenant);
        let left = inner.map_or(left, |(of_source, _)| left.less(of_source.left(now, &limits.source)));
        Ok((admitted, left))
    }

    /// What would be left, as far as this instance knows, without taking anything.
    pub async fn look(&self, tenant: &Name, source: &Name, limits: &Nested) -> Left {
        let now = self.clock.now();
        let known = |key: Key| self.here.lock().expect(UNBROKEN).get(&key).cloned();
        let left = async |local: Option<Arc<AsyncMutex<Local>>>, limits: &EffectiveLimits| match local {
            Some(local) => local.lock().await.left(now, limits),
            None => Local::default().left(now, limits),
        };
        let of_tenant = left(known(Key { tenant: tenant.clone(), source: None }), &limits.tenant).await;
        let of_source = known(Key { tenant: tenant.clone(), source: Some(source.clone()) });
        of_tenant.less(left(of_source, &limits.source).await)
    }

    fn local(&self, key: &Key) -> Arc<AsyncMutex<Local>> {
        let mut here = self.here.lock().expect(UNBROKEN);
        if here.len() > MOST_REMEMBERED {
            // Whoever waits for one has a clone of it.
            here.retain(|_, local| Arc::strong_count(local) > 1);
        }
        here.entry(key.clone()).or_default().clone()
    }

    /// Makes sure that what is needed can be spent here.
    async fn cover(
        &self,
        key: &Key,
        local: &mut Local,
        limits: &EffectiveLimits,
        need: Tokens,
        now: DateTime<Utc>,
    ) -> Result<Result<()>> {
        match now - local.drawn_at <= HELD && local.drawn.covers(need) {
            true => Ok(Ok(())),
            false => self.draw(key, local, limits, need, now).await,
        }
    }

    /// Draws at least what is needed from the shared bucket, where what is left of the last draw goes back. A request that
    /// is larger than the bucket passes when that is full, and leaves a debt.
    async fn draw(
        &self,
        key: &Key,
        local: &mut Local,
        limits: &EffectiveLimits,
        need: Tokens,
        now: DateTime<Utc>,
    ) -> Result<Result<()>> {
        let passed = (now - local.drawn_at).as_seconds_f64().clamp(AHEAD.as_seconds_f64(), 1.0);
        let demand = local.spent.both(rate(limits), |spent, rate| (spent / passed).min(rate) * AHEAD.as_seconds_f64());
        let must = need.both(capacity(limits), f64::min);
        for _ in 0..ATTEMPTS {
            let (shared, revision) = match local.shared {
                Some(known) => known,
                None => match self.bucket.read(&key.in_bucket()).await? {
                    Some(entry) => {
                        let known = serde_json::from_slice(&entry.value).ok();
                        (known.unwrap_or_else(|| Shared::full(limits, now)), entry.revision)
                    }
                    None => (Shared::full(limits, now), 0),
                },
            };
            let mut shared = shared.at(now, limits);
            local.shared = Some((shared, revision));
            let at_hand = shared.left.both(local.drawn, |left, drawn| left + drawn).both(capacity(limits), f64::min);
            if !at_hand.covers(must) {
                // Others give nothing back but what they have drawn, so there is hardly more than this.
                return Ok(Err(refusal(key, limits, at_hand, must)));
            }
            let ahead = demand.both(at_hand, |demand, left| demand.min(left.max(0.0)));
            let take = need.both(ahead, f64::max);
            shared.left = at_hand.both(take, |left, take| left - take);
            let value = serde_json::to_vec(&shared).map_err(Error::internal)?;
            let write = Write { expected: Some(revision), ..Write::to(key.in_bucket(), value.into()) };
            match self.bucket.write(&[write]).await {
                Ok(revision) => {
                    *local = Local { drawn: take, drawn_at: now, shared: Some((shared, revision)), ..*local };
                    local.spent = Tokens::default();
                    return Ok(Ok(()));
                }
                // Somebody else drew. What was written without our knowing is spent by nobody, which is safe.
                Err(CasError::Conflict | CasError::UnderWay) => local.shared = None,
                Err(CasError::Unknown(_)) => (local.shared, local.drawn) = (None, Tokens::default()),
                Err(CasError::NotStored(error)) => {
                    return Err(Error::unavailable("rate limits can't be kept right now").source(error));
                }
            }
        }
        Err(Error::unavailable("too many instances draw from one rate limit"))
    }

    /// Says, once on the way up, that a limit is nearly used up.
    fn warn(&self, key: &Key, local: &mut Local, limits: &EffectiveLimits, now: DateTime<Utc>) {
        let used = 1.0 - f64::from(local.left(now, limits).remaining) / f64::from(limits.burst_size);
        let level = match used {
            0.9.. => 90,
            0.75.. => 75,
            _ => 0,
        };
        if level > local.warned {
            let Key { tenant, source } = key;
            tracing::warn!(%tenant, source = source.as_ref().map(Name::as_str), "{level} % of a usage limit is used");
            metrics::counter!("tidemark_usage_limit_warnings_total", "percent" => level.to_string()).increment(1);
            let fact = serde_json::json!({
                "tenant_id": tenant, "source_id": source, "percent": level, "limit": limits.burst_size,
            });
            self.events.tell(format_args!("usage.{tenant}.limit"), &fact);
        }
        // Falling below half arms the warning again.
        if level > local.warned || used < 0.5 {
            local.warned = level;
        }
    }
}

impl Local {
    fn spend(&mut self, need: Tokens) {
        self.drawn = self.drawn.both(need, |drawn, need| drawn - need);
        self.spent = self.spent.both(need, |spent, need| spent + need);
    }

    fn left(&self, now: DateTime<Utc>, limits: &EffectiveLimits) -> Left {
        let shared = self.shared.map_or(capacity(limits), |(shared, _)| shared.at(now, limits).left);
        let left = (shared.records + self.drawn.records).clamp(0.0, f64::from(limits.burst_size));
        let until_full = (f64::from(limits.burst_size) - left) / f64::from(limits.sustained_rate);
        let reset_at = now + TimeDelta::milliseconds((until_full * 1000.0).ceil() as i64);
        Left { limit: limits.burst_size, remaining: left as u32, reset_at }
    }
}

const UNBROKEN: &str = "no panic while buckets are held";

fn refusal(key: &Key, limits: &EffectiveLimits, at_hand: Tokens, must: Tokens) -> Error {
    let wait = must.both(at_hand, |must, left| (must - left).max(0.0));
    let wait = wait.both(rate(limits), |missing, rate| missing / rate);
    let (dimension, limit) = match wait.records >= wait.bytes {
        true => ("sustained_rate", format!("{} records", limits.sustained_rate)),
        false => ("max_bytes_per_sec", format!("{} bytes", limits.max_bytes_per_sec)),
    };
    let wait = Duration::from_secs_f64(wait.records.max(wait.bytes)).max(Duration::from_millis(1));
    metrics::counter!("tidemark_usage_limited_total", "dimension" => dimension).increment(1);
    metrics::counter!("tidemark_usage_throttled_milliseconds_total").increment(wait.as_millis() as u64);
    let message = format!("{}: more than {limit} per second", key.describe());
    Error::new(Code::RateLimited, message).details(serde_json::json!({
        "dimension": dimension, "retry_after_ms": wait.as_millis() as u64,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: EffectiveLimits = EffectiveLimits {
        sustained_rate: 100,
        burst_size: 500,
        max_batch_size: 1000,
        max_record_bytes: 16_384,
        max_bytes_per_sec: 1000,
    };

    #[test]
    fn a_bucket_fills_up_to_its_burst_and_no_clock_gains_by_being_behind() {
        let start = DateTime::UNIX_EPOCH;
        let empty = Shared { left: Tokens::default(), at: start };
        assert_eq!(empty.at(start + TimeDelta::seconds(2), &LIMITS).left.records, 200.0);
        assert_eq!(empty.at(start + TimeDelta::seconds(60), &LIMITS).left, Tokens { records: 500.0, bytes: 5000.0 });
        let behind = empty.at(start - TimeDelta::seconds(60), &LIMITS);
        assert_eq!(
            (behind.left.records, behind.at),
            (0.0, start - TimeDelta::seconds(60)),
            "far behind counts as right"
        );
        let behind = empty.at(start - TimeDelta::milliseconds(500), &LIMITS);
        assert_eq!((behind.left.records, behind.at), (0.0, start));
    }

    #[test]
    fn a_refusal_says_when_it_would_pass() {
        let key = Key { tenant: "acme".parse().unwrap(), source: None };
        let refused =
            refusal(&key, &LIMITS, Tokens { records: 50.0, bytes: 9.0 }, Tokens { records: 100.0, bytes: 9.0 });
        assert_eq!(refused.details.unwrap()["retry_after_ms"], 500);
        let refused =
            refusal(&key, &LIMITS, Tokens { records: 500.0, bytes: 0.0 }, Tokens { records: 1.0, bytes: 3000.0 });
        let details = refused.details.unwrap();
        assert_eq!((&details["retry_after_ms"], &details["dimension"]), (&3000.into(), &"max_bytes_per_sec".into()));
    }
}
