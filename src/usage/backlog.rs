//! What waits between the stream and the ledger, and who is turned away because of it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_nats::jetstream;
use chrono::Utc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    api::usage::{Priority, StorageHealth},
    error::{Code, Error, Result},
};

const LOOK: Duration = Duration::from_millis(500);

/// Whether requests of a priority are refused when this share of the backlog is used.
fn is_above(priority: Priority, share: f64) -> bool {
    match priority {
        Priority::Low => share >= 0.70,
        Priority::Medium => share >= 0.85,
        Priority::High => share >= 0.95,
        Priority::Critical => false,
    }
}

/// The backlog as it was seen last.
pub struct Backlog {
    stream: String,
    budget: u64,
    seen: Mutex<Seen>,
}

#[derive(Debug, Clone)]
struct Seen {
    share: f64,
    health: StorageHealth,
}

impl Backlog {
    pub fn new(stream: String, budget: i64) -> Self {
        let health = StorageHealth {
            status: "healthy".into(),
            backlog_messages: 0,
            backlog_bytes: 0,
            oldest_unpersisted_seconds: 0.0,
            seconds_to_drain: Some(0.0),
        };
        Self { stream, budget: budget.unsigned_abs(), seen: Mutex::new(Seen { share: 0.0, health }) }
    }

    /// Looks at the stream again and again.
    pub async fn watch(self: Arc<Self>, jetstream: jetstream::Context, stop: CancellationToken) {
        let mut before: Option<(Instant, u64)> = None;
        let mut rate = 0.0;
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            let Ok(stream) = jetstream.get_stream(&self.stream).await else { continue };
            let state = &stream.cached_info().state;
            // Sinks purge what they have written, so what has ever left was written.
            let (now, left) = (Instant::now(), state.last_sequence.saturating_sub(state.messages));
            if let Some((then, left_then)) = before {
                let fresh = left.saturating_sub(left_then) as f64 / (now - then).as_secs_f64();
                rate = rate * 0.8 + fresh * 0.2;
            }
            before = Some((now, left));
            let first = state.first_timestamp.unix_timestamp_nanos() as f64 / 1e9;
            let age = Utc::now().timestamp_micros() as f64 / 1e6 - first;
            let oldest = if state.messages == 0 { 0.0 } else { age.max(0.0) };
            let to_drain = match state.messages {
                0 => Some(0.0),
                waiting => (rate > 0.0).then(|| waiting as f64 / rate),
            };
            self.note(state.messages, state.bytes, oldest, to_drain);
        }
    }

    fn note(&self, messages: u64, bytes: u64, oldest: f64, to_drain: Option<f64>) {
        metrics::gauge!("tidemark_usage_backlog_messages").set(messages as f64);
        metrics::gauge!("tidemark_usage_backlog_bytes").set(bytes as f64);
        metrics::gauge!("tidemark_usage_oldest_unpersisted_seconds").set(oldest);
        metrics::gauge!("tidemark_usage_drain_seconds").set(to_drain.unwrap_or(f64::INFINITY));
        let share = bytes as f64 / self.budget as f64;
        let health = StorageHealth {
            status: if is_above(Priority::Low, share) { "behind" } else { "healthy" }.into(),
            backlog_messages: messages,
            backlog_bytes: bytes,
            oldest_unpersisted_seconds: oldest,
            seconds_to_drain: to_drain,
        };
        *self.seen.lock().expect(UNBROKEN) = Seen { share, health };
    }

    pub fn health(&self) -> StorageHealth {
        self.seen.lock().expect(UNBROKEN).health.clone()
    }

    /// Whether what comes waits longer than it should.
    pub fn is_behind(&self) -> bool {
        self.seen.lock().expect(UNBROKEN).health.oldest_unpersisted_seconds > 1.0
    }

    /// Whether anybody has to be turned away.
    pub fn sheds(&self) -> bool {
        is_above(Priority::Low, self.share())
    }

    fn share(&self) -> f64 {
        self.seen.lock().expect(UNBROKEN).share
    }

    /// Whether a request of this priority may pass.
    pub fn admit(&self, priority: Priority) -> Result<()> {
        let share = self.share();
        if !is_above(priority, share) {
            return Ok(());
        }
        let name = format!("{priority:?}").to_lowercase();
        metrics::counter!("tidemark_usage_shed_total", "priority" => name.clone()).increment(1);
        let message = format!("{:.0} % of the backlog is used: records of priority {name} wait", share * 100.0);
        Err(Error::new(Code::RateLimited, message).retry_after(Duration::from_secs(1)))
    }
}

const UNBROKEN: &str = "no panic while the backlog is held";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_important_go_first_and_the_most_important_never() {
        use Priority::{Critical, High, Low, Medium};
        let backlog = Backlog::new("USAGE".into(), 100);
        for (bytes, admitted) in [
            (69, &[Low, Medium, High, Critical][..]),
            (70, &[Medium, High, Critical]),
            (85, &[High, Critical]),
            (95, &[Critical]),
            (100, &[Critical]),
        ] {
            backlog.note(1, bytes, 1.0, None);
            let passes: Vec<_> =
                [Low, Medium, High, Critical].into_iter().filter(|one| backlog.admit(*one).is_ok()).collect();
            assert_eq!(passes, admitted, "{bytes}");
            assert_eq!(backlog.sheds(), bytes >= 70);
        }
    }
}
