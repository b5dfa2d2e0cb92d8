//! `tidemark bench`: the speed that we promise, as ratios measured in one run.
//!
//! Both sides of a ratio take turns in short rounds on the same servers, and the median of the pairs counts: a busy machine
//! slows both, and the ratio stays.

mod ground;
mod ids;
mod ledger;
mod load;
mod noid;
mod plot;
mod report;
mod stages;
mod start;
mod timers;
mod usage;

use futures::future::LocalBoxFuture;

pub use ground::Ground;
pub use load::Effort;
pub use plot::Plot;
pub use report::{file_name, json, markdown};

use crate::api::Name;

/// How a promise is measured.
type Measure = for<'a> fn(&'a Ground) -> LocalBoxFuture<'a, Measured>;

/// One promise, measured.
#[derive(Debug, Clone)]
pub struct Row {
    pub name: &'static str,
    pub measured: Measured,
}

#[derive(Debug, Clone)]
pub struct Measured {
    pub goal: f64,
    pub figure: f64,
    pub unit: Unit,
    /// What the figure comes from, for people.
    pub detail: String,
    pub plot: Option<Plot>,
}

impl Measured {
    pub fn new(unit: Unit, goal: f64, figure: f64, detail: String) -> Self {
        Self { goal, figure, unit, detail, plot: None }
    }

    pub fn with(mut self, plot: Plot) -> Self {
        self.plot = Some(plot);
        self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Of the other side, at least the goal.
    Ratio,
    /// A second, at least the goal.
    PerSecond,
    /// At most the goal, as those that follow.
    Milliseconds,
    Seconds,
    Megabytes,
}

impl Row {
    pub fn is_ok(&self) -> bool {
        let Measured { goal, figure, unit, .. } = self.measured;
        if unit.more_is_better() { figure >= goal } else { figure <= goal }
    }
}

/// Every promise.
fn all() -> impl Iterator<Item = &'static (&'static str, Measure)> {
    let rows = [start::ROWS, ids::ROWS, noid::ROWS, stages::ROWS, timers::ROWS, usage::ROWS, ledger::ROWS];
    rows.into_iter().flatten()
}

/// The names of those that contain the text.
pub fn names(filter: &str) -> Vec<&'static str> {
    all().map(|(name, _)| *name).filter(|name| name.contains(filter)).collect()
}

/// What is known when all is measured.
pub struct Report {
    pub rows: Vec<Row>,
    /// The servers that it was measured on.
    pub servers: String,
}

/// Measures every promise whose name contains the filter, telling which one is next.
pub async fn run(filter: &str, effort: Effort, mut next: impl FnMut(&'static str)) -> Report {
    let ground = Ground::prepare(effort).await;
    let mut rows = Vec::new();
    for (name, measure) in all().filter(|(name, _)| name.contains(filter)) {
        next(name);
        rows.push(Row { name, measured: measure(&ground).await });
    }
    let servers = ground.servers().await;
    ground.clear().await;
    Report { rows, servers }
}

/// The value below which this share of the sorted ones lies.
fn at(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// Resident, in megabytes.
fn memory_of_this_process() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kilobytes =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
    kilobytes.map_or(f64::INFINITY, |kilobytes: f64| kilobytes / 1024.0)
}

fn name(text: &str) -> Name {
    text.parse().expect("a name")
}
