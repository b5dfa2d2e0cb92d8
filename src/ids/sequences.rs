//! The counters that this process has in use, and what is measured of them.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, RwLock},
    time::Instant,
};

use metrics::{Counter, Gauge, Histogram};

use super::formatted::Scope;
use crate::{
    api::{
        Name,
        ids::{IdType, Mode},
    },
    error::Result,
    watermark::{Absent, AtHand, Bounds, Cells, Mark, Once, RangeSettings, Ranges, Requester, Steps, lost},
};

/// Counters of one key that are held at once: the day before may still be asked for around midnight.
const SCOPES_AT_HAND: usize = 3;

/// Which counter is meant.
#[derive(Debug, Clone, Copy)]
pub struct CounterName<'a> {
    pub key: &'a Name,
    pub id_type: IdType,
    pub scope: Scope,
}

/// Where its mark stands in the bucket.
impl fmt::Display for CounterName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id_type {
            IdType::Increment => write!(f, "increment.{}", self.key),
            IdType::Formatted | IdType::Snowflake => write!(f, "formatted.{}.{}", self.key, self.scope),
        }
    }
}

impl CounterName<'_> {
    /// A counter that never starts again is made with its key; the others begin with their first use.
    fn absent(&self) -> Absent {
        if self.scope == Scope::Whole { Absent::IsLost } else { Absent::Begins }
    }
}

/// What is taken from a counter, and how.
#[derive(Debug, Clone, Copy)]
pub struct Taking {
    pub steps: Steps,
    pub bounds: Bounds,
    pub mode: Mode,
}

pub struct Sequences {
    cells: Cells<Mark>,
    settings: RangeSettings,
    in_use: RwLock<HashMap<Name, Arc<InUse>>>,
}

/// A key in use.
struct InUse {
    meters: Meters,
    /// In the order of their first use.
    scopes: Mutex<VecDeque<(Scope, Arc<Ranges>)>>,
}

/// The metrics of a key, found once.
pub struct Meters {
    requests: Counter,
    duration: Histogram,
    current: Gauge,
    remaining: Gauge,
}

impl Meters {
    pub fn new(key: &Name, id_type: IdType) -> Self {
        let labels = [("key", key.to_string()), ("id_type", id_type.as_str().to_owned())];
        Self {
            requests: metrics::counter!("idbuilder_requests_total", &labels),
            duration: metrics::histogram!("idbuilder_request_duration_seconds", &labels),
            current: metrics::gauge!("idbuilder_sequence_current", "key" => key.to_string()),
            remaining: metrics::gauge!("idbuilder_cache_remaining", "key" => key.to_string()),
        }
    }

    pub fn answered(&self, began: Instant) {
        self.requests.increment(1);
        self.duration.record(began.elapsed().as_secs_f64());
    }
}

impl Sequences {
    pub fn new(cells: Cells<Mark>, settings: RangeSettings) -> Self {
        Self { cells, settings, in_use: RwLock::default() }
    }

    pub fn cells(&self) -> &Cells<Mark> {
        &self.cells
    }

    /// The next numbers of a counter. All of them, or an error and none.
    pub async fn take(&self, counter: CounterName<'_>, taking: Taking, request: Requester<'_>) -> Result<Vec<i64>> {
        let began = Instant::now();
        let in_use = self.in_use(counter);
        let Taking { steps, bounds, mode } = taking;
        let numbers = match mode {
            Mode::Range => {
                let ranges = self.ranges(&in_use, counter);
                let numbers = ranges.take(steps, bounds, request).await;
                in_use.meters.remaining.set(ranges.at_hand() as f64);
                numbers
            }
            Mode::Strict => {
                let (key, advance) = (counter.to_string(), strictly(counter.absent(), steps, bounds));
                // Boxed: it waits for a write anyway, and the other mode should not carry its state.
                Box::pin(self.cells.change(&key, request(), advance)).await.map(|committed| committed.answer)
            }
        };
        in_use.measure(began, &numbers);
        numbers
    }

    /// The same for a request that may be repeated.
    pub async fn take_once(
        &self,
        counter: CounterName<'_>,
        taking: Taking,
        request: Requester<'_>,
        once: Once,
    ) -> Result<Vec<i64>> {
        match taking.mode {
            Mode::Range => once.or_make(self.cells.bucket(), || self.take(counter, taking, request)).await,
            Mode::Strict => {
                let began = Instant::now();
                let advance = strictly(counter.absent(), taking.steps, taking.bounds);
                let numbers = self.cells.change_once(&counter.to_string(), request(), once, advance).await;
                self.in_use(counter).measure(began, &numbers);
                numbers
            }
        }
    }

    /// What can be given without a reservation.
    pub fn at_hand(&self) -> Vec<AtHand> {
        let in_use = self.in_use.read().expect("no panic while counters are held");
        let of = |(key, in_use): (&Name, &Arc<InUse>)| {
            let scopes = in_use.scopes.lock().expect("no panic while scopes are held");
            let name = |scope: &Scope| match scope {
                Scope::Whole => key.to_string(),
                scope => format!("{key} {scope}"),
            };
            scopes
                .iter()
                .map(|(scope, ranges)| AtHand { counter: name(scope), numbers: ranges.at_hand() })
                .collect::<Vec<_>>()
        };
        in_use.iter().flat_map(of).filter(|at_hand| at_hand.numbers > 0).collect()
    }

    /// Gives back what was reserved and not used. Call it when no request is under way any more.
    pub async fn stop(&self) {
        let in_use: Vec<_> = self.in_use.write().expect("no panic while counters are held").drain().collect();
        let all = in_use.iter().flat_map(|(_, in_use)| {
            let scopes = in_use.scopes.lock().expect("no panic while scopes are held");
            scopes.iter().map(|(_, ranges)| ranges.clone()).collect::<Vec<_>>()
        });
        futures::future::join_all(all.map(|ranges| async move { ranges.stop().await })).await;
    }

    fn in_use(&self, counter: CounterName<'_>) -> Arc<InUse> {
        if let Some(known) = self.in_use.read().expect("no panic while counters are held").get(counter.key) {
            return known.clone();
        }
        let make = || {
            let meters = Meters::new(counter.key, counter.id_type);
            Arc::new(InUse { meters, scopes: Mutex::default() })
        };
        let mut in_use = self.in_use.write().expect("no panic while counters are held");
        in_use.entry(counter.key.clone()).or_insert_with(make).clone()
    }

    fn ranges(&self, in_use: &InUse, counter: CounterName<'_>) -> Arc<Ranges> {
        let mut scopes = in_use.scopes.lock().expect("no panic while scopes are held");
        if let Some((_, ranges)) = scopes.iter().find(|(scope, _)| *scope == counter.scope) {
            return ranges.clone();
        }
        let ranges = Ranges::new(self.cells.clone(), counter.to_string(), counter.absent(), self.settings.clone());
        scopes.push_back((counter.scope, ranges.clone()));
        if scopes.len() > SCOPES_AT_HAND {
            let (_, oldest) = scopes.pop_front().expect("there are some");
            tokio::spawn(async move { oldest.stop().await });
        }
        ranges
    }
}

impl InUse {
    fn measure(&self, began: Instant, numbers: &Result<Vec<i64>>) {
        self.meters.answered(began);
        if let Ok(numbers) = numbers
            && let Some(last) = numbers.last()
        {
            self.meters.current.set(*last as f64);
        }
    }
}

/// Takes numbers in strict order, as a change of the mark.
fn strictly(
    absent: Absent,
    steps: Steps,
    bounds: Bounds,
) -> impl FnMut(&mut Option<Mark>) -> Result<Vec<i64>> + Send + 'static {
    move |state| {
        let mut mark = match (state.as_ref(), absent) {
            (Some(mark), _) => mark.clone(),
            (None, Absent::Begins) => Mark::at(bounds.base),
            (None, Absent::IsLost) => return Err(lost()),
        };
        let numbers = mark.advance(steps, bounds)?;
        *state = Some(mark);
        Ok(numbers)
    }
}
