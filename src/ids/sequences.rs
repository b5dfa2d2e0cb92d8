//! The counters that this process has in use.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{formatted::Scope, guard::Guards, meters::Gauges};
use crate::{
    api::{Name, ids::Mode},
    error::Result,
    per_name::PerName,
    watermark::{Absent, AtHand, Bounds, Cells, Mark, Once, RangeSettings, Ranges, RequestId, Requester, Steps},
};

/// Counters of one key that are held at once: the day before may still be asked for around midnight.
const SCOPES_AT_HAND: usize = 3;

/// Which counter is meant.
#[derive(Debug, Clone, Copy)]
pub enum CounterName<'a> {
    Increment(&'a Name),
    Formatted(&'a Name, Scope),
}

/// Where its mark stands in the bucket.
impl fmt::Display for CounterName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CounterName::Increment(key) => write!(f, "increment.{key}"),
            CounterName::Formatted(key, scope) => write!(f, "formatted.{key}.{scope}"),
        }
    }
}

impl<'a> CounterName<'a> {
    fn key(self) -> &'a Name {
        match self {
            CounterName::Increment(key) | CounterName::Formatted(key, _) => key,
        }
    }

    fn scope(self) -> Scope {
        match self {
            CounterName::Increment(_) => Scope::Whole,
            CounterName::Formatted(_, scope) => scope,
        }
    }

    /// A counter that never starts again is made with its key; the others begin with their first use.
    fn absent(self) -> Absent {
        if self.scope() == Scope::Whole { Absent::IsLost } else { Absent::Begins }
    }
}

/// What is taken from a counter, and how.
#[derive(Debug, Clone, Copy)]
pub struct Taking {
    pub steps: Steps,
    pub bounds: Bounds,
    pub mode: Mode,
    /// The version of the key's format; increment keys have none.
    pub version: Option<u64>,
}

pub struct Sequences {
    cells: Cells<Mark>,
    guards: Guards,
    settings: RangeSettings,
    in_use: PerName<InUse>,
}

/// A key in use.
struct InUse {
    gauges: Gauges,
    /// In the order of their first use.
    open: Mutex<VecDeque<Open>>,
}

/// A counter in use.
#[derive(Clone)]
struct Open {
    scope: Scope,
    version: Option<u64>,
    ranges: Arc<Ranges>,
    /// Whether its mark has been seen. If it is missing later, it is lost.
    begun: Arc<AtomicBool>,
}

impl Sequences {
    pub fn new(cells: Cells<Mark>, guards: Guards, settings: RangeSettings) -> Self {
        Self { cells, guards, settings, in_use: PerName::default() }
    }

    pub fn cells(&self) -> &Cells<Mark> {
        &self.cells
    }

    /// The next numbers of a counter. All of them, or an error and none.
    pub async fn take(&self, counter: CounterName<'_>, taking: Taking, request: Requester<'_>) -> Result<Vec<i64>> {
        let in_use = self.in_use(counter);
        let open = match in_use.find(counter, taking.version) {
            Some(open) => open,
            None => Box::pin(self.open(&in_use, counter, taking.version)).await?,
        };
        let numbers = match taking.mode {
            Mode::Range => {
                let numbers = open.ranges.take(taking.steps, taking.bounds, request).await?;
                in_use.gauges.remaining(open.ranges.at_hand());
                numbers
            }
            Mode::Strict => {
                let (key, advance) = (counter.to_string(), open.strictly(counter, taking));
                // Boxed: it waits for a write anyway, and the other mode should not carry its state.
                Box::pin(self.cells.change(&key, request(), advance)).await?.answer
            }
        };
        in_use.gauges.given(&numbers);
        Ok(numbers)
    }

    /// The same for a request that may be repeated. What is answered is made of the numbers, and recorded.
    pub async fn take_once<A>(
        &self,
        counter: CounterName<'_>,
        taking: Taking,
        request: Requester<'_>,
        once: Once,
        render: impl Fn(Vec<i64>) -> A + Send + 'static,
    ) -> Result<A>
    where
        A: serde::Serialize + serde::de::DeserializeOwned + Send + 'static,
    {
        match taking.mode {
            Mode::Range => {
                let make = async || Ok(render(self.take(counter, taking, request).await?));
                self.cells.make_once(once, make).await
            }
            Mode::Strict => {
                let open = self.open(&self.in_use(counter), counter, taking.version).await?;
                let mut advance = open.strictly(counter, taking);
                let advance = move |state: &mut Option<Mark>| Ok(render(advance(state)?));
                Ok(self.cells.change_once(&counter.to_string(), request(), once, advance).await?.answer)
            }
        }
    }

    /// Makes a counter that is there before its first use.
    pub async fn begin(&self, counter: CounterName<'_>, absent: Absent, base: i64, request: RequestId) -> Result<()> {
        let begin = move |state: &mut Option<Mark>| {
            *state = Some(absent.or_begin(state, base)?);
            Ok(())
        };
        self.cells.change(&counter.to_string(), request, begin).await.map(drop)
    }

    /// Passes over numbers of a counter that may have been given without our knowing, also if it is not known to have begun.
    pub async fn jump(&self, counter: CounterName<'_>, margin: i64) -> Result<()> {
        let absent = counter.absent();
        let jump = move |state: &mut Option<Mark>| {
            let mut mark = absent.or_begin(state, 0)?;
            mark.jump(margin);
            *state = Some(mark);
            Ok(())
        };
        self.cells.change(&counter.to_string(), None, jump).await.map(drop)
    }

    /// What can be given without a reservation.
    pub fn at_hand(&self) -> Vec<AtHand> {
        let of = |(key, in_use): &(Name, Arc<InUse>)| {
            let name = |scope: Scope| match scope {
                Scope::Whole => key.to_string(),
                scope => format!("{key} {scope}"),
            };
            let at_hand = |open: &Open| AtHand { counter: name(open.scope), numbers: open.ranges.at_hand() };
            in_use.lock().iter().map(at_hand).collect::<Vec<_>>()
        };
        self.in_use.all().iter().flat_map(of).filter(|at_hand| at_hand.numbers > 0).collect()
    }

    /// Gives back what was reserved and not used. Call it when no request is under way any more.
    pub async fn stop(&self) {
        let in_use = self.in_use.take_all();
        let open: Vec<Open> = in_use.iter().flat_map(|in_use| in_use.lock().drain(..).collect::<Vec<_>>()).collect();
        futures::future::join_all(open.iter().map(|open| open.ranges.stop())).await;
    }

    fn in_use(&self, counter: CounterName<'_>) -> Arc<InUse> {
        self.in_use.get(counter.key(), || InUse { gauges: Gauges::new(counter.key()), open: Mutex::default() })
    }

    /// The counter, ready for use. Its first use by this process is announced to the key's guard.
    async fn open(&self, in_use: &InUse, counter: CounterName<'_>, version: Option<u64>) -> Result<Open> {
        if let Some(open) = in_use.find(counter, version) {
            return Ok(open);
        }
        if let Some(version) = version {
            self.guards.announce(counter.key(), version).await?;
        }
        let mut all = in_use.lock();
        if let Some(open) = all.iter_mut().find(|open| open.scope == counter.scope()) {
            open.version = version;
            return Ok(open.clone());
        }
        let ranges = Ranges::new(self.cells.clone(), counter.to_string(), counter.absent(), self.settings.clone());
        let open = Open { scope: counter.scope(), version, ranges, begun: Arc::default() };
        all.push_back(open.clone());
        if all.len() > SCOPES_AT_HAND {
            let oldest = all.pop_front().expect("there are some");
            tokio::spawn(async move { oldest.ranges.stop().await });
        }
        Ok(open)
    }
}

impl InUse {
    fn find(&self, counter: CounterName<'_>, version: Option<u64>) -> Option<Open> {
        let is_it = |open: &&Open| open.scope == counter.scope() && open.version == version;
        self.lock().iter().find(is_it).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Open>> {
        self.open.lock().expect("no panic while counters are held")
    }
}

impl Open {
    /// Takes numbers in strict order, as a change of the mark.
    fn strictly(
        &self,
        counter: CounterName<'_>,
        taking: Taking,
    ) -> impl FnMut(&mut Option<Mark>) -> Result<Vec<i64>> + Send + 'static {
        let (begun, absent) = (self.begun.clone(), counter.absent());
        move |state| {
            let absent = if begun.load(Ordering::Relaxed) { Absent::IsLost } else { absent };
            let mut mark = absent.or_begin(state, taking.bounds.base)?;
            let numbers = mark.advance(taking.steps, taking.bounds)?;
            begun.store(state.is_some(), Ordering::Relaxed);
            *state = Some(mark);
            Ok(numbers)
        }
    }
}
