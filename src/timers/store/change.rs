//! Changes by callers. Each holds from the moment that it is committed: a claim that comes later sees it.

use sqlx::{Row, postgres::PgRow};
use uuid::Uuid;

use super::{Store, TimerRow, parsed, row::columns, unavailable};
use crate::{
    api::{Name, timers::Status},
    error::{Error, Result},
    timers::callback,
};

/// A change that needs no more than the timer's status.
#[derive(Debug, Clone, Copy)]
pub enum Transition {
    /// Its next attempt is now.
    Fire,
    /// A failed one is tried again.
    Retry,
    /// A recurring one is held, when the run under way is over if there is one.
    Pause,
}

impl Store {
    /// Makes a transition where it is possible. None if it is not.
    pub async fn transition(&self, tenant: &Name, id: Uuid, transition: Transition) -> Result<Option<TimerRow>> {
        let statement = match transition {
            Transition::Fire => concat!(
                "update timers set due_at = statement_timestamp(),
                     execute_at = case when attempt = 0 then statement_timestamp() else execute_at end,
                     claim = null, generation = generation + 1, updated_at = statement_timestamp()
                 where tenant = $1 and id = $2 and status = 'pending' returning ",
                columns!()
            ),
            Transition::Retry => concat!(
                "update timers set status = 'pending', due_at = statement_timestamp(), claim = null,
                     generation = generation + 1,
                     attempts_allowed = attempt + coalesce((options -> 'retry' ->> 'max_attempts')::int, 1),
                     updated_at = statement_timestamp()
                 where tenant = $1 and id = $2 and status = 'failed' returning ",
                columns!()
            ),
            Transition::Pause => concat!(
                "update timers
                 set status = case when status = 'executing' then status else 'paused' end,
                     after_run = case when status = 'executing' then 'paused' end, generation = generation + 1,
                     updated_at = statement_timestamp()
                 where tenant = $1 and id = $2 and options -> 'recurrence' is not null
                     and status in ('pending', 'executing') and after_run is null returning ",
                columns!()
            ),
        };
        let changed = sqlx::query_as(statement).bind(tenant.as_str()).bind(id).fetch_optional(&self.pool);
        changed.await.map_err(unavailable)
    }

    /// Cancels what has not begun to fire. A recurring timer that is firing ends with that run. The answers are the
    /// timers that were canceled, with their status.
    pub async fn cancel(&self, tenant: &Name, ids: &[Uuid]) -> Result<Vec<(Uuid, Status)>> {
        let rows = sqlx::query(
            "with wanted as (
                 select id from timers
                 where tenant = $1 and id = any($2) and (status in ('pending', 'paused')
                     or status = 'executing' and options -> 'recurrence' is not null)
                 order by id for update
             )
             update timers t
             set status = case when t.status = 'executing' then t.status else 'canceled' end,
                 after_run = case when t.status = 'executing' then 'canceled' end, generation = generation + 1,
                 updated_at = clock_timestamp()
             from wanted where t.id = wanted.id
             returning t.id, t.status",
        )
        .bind(tenant.as_str())
        .bind(ids)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        statuses(&rows)
    }

    pub async fn statuses(&self, tenant: &Name, ids: &[Uuid]) -> Result<Vec<(Uuid, Status)>> {
        let rows = sqlx::query("select id, status from timers where tenant = $1 and id = any($2)")
            .bind(tenant.as_str())
            .bind(ids)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        statuses(&rows)
    }

    /// Writes a changed timer over the one that was read, if nobody changed or claimed it meanwhile. Whoever has claimed it
    /// before and comes late with an outcome has no claim any more: what is written here has been answered.
    pub async fn replace(&self, row: &TimerRow, was: Status) -> Result<Option<TimerRow>> {
        let changed = sqlx::query_as(concat!(
            "update timers
             set execute_at = $4, due_at = $5, callback_type = $6, callback_config = $7::json, destination = $8,
                 options = $9::json, metadata = $10::jsonb, attempts_allowed = $11, status = $12, claim = null,
                 generation = generation + 1, updated_at = clock_timestamp()
             where tenant = $1 and id = $2 and generation = $3 and status = $13 and attempt = $14 and run = $15
             returning ",
            columns!()
        ))
        .bind(&row.tenant)
        .bind(row.id)
        .bind(row.generation)
        .bind(row.execute_at)
        .bind(row.due_at)
        .bind(callback::kind(&row.callback).as_str())
        .bind(serde_json::to_string(&row.callback).map_err(Error::internal)?)
        .bind(&*row.destination)
        .bind(row.options.encode()?)
        .bind(row.metadata.as_ref().map(serde_json::Value::to_string))
        .bind(row.attempts_allowed)
        .bind(row.status.as_str())
        .bind(was.as_str())
        .bind(row.attempt)
        .bind(row.run)
        .fetch_optional(&self.pool);
        changed.await.map_err(unavailable)
    }
}

fn statuses(rows: &[PgRow]) -> Result<Vec<(Uuid, Status)>> {
    let status = |row: &PgRow| Ok((row.try_get("id")?, parsed(row, "status")?));
    rows.iter().map(status).collect::<Result<_, sqlx::Error>>().map_err(unavailable)
}
