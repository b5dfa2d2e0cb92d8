//! Load, and what comes out of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Callers that each wait for their answer before they ask again.
pub const IN_FLIGHT: usize = 64;

/// Short, so that what else the machine does hits both sides of a pair.
const ROUND: Duration = Duration::from_millis(300);

/// A quarter of the values lies below `low`, half below `middle`, three quarters below `high`.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    pub low: f64,
    pub middle: f64,
    pub high: f64,
}

impl Spread {
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share) as usize];
        Self { low: at(0.25), middle: at(0.5), high: at(0.75) }
    }
}

/// Two sides measured in turns.
pub struct Pairs {
    pub baseline: Spread,
    pub measured: Spread,
    pub ratio: Spread,
}

impl Pairs {
    /// From rates of the baseline and of what is measured.
    pub fn of(rates: &[(f64, f64)]) -> Self {
        Self {
            baseline: Spread::of(rates.iter().map(|(baseline, _)| *baseline).collect()),
            measured: Spread::of(rates.iter().map(|(_, measured)| *measured).collect()),
            ratio: Spread::of(rates.iter().map(|(baseline, measured)| measured / baseline).collect()),
        }
    }

    pub fn detail(&self, baseline: &str) -> String {
        format!(
            "{:.0}/s against {:.0}/s {baseline} (middle half {:.2} to {:.2})",
            self.measured.middle, self.baseline.middle, self.ratio.low, self.ratio.high
        )
    }
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    rounds: usize,
}

impl Effort {
    pub const DEFAULT_ROUNDS: usize = 40;

    pub fn of(rounds: usize) -> Self {
        Self { rounds: rounds.max(1) }
    }

    /// What is always done as often, less where less is asked for.
    pub fn at_most(self, usual: usize) -> usize {
        usual.min(self.rounds)
    }

    fn warm_up(self) -> usize {
        self.rounds.div_ceil(10)
    }

    /// Measures both sides in turns. Each answers with a rate.
    pub async fn pairs(self, mut baseline: impl AsyncFnMut() -> f64, mut measured: impl AsyncFnMut() -> f64) -> Pairs {
        let mut rates = Vec::new();
        for round in 0..self.warm_up() + self.rounds {
            let pair = (baseline().await, measured().await);
            if round >= self.warm_up() {
                rates.push(pair);
            }
        }
        Pairs::of(&rates)
    }

    /// Measures one side alone.
    pub async fn rounds(self, mut measured: impl AsyncFnMut() -> f64) -> Spread {
        let mut rates = Vec::new();
        for round in 0..self.warm_up() + self.rounds.div_ceil(4) {
            let rate = measured().await;
            if round >= self.warm_up() {
                rates.push(rate);
            }
        }
        Spread::of(rates)
    }
}

/// Requests a second on a subject by as many callers, each with an empty body.
pub async fn requests(nats: &async_nats::Client, subject: &'static str, callers: usize) -> f64 {
    let nats = nats.clone();
    rate(callers, move || {
        let nats = nats.clone();
        async move {
            let reply = nats.request(subject, Default::default()).await.expect("an answer");
            assert!(reply.headers.is_none(), "an error: {reply:?}");
        }
    })
    .await
}

/// How often a second the callers together got their answer.
pub async fn rate<F>(callers: usize, ask: impl Fn() -> F + Clone + Send + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let (count, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let began = Instant::now();
    let callers: Vec<_> = (0..callers)
        .map(|_| {
            let (ask, count, done) = (ask.clone(), count.clone(), done.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    ask().await;
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    tokio::time::sleep(ROUND).await;
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.expect("a caller does not panic");
    }
    count.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64()
}
