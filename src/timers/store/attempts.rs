//! The history of attempts.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::Row;
use uuid::Uuid;

use super::{Store, json, parsed, row::not_found, unavailable};
use crate::{
    api::{Name, timers::Attempt},
    error::Result,
};

impl Store {
    /// The newest attempts of a timer.
    pub async fn attempts(&self, tenant: &Name, id: Uuid, most: i64) -> Result<Vec<Attempt>> {
        let exists: Option<i32> = sqlx::query_scalar("select 1 from timers where tenant = $1 and id = $2")
            .bind(tenant.as_str())
            .bind(id)
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
        if exists.is_none() {
            return Err(not_found());
        }
        let rows = sqlx::query(
            "select run, attempt, started_at, ended_at, status, error, late_by_ms, response::text as response
             from timer_attempts where timer_id = $1 order by run desc, attempt desc limit $2",
        )
        .bind(id)
        .bind(most)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let attempt = |row: &sqlx::postgres::PgRow| {
            Ok(Attempt {
                run: row.try_get::<i32, _>("run")? as u32,
                attempt: row.try_get::<i32, _>("attempt")? as u32,
                started_at: row.try_get("started_at")?,
                ended_at: row.try_get("ended_at")?,
                status: parsed(row, "status")?,
                error: row.try_get("error")?,
                late_by_ms: row.try_get("late_by_ms")?,
                response: json(row, "response")?,
            })
        };
        rows.iter().map(attempt).collect::<Result<_, sqlx::Error>>().map_err(unavailable)
    }

    /// Forgets attempts that ended long ago, some at a time. The answer says how many.
    pub async fn forget_attempts(&self, older_than: Duration, most: i64) -> Result<u64, sqlx::Error> {
        let before = Utc::now() - older_than;
        let forgotten = sqlx::query(
            "delete from timer_attempts where ctid = any (array(
                 select ctid from timer_attempts where ended_at < $1 limit $2))",
        )
        .bind::<DateTime<Utc>>(before)
        .bind(most)
        .execute(&self.pool)
        .await?;
        Ok(forgotten.rows_affected())
    }
}
