//! Increment keys. The configuration is a record of the registry; the mark is a counter of its own.

use std::{
    collections::HashMap,
    sync::{
        Arc, RwLock,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{
    api::{
        Call, Handle, Name, Operation,
        ids::{self, Increment, IncrementConfig, SetIncrement},
    },
    clock::Clock,
    config::Config,
    error::{Code, Error, Result},
    jetstream::Bucket,
    registry::{Record, Registry, Row},
    watermark::{Cells, Mark, Once, RangeSettings, Ranges, Steps, lost},
};

/// The most ids of one request.
const MAX_SIZE: u32 = 1000;

/// An increment key as the registry has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct IncrementRecord {
    pub base: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl Record for IncrementRecord {
    const TABLE: &'static str = "increment";
}

/// Answers the operations on identifiers.
pub struct Ids {
    registry: Registry,
    cells: Cells<Mark>,
    settings: RangeSettings,
    idempotency_window: Duration,
    clock: Clock,
    counters: RwLock<HashMap<Name, Arc<Counter>>>,
}

/// A key in use by this process.
struct Counter {
    ranges: Arc<Ranges>,
    /// The base that its ranges know of.
    base: AtomicI64,
}

impl Ids {
    pub fn new(registry: Registry, bucket: Bucket, config: &Config, clock: Clock) -> Self {
        Self {
            registry,
            cells: Cells::new(bucket, config.watermark.deadline),
            settings: RangeSettings {
                default_size: config.ids.default_batch_size,
                max_size: config.ids.max_batch_size,
                prefetch_threshold: config.ids.prefetch_threshold,
            },
            idempotency_window: config.watermark.idempotency_window,
            clock,
            counters: RwLock::default(),
        }
    }

    /// Puts every key whose counter is lost back to its base. Ids repeat; somebody has said that this is meant.
    pub async fn begin_again(&self) -> Result<()> {
        for (key, record) in self.registry.increments.all() {
            let base = record.base;
            let begin = move |state: &mut Option<Mark>| Ok(state.get_or_insert(Mark { mark: base }).mark);
            self.cells.change(&counter_key(&key), begin).await?;
        }
        Ok(())
    }

    /// Gives back what was reserved and not used. Call it when no request is under way any more.
    pub async fn stop(&self) {
        let counters: Vec<_> = self
            .counters
            .write()
            .expect("no panic while counters are held")
            .drain()
            .map(|(_, counter)| counter)
            .collect();
        futures::future::join_all(counters.iter().map(|counter| counter.ranges.stop())).await;
    }

    fn counter(&self, key: &Name, base: i64) -> Arc<Counter> {
        let known = self.counters.read().expect("no panic while counters are held").get(key).cloned();
        let counter = known.unwrap_or_else(|| {
            let mut counters = self.counters.write().expect("no panic while counters are held");
            let make = || {
                let ranges = Ranges::new(self.cells.clone(), counter_key(key), self.settings.clone());
                Arc::new(Counter { ranges, base: base.into() })
            };
            counters.entry(key.clone()).or_insert_with(make).clone()
        });
        // Somebody moved the base: what was reserved below it is no longer given.
        if counter.base.fetch_max(base, Ordering::Relaxed) < base {
            counter.ranges.skip_to(base);
        }
        counter
    }
}

/// Where a key's mark stands in the bucket.
fn counter_key(key: &Name) -> String {
    format!("increment.{key}")
}

impl Handle<Increment> for Ids {
    async fn handle(&self, call: Call<Increment>) -> Result<ids::Ids> {
        self.registry.ready()?;
        let key = &call.target;
        let Some(record) = self.registry.find(&self.registry.increments, key).await?.record else {
            return Err(Error::new(Code::NotFound, format!("key not found: {key}")));
        };
        let count = call.request.size.unwrap_or(1);
        if !(1..=MAX_SIZE).contains(&count) {
            let problem = format!("must lie between 1 and {MAX_SIZE}, is {count}");
            return Err(Error::field_as(Code::SizeExceedsLimit, "size", problem));
        }
        let counter = self.counter(key, record.base);
        let take = || counter.ranges.take(Steps { count, step: 1 });
        let id = match &call.context.idempotency_key {
            None => take().await?,
            Some(name) => {
                let once = Once::new(&Increment::INFO, key, name, &count, self.idempotency_window)?;
                match once.find(self.cells.bucket()).await? {
                    Some(given) => given,
                    None => once.settle(self.cells.bucket(), take().await?).await?,
                }
            }
        };
        Ok(ids::Ids { id })
    }
}

impl Handle<SetIncrement> for Ids {
    async fn handle(&self, call: Call<SetIncrement>) -> Result<IncrementConfig> {
        self.registry.ready()?;
        let (key, base) = (call.target, call.request.base);
        if base < 0 {
            return Err(Error::field("base", format!("must not be negative, is {base}")));
        }
        let Row { record: known, revision } = self.registry.find(&self.registry.increments, &key).await?;
        let (exists, unchanged) = (known.is_some(), known.as_ref().is_some_and(|record| record.base == base));
        // First the mark, then the record: after a crash between the two, the same call again completes it.
        let jump = move |state: &mut Option<Mark>| match state {
            None if exists => Err(lost()),
            None => Ok(state.insert(Mark { mark: base }).mark),
            Some(mark) if base > mark.mark => {
                mark.mark = base;
                Ok(base)
            }
            Some(mark) if base == mark.mark || unchanged => Ok(mark.mark),
            Some(Mark { mark }) => {
                let problem = format!("must not lie below the current value {mark}: ids would repeat");
                Err(Error::field("base", problem).details(serde_json::json!({ "field": "base", "current": mark })))
            }
        };
        let current = self.cells.change(&counter_key(&key), jump).await?.answer;
        let now = self.clock.now();
        let created_at = known.map_or(now, |record| record.created_at);
        let record = IncrementRecord { base, created_at, updated_at: now };
        self.registry.store(&key, &record, revision).await?;
        Ok(IncrementConfig { key, base, current, created_at, updated_at: now })
    }
}
