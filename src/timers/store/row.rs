//! One timer, as it stands in its row.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};
use uuid::Uuid;

use super::{Entry, Store, json, parsed, unavailable};
use crate::{
    api::{
        Name,
        timers::{Callback, CapturedResponse, Id, Status, Timer, TimerSummary},
    },
    error::{Code, Error, Result},
    timers::{callback, plan::Options},
};

/// What [`TimerRow`] is read from.
macro_rules! columns {
    () => {
        "id, tenant, created_at, updated_at, execute_at, due_at, callback_config::text as callback, destination, \
         options::text as options, status, last_error, executed_at, late_by_ms, metadata::text as metadata, idempotency_key, body_hash, generation, \
         run, attempt, attempts_allowed, response::text as response"
    };
}
pub(super) use columns;

#[derive(Debug, Clone)]
pub struct TimerRow {
    pub id: Uuid,
    pub tenant: String,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    pub execute_at: DateTime<Utc>,
    pub due_at: DateTime<Utc>,
    pub callback: Callback,
    pub destination: Arc<str>,
    pub options: Options,
    pub status: Status,
    pub last_error: Option<String>,
    pub executed_at: Option<DateTime<Utc>>,
    pub late_by_ms: Option<i64>,
    pub metadata: Option<Value>,
    pub idempotency_key: Option<String>,
    pub body_hash: Option<Vec<u8>>,
    pub generation: i32,
    pub run: i32,
    pub attempt: i32,
    pub attempts_allowed: i32,
    pub response: Option<CapturedResponse>,
}

impl FromRow<'_, PgRow> for TimerRow {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            tenant: row.try_get("tenant")?,
            created_at: row.try_get("created_at")?,
            updated_at: row.try_get("updated_at")?,
            execute_at: row.try_get("execute_at")?,
            due_at: row.try_get("due_at")?,
            callback: json(row, "callback")?.ok_or_else(|| sqlx::Error::ColumnNotFound("callback".into()))?,
            destination: row.try_get::<&str, _>("destination")?.into(),
            options: json(row, "options")?.unwrap_or_default(),
            status: parsed(row, "status")?,
            last_error: row.try_get("last_error")?,
            executed_at: row.try_get("executed_at")?,
            late_by_ms: row.try_get("late_by_ms")?,
            metadata: json(row, "metadata")?,
            idempotency_key: row.try_get("idempotency_key")?,
            body_hash: row.try_get("body_hash")?,
            generation: row.try_get("generation")?,
            run: row.try_get("run")?,
            attempt: row.try_get("attempt")?,
            attempts_allowed: row.try_get("attempts_allowed")?,
            response: json(row, "response")?,
        })
    }
}

impl TimerRow {
    pub fn summary(&self) -> TimerSummary {
        TimerSummary {
            id: Id(self.id),
            created_at: self.created_at,
            updated_at: self.updated_at,
            execute_at: self.execute_at,
            callback_type: callback::kind(&self.callback),
            status: self.status,
            executed_at: self.executed_at,
            late_by_ms: self.late_by_ms,
            repeated: false,
        }
    }

    /// For a request that asks for the same again.
    pub fn repeated(&self) -> TimerSummary {
        TimerSummary { repeated: true, ..self.summary() }
    }

    /// How it waits for its time.
    pub fn entry(&self) -> Entry {
        Entry { due_at: self.due_at, id: self.id, destination: self.destination.clone() }
    }

    /// Everything, with or without what the callback's headers say.
    pub fn timer(self, with_secrets: bool) -> Timer {
        let waits = matches!(self.status, Status::Pending | Status::Paused);
        let recurs = self.options.recurrence.is_some();
        let next_run_at = match self.status {
            Status::Pending | Status::Paused if recurs && self.attempt == 0 => Some(self.execute_at),
            Status::Pending | Status::Executing => self.options.next_run(self.run, self.execute_at, self.execute_at),
            _ => None,
        };
        Timer {
            id: Id(self.id),
            created_at: self.created_at,
            updated_at: self.updated_at,
            execute_at: self.execute_at,
            callback_type: callback::kind(&self.callback),
            callback_config: if with_secrets { self.callback } else { callback::redacted(self.callback) },
            status: self.status,
            last_error: self.last_error,
            executed_at: self.executed_at,
            metadata: self.metadata,
            late_by_ms: self.late_by_ms,
            run: self.run as u32,
            attempts: self.attempt as u32,
            next_attempt_at: (waits && self.attempt > 0).then_some(self.due_at),
            next_run_at,
            timezone: self.options.timezone,
            retry: self.options.retry,
            recurrence: self.options.recurrence,
            on_late: self.options.on_late,
            max_lateness: self.options.max_lateness.map(|span| humantime::format_duration(span).to_string()),
            idempotency_key: self.idempotency_key,
            capture_response: self.options.capture_response,
            expect: self.options.expect,
            response: self.response,
        }
    }
}

impl Store {
    pub async fn get(&self, tenant: &Name, id: Uuid) -> Result<TimerRow> {
        let row = sqlx::query_as(concat!("select ", columns!(), " from timers where tenant = $1 and id = $2"))
            .bind(tenant.as_str())
            .bind(id)
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
        row.ok_or_else(not_found)
    }

    /// The timer that was set under an idempotency key before.
    pub async fn find_by_key(&self, tenant: &Name, key: &str) -> Result<Option<TimerRow>> {
        let row = sqlx::query_as(concat!(
            "select ",
            columns!(),
            " from timers where tenant = $1 and idempotency_key = $2 and idempotency_key is not null"
        ));
        row.bind(tenant.as_str()).bind(key).fetch_optional(&self.pool).await.map_err(unavailable)
    }
}

/// As the timer platform says it.
pub fn not_found() -> Error {
    Error::new(Code::NotFound, "timer not found")
}
