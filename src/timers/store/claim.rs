//! Claiming: who may call back. One statement for all that are due, and PostgreSQL's clock decides that they are.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{FromRow, Row, postgres::PgRow};
use uuid::Uuid;

use super::{Entry, Store, bounded, column, json, parsed};
use crate::{
    api::{Name, timers::Callback},
    telemetry::Trace,
    timers::plan::Options,
};

/// A timer that is ours to call back, until its claim ends.
#[derive(Debug, Clone)]
pub struct Claimed {
    pub id: Uuid,
    pub tenant: Name,
    pub execute_at: DateTime<Utc>,
    pub due_at: DateTime<Utc>,
    pub claimed_at: DateTime<Utc>,
    pub claim: Uuid,
    pub callback: Callback,
    pub destination: Arc<str>,
    pub options: Options,
    pub run: i32,
    pub attempt: i32,
    pub attempts_allowed: i32,
    pub late_by_ms: Option<i64>,
    traceparent: Option<String>,
}

impl Claimed {
    /// What a receiver knows a repeated callback by.
    pub fn delivery_id(&self) -> String {
        format!("{}.{}", self.id, self.run)
    }

    /// The trace of the request that set the timer.
    pub fn trace(&self) -> Trace {
        Trace::from_header(self.traceparent.as_deref())
    }
}

macro_rules! claimed_columns {
    () => {
        "t.id, t.tenant, t.execute_at, t.due_at, t.claimed_at, t.claim, t.callback_config::text as callback, t.destination, \
         t.options::text as options, t.run, t.attempt, t.attempts_allowed, t.late_by_ms, t.traceparent"
    };
}

impl FromRow<'_, PgRow> for Claimed {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            tenant: parsed(row, "tenant")?,
            execute_at: row.try_get("execute_at")?,
            due_at: row.try_get("due_at")?,
            claimed_at: row.try_get("claimed_at")?,
            claim: row.try_get("claim")?,
            callback: json(row, "callback")?.ok_or_else(|| sqlx::Error::ColumnNotFound("callback".into()))?,
            destination: row.try_get::<&str, _>("destination")?.into(),
            options: json(row, "options")?.unwrap_or_default(),
            run: row.try_get("run")?,
            attempt: row.try_get("attempt")?,
            attempts_allowed: row.try_get("attempts_allowed")?,
            late_by_ms: row.try_get("late_by_ms")?,
            traceparent: row.try_get("traceparent")?,
        })
    }
}

/// What came of a claim.
pub struct Claims {
    pub claimed: Vec<Claimed>,
    /// Those that are still pending: by PostgreSQL's clock they are not due yet.
    pub early: Vec<Entry>,
    /// PostgreSQL's clock, if it had to be asked.
    pub now: Option<DateTime<Utc>>,
}

impl Store {
    /// Claims those of the timers that are pending and due. The same claim again finds what it took before, so a claim
    /// whose answer was lost may be repeated.
    pub async fn claim(&self, ids: &[Uuid], owner: &str, claim: Uuid, lasts: Duration) -> Result<Claims, sqlx::Error> {
        let rows = sqlx::query(concat!(
            "with due as (
                 select id from timers
                 where id = any($1) and (status = 'pending' and due_at <= clock_timestamp()
                     or status = 'executing' and claim = $3)
                 order by id for update
             )
             update timers t
             set status = 'executing', owner = $2, attempt = attempt + (claim is distinct from $3)::int, claim = $3,
                 claimed_at = clock_timestamp(), claim_until = clock_timestamp() + make_interval(secs => $4),
                 updated_at = clock_timestamp()
             from due where t.id = due.id
             returning ",
            claimed_columns!()
        ))
        .bind(ids)
        .bind(owner)
        .bind(claim)
        .bind(lasts.as_secs_f64())
        .fetch_all(&self.pool);
        let claimed = self.readable(&bounded(rows).await?).await?;
        if claimed.len() == ids.len() {
            return Ok(Claims { claimed, early: Vec::new(), now: None });
        }
        let (now, early) = self.still_pending(ids).await?;
        Ok(Claims { claimed, early, now })
    }

    /// The rows that can be read. One that can't (of a newer version, perhaps) fails, and harms no other.
    async fn readable(&self, rows: &[PgRow]) -> Result<Vec<Claimed>, sqlx::Error> {
        let (mut claimed, mut broken) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in rows {
            match Claimed::from_row(row) {
                Ok(timer) => claimed.push(timer),
                Err(error) => {
                    let (id, claim): (Uuid, Uuid) = (row.try_get("id")?, row.try_get("claim")?);
                    tracing::error!(timer = %id, %error, "a timer can't be read and fails");
                    broken.push((id, claim));
                }
            }
        }
        if !broken.is_empty() {
            let failing = sqlx::query(
                "update timers t set status = 'failed', executed_at = clock_timestamp(), updated_at = clock_timestamp(),
                     last_error = 'the timer can not be read by this version of Tidemark'
                 from unnest($1::uuid[], $2::uuid[]) as broken (id, claim)
                 where t.id = broken.id and t.claim = broken.claim and status = 'executing'",
            )
            .bind(column(&broken, |(id, _)| *id))
            .bind(column(&broken, |(_, claim)| *claim))
            .execute(&self.pool);
            bounded(failing).await?;
        }
        Ok(claimed)
    }

    /// Claims that were left behind: whoever made them has had his time.
    pub async fn abandoned(&self, most: i64) -> Result<Vec<Claimed>, sqlx::Error> {
        let rows = sqlx::query(concat!(
            "select ",
            claimed_columns!(),
            " from timers t where status = 'executing' and claim_until < clock_timestamp() order by claim_until limit $1"
        ))
        .bind(most)
        .fetch_all(&self.pool);
        self.readable(&bounded(rows).await?).await
    }
}
