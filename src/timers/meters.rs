//! What operators see of timers.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use chrono::TimeDelta;
use metrics::{Counter, Gauge, Histogram};

use crate::api::timers::Status;

/// Timers that fire later than this are said to be late.
const LATE: Duration = Duration::from_secs(1);
/// But not more often than this.
const WARNED: Duration = Duration::from_secs(30);

pub struct Meters {
    lateness: Histogram,
    under_way: Gauge,
    pending: Gauge,
    retried: Counter,
    warned: Mutex<Option<Instant>>,
}

impl Meters {
    pub fn new() -> Self {
        Self {
            lateness: metrics::histogram!("tidemark_timer_lateness_seconds"),
            under_way: metrics::gauge!("tidemark_timer_callbacks_in_flight"),
            pending: metrics::gauge!("tidemark_timers_pending"),
            retried: metrics::counter!("tidemark_timer_retries_total"),
            warned: Mutex::default(),
        }
    }

    /// A batch was claimed; the latest of it was so late.
    pub fn fired(&self, lateness: impl Iterator<Item = TimeDelta>) {
        let mut worst = Duration::ZERO;
        for late in lateness {
            let late = late.to_std().unwrap_or_default();
            self.lateness.record(late.as_secs_f64());
            worst = worst.max(late);
        }
        if worst > LATE {
            let mut warned = self.warned.lock().expect("no panic while the warning is held");
            if warned.is_none_or(|last| last.elapsed() > WARNED) {
                *warned = Some(Instant::now());
                tracing::warn!(late = ?worst, "timers fire late");
            }
        }
    }

    pub fn under_way(&self, count: usize) {
        self.under_way.set(count as f64);
    }

    pub fn pending(&self, count: i64) {
        self.pending.set(count as f64);
    }

    pub fn retried(&self) {
        self.retried.increment(1);
    }
}

/// A timer, or one run of it, is over.
pub fn settled(outcome: Status) {
    metrics::counter!("tidemark_timer_runs_total", "outcome" => outcome.as_str()).increment(1);
}
