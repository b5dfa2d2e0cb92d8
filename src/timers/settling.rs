//! How a timer goes on after an attempt. Pure; [`super::outcomes`] writes it down.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::{
    deliver::Report,
    moment,
    plan::MAX_LATENESS,
    store::{Claimed, Settlement},
};
use crate::api::timers::{OnLate, Status};

/// How late an attempt is at a moment.
pub fn lateness(timer: &Claimed, began: DateTime<Utc>) -> TimeDelta {
    (began - timer.due_at).max(TimeDelta::zero())
}

/// Whether the timer is too late to fire, and is not to fire then.
pub fn is_too_late(timer: &Claimed) -> bool {
    let most = timer.options.max_lateness.unwrap_or(MAX_LATENESS);
    let late = lateness(timer, timer.claimed_at).to_std().unwrap_or_default();
    timer.options.on_late == OnLate::Skip && timer.attempt == 1 && late > most
}

/// The attempt was made.
pub fn after_call(timer: &Claimed, report: Report, began: DateTime<Utc>, ended: DateTime<Utc>) -> Settlement {
    let outcome = if report.error.is_none() { Status::Completed } else { Status::Failed };
    let retries = outcome == Status::Failed && timer.attempt < timer.attempts_allowed;
    let mut settlement = ended_run(timer, outcome, began, ended);
    settlement.error = report.error;
    settlement.response = report.response;
    if retries {
        let wait = pause(timer).max(report.retry_after.unwrap_or_default());
        again(timer, &mut settlement, ended + wait);
    }
    settlement
}

/// It was too late.
pub fn skipped(timer: &Claimed) -> Settlement {
    let mut settlement = ended_run(timer, Status::Skipped, timer.claimed_at, timer.claimed_at);
    let late = humantime::format_duration(Duration::from_millis(settlement.late_by_ms as u64)).to_string();
    settlement.error = Some(format!("skipped: {late} late"));
    settlement
}

/// What is said of a call whose end nobody knows. If somebody does after all, he may say so.
pub const UNKNOWN: &str = "outcome unknown: the process that called back is gone";

/// Whoever made the call is gone, and nobody knows how it ended.
pub fn abandoned(timer: &Claimed, now: DateTime<Utc>) -> Settlement {
    let mut settlement = ended_run(timer, Status::Failed, timer.claimed_at, now);
    settlement.error = Some(UNKNOWN.into());
    if timer.attempt < timer.attempts_allowed {
        again(timer, &mut settlement, now);
    }
    settlement
}

/// A run that is over: the timer ends with it, or goes on with the next.
fn ended_run(timer: &Claimed, outcome: Status, began: DateTime<Utc>, ended: DateTime<Utc>) -> Settlement {
    let attempt_late_by_ms = lateness(timer, began).num_milliseconds();
    let first_attempt = timer.attempt == 1;
    let mut settlement = Settlement {
        id: timer.id,
        tenant: timer.tenant.clone(),
        destination: timer.destination.clone(),
        claim: timer.claim,
        run: timer.run,
        attempt: timer.attempt,
        run_at: timer.execute_at,
        started_at: began,
        ended_at: ended,
        outcome,
        error: None,
        attempt_late_by_ms,
        late_by_ms: timer.late_by_ms.filter(|_| !first_attempt).unwrap_or(attempt_late_by_ms),
        response: None,
        status: outcome,
        execute_at: timer.execute_at,
        due_at: timer.due_at,
        next_run: timer.run,
        next_attempt: timer.attempt,
        attempts_allowed: timer.attempts_allowed,
    };
    if let Some(next) = timer.options.next_run(timer.run, timer.execute_at, ended) {
        settlement.status = Status::Pending;
        settlement.execute_at = next;
        settlement.due_at = next;
        settlement.next_run = timer.run + 1;
        settlement.next_attempt = 0;
        settlement.attempts_allowed = timer.options.max_attempts();
    }
    settlement
}

/// The same run once more.
fn again(timer: &Claimed, settlement: &mut Settlement, due_at: DateTime<Utc>) {
    settlement.status = Status::Pending;
    settlement.execute_at = timer.execute_at;
    settlement.due_at = moment::kept(due_at);
    settlement.next_run = timer.run;
    settlement.next_attempt = timer.attempt;
    settlement.attempts_allowed = timer.attempts_allowed;
}

/// Twice as long after each failure, with some chance in it so that many don't come back at once.
fn pause(timer: &Claimed) -> Duration {
    let Some(retry) = &timer.options.retry else { return Duration::ZERO };
    let doubled = retry.initial_delay.saturating_mul(1 << (timer.attempt - 1).clamp(0, 30));
    doubled.min(retry.max_delay).mul_f64(rand::random_range(0.75..=1.0))
}
