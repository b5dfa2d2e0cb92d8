//! Writing down what became of callbacks, many at once.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use sqlx::{Row, postgres::PgRow};
use uuid::Uuid;

use super::{Store, bounded, column, parsed};
use crate::{
    api::{
        Name,
        timers::{CapturedResponse, Status},
    },
    timers::settling::UNKNOWN,
};

/// What one attempt was, and how its timer goes on.
#[derive(Debug, Clone)]
pub struct Settlement {
    pub id: Uuid,
    pub tenant: Name,
    pub destination: Arc<str>,
    pub claim: Uuid,
    pub run: i32,
    pub attempt: i32,
    /// The moment of the run that this was an attempt of.
    pub run_at: DateTime<Utc>,
    pub started_at: DateTime<Utc>,
    pub ended_at: DateTime<Utc>,
    /// What the attempt was: completed, failed or skipped.
    pub outcome: Status,
    pub error: Option<String>,
    /// Of this attempt.
    pub attempt_late_by_ms: i64,
    /// Of the run.
    pub late_by_ms: i64,
    pub response: Option<CapturedResponse>,
    /// The timer from here on.
    pub status: Status,
    pub execute_at: DateTime<Utc>,
    pub due_at: DateTime<Utc>,
    pub next_run: i32,
    pub next_attempt: i32,
    pub attempts_allowed: i32,
}

/// A settlement that was written.
#[derive(Debug)]
pub struct Settled {
    pub id: Uuid,
    pub claim: Uuid,
    /// Canceled instead of pending, if that was asked for meanwhile.
    pub status: Status,
}

impl Store {
    /// Writes what still counts: a claim that somebody else settled is left as it is, unless he did not know how it ended.
    /// May be repeated.
    pub async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, sqlx::Error> {
        let response =
            |one: &Settlement| one.response.as_ref().and_then(|response| serde_json::to_string(response).ok());
        let rows = sqlx::query(
            "with outcome as (
                 select * from unnest($1::uuid[], $2::uuid[], $3::int[], $4::int[], $5::timestamptz[], $6::timestamptz[],
                     $7::text[], $8::text[], $9::bigint[], $10::bigint[], $11::text[], $12::text[], $13::timestamptz[],
                     $14::timestamptz[], $15::int[], $16::int[], $17::int[])
                     as outcome (id, claim, run, attempt, started_at, ended_at, outcome, error, attempt_late_by_ms,
                         late_by_ms, response, status, execute_at, due_at, next_run, next_attempt, attempts_allowed)
             ), settled as (
                 update timers t
                 set status = case when outcome.next_run > outcome.run then coalesce(t.after_run, outcome.status)
                         else outcome.status end,
                     after_run = case when outcome.next_run > outcome.run then null else t.after_run end,
                     last_error = outcome.error, executed_at = outcome.ended_at, late_by_ms = outcome.late_by_ms,
                     execute_at = outcome.execute_at, due_at = outcome.due_at, run = outcome.next_run,
                     attempt = outcome.next_attempt, attempts_allowed = outcome.attempts_allowed, owner = null,
                     claim_until = null, response = coalesce(outcome.response::json, t.response),
                     updated_at = clock_timestamp()
                 from outcome
                 where t.id = outcome.id and t.claim = outcome.claim
                     and (t.status = 'executing' or t.status in ('failed', 'pending') and t.last_error = $18)
                 returning t.id, t.claim, t.status
             ), history as (
                 insert into timer_attempts
                     (timer_id, run, attempt, started_at, ended_at, status, error, late_by_ms, response)
                 select id, run, attempt, started_at, ended_at, outcome.outcome, error, attempt_late_by_ms,
                     response::json
                 from outcome join settled using (id, claim)
                 on conflict (timer_id, run, attempt) do update
                 set ended_at = excluded.ended_at, status = excluded.status, error = excluded.error,
                     response = excluded.response
             )
             select id, claim, status from settled
             union all
             -- Written by an attempt of this same statement whose answer was lost.
             select t.id, t.claim, t.status
             from timers t join outcome on t.id = outcome.id and t.claim = outcome.claim
             where t.executed_at = outcome.ended_at and not (t.status = 'executing' or t.last_error is not distinct from $18)",
        )
        .bind(column(settlements, |one| one.id))
        .bind(column(settlements, |one| one.claim))
        .bind(column(settlements, |one| one.run))
        .bind(column(settlements, |one| one.attempt))
        .bind(column(settlements, |one| one.started_at))
        .bind(column(settlements, |one| one.ended_at))
        .bind(column(settlements, |one| one.outcome.as_str()))
        .bind(column(settlements, |one| one.error.as_deref()))
        .bind(column(settlements, |one| one.attempt_late_by_ms))
        .bind(column(settlements, |one| one.late_by_ms))
        .bind(column(settlements, response))
        .bind(column(settlements, |one| one.status.as_str()))
        .bind(column(settlements, |one| one.execute_at))
        .bind(column(settlements, |one| one.due_at))
        .bind(column(settlements, |one| one.next_run))
        .bind(column(settlements, |one| one.next_attempt))
        .bind(column(settlements, |one| one.attempts_allowed))
        .bind(UNKNOWN)
        .fetch_all(&self.pool);
        let rows = bounded(rows).await?;
        let settled = |row: &PgRow| {
            Ok(Settled { id: row.try_get("id")?, claim: row.try_get("claim")?, status: parsed(row, "status")? })
        };
        rows.iter().map(settled).collect()
    }
}
