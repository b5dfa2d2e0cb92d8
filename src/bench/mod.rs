//! `tidemark bench`: the speed that we promise, as ratios measured in one run.
//!
//! Both sides of a ratio take turns in short rounds on the same servers, and the median of the pairs counts: a busy machine
//! slows both, and the ratio stays.

mod ground;
mod ids;
mod ledger;
mod load;
mod noid;
mod stages;
mod timers;
mod usage;

use std::fmt;

use futures::future::LocalBoxFuture;

pub use ground::Ground;

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
        match unit {
            Unit::Ratio | Unit::PerSecond => figure >= goal,
            Unit::Milliseconds | Unit::Seconds | Unit::Megabytes => figure <= goal,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { name, measured: Measured { goal, figure, unit, detail } } = self;
        let verdict = if self.is_ok() { "met" } else { "MISSED" };
        match unit {
            Unit::Ratio | Unit::Milliseconds | Unit::Seconds => {
                write!(f, "{name:<34} {figure:>12.2} {goal:>12.2}  {verdict:<6}  {detail}")
            }
            Unit::PerSecond | Unit::Megabytes => {
                write!(f, "{name:<34} {figure:>12.0} {goal:>12.0}  {verdict:<6}  {detail}")
            }
        }
    }
}

/// Measures every promise whose name contains the filter, showing each as it is known.
pub async fn run(filter: &str, mut show: impl FnMut(&Row)) -> Vec<Row> {
    let ground = Ground::prepare().await;
    let mut rows = Vec::new();
    for (name, measure) in ids::ROWS
        .iter()
        .chain(noid::ROWS)
        .chain(stages::ROWS)
        .chain(timers::ROWS)
        .chain(usage::ROWS)
        .chain(ledger::ROWS)
    {
        if name.contains(filter) {
            let row = Row { name, measured: measure(&ground).await };
            show(&row);
            rows.push(row);
        }
    }
    ground.clear().await;
    rows
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
