//! Ranges that somebody works on: a tenant, a type, and event times.
//!
//! Whoever writes records holds the ranges as they are, together with all others who do, until he has committed. Whoever
//! begins or ends work on a range waits for them, for an instant, and they for him. So nobody writes by what was true before.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use super::historical::Span;

/// Among the database's advisory locks.
pub const RANGES: i64 = 0x7469_6465_7261_6e67;

#[derive(Debug, Clone, PartialEq, FromRow)]
pub struct BusyRange {
    pub operation_id: Uuid,
    pub tenant_id: String,
    pub usage_type: String,
    pub range_start: DateTime<Utc>,
    pub range_end: DateTime<Utc>,
    /// Whether live records wait.
    pub blocking: bool,
    pub phase: String,
    pub done: i64,
    pub total: i64,
    pub lease_until: DateTime<Utc>,
    pub begun_at: DateTime<Utc>,
}

impl BusyRange {
    pub fn covers(&self, tenant: &str, usage_type: &str, at: DateTime<Utc>) -> bool {
        self.tenant_id == tenant && self.usage_type == usage_type && self.range_start <= at && at < self.range_end
    }
}

/// Keeps the ranges as they are until the transaction ends.
pub async fn hold_ranges(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("select pg_advisory_xact_lock_shared($1)").bind(RANGES).execute(connection).await.map(drop)
}

/// Waits until nobody writes by the ranges as they are, and keeps others from it until the transaction ends. Not for long:
/// behind us all writers wait.
pub async fn change_ranges(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("set local lock_timeout = '1s'").execute(&mut *connection).await?;
    sqlx::query("select pg_advisory_xact_lock($1)").bind(RANGES).execute(&mut *connection).await?;
    sqlx::raw_sql("set local lock_timeout = default").execute(connection).await.map(drop)
}

pub async fn busy_ranges(connection: &mut PgConnection) -> Result<Vec<BusyRange>, sqlx::Error> {
    sqlx::query_as("select * from backfill_ranges order by operation_id").fetch_all(connection).await
}

/// What a range is called that is not worked on yet.
pub struct NewRange<'a> {
    pub operation_id: Uuid,
    pub span: Span<'a>,
    pub blocking: bool,
    pub phase: &'a str,
}

/// The one that is in the way of work on this, if there is one.
pub async fn in_the_way(connection: &mut PgConnection, span: &Span<'_>) -> Result<Option<BusyRange>, sqlx::Error> {
    sqlx::query_as(
        "select * from backfill_ranges where tenant_id = $1 and usage_type = $2 and range_start < $4 and range_end > $3
         limit 1",
    )
    .bind(span.tenant)
    .bind(span.usage_type)
    .bind(span.from)
    .bind(span.to)
    .fetch_optional(connection)
    .await
}

/// Begins work on a range. The one that is in the way, if there is one.
pub async fn begin_range(
    connection: &mut PgConnection,
    range: &NewRange<'_>,
    lease: Duration,
) -> Result<Option<BusyRange>, sqlx::Error> {
    let overlap = in_the_way(connection, &range.span).await?;
    if overlap.is_some() {
        return Ok(overlap);
    }
    sqlx::query(
        "insert into backfill_ranges
             (operation_id, tenant_id, usage_type, range_start, range_end, blocking, phase, lease_until)
         values ($1, $2, $3, $4, $5, $6, $7, clock_timestamp() + make_interval(secs => $8))",
    )
    .bind(range.operation_id)
    .bind(range.span.tenant)
    .bind(range.span.usage_type)
    .bind(range.span.from)
    .bind(range.span.to)
    .bind(range.blocking)
    .bind(range.phase)
    .bind(lease.as_secs_f64())
    .execute(connection)
    .await?;
    Ok(None)
}

/// Renews the lease, and counts the records that were received with it. False if it is over.
pub async fn renew_range(
    connection: &mut PgConnection,
    id: Uuid,
    lease: Duration,
    received: i64,
) -> Result<bool, sqlx::Error> {
    let renew = sqlx::query(
        "update backfill_ranges
         set lease_until = clock_timestamp() + make_interval(secs => $2), done = done + $3, total = total + $3
         where operation_id = $1",
    );
    Ok(renew.bind(id).bind(lease.as_secs_f64()).bind(received).execute(connection).await?.rows_affected() == 1)
}

/// Keeps the range for the rest of the transaction. False if the lease is over.
pub async fn keep_range(connection: &mut PgConnection, id: Uuid) -> Result<bool, sqlx::Error> {
    let keep = sqlx::query("select from backfill_ranges where operation_id = $1 for update");
    Ok(keep.bind(id).fetch_optional(connection).await?.is_some())
}

/// Tells how far the work is.
pub async fn show_progress(
    connection: &mut PgConnection,
    id: Uuid,
    phase: &str,
    done: i64,
    total: i64,
) -> Result<(), sqlx::Error> {
    let show = sqlx::query("update backfill_ranges set phase = $2, done = $3, total = $4 where operation_id = $1");
    show.bind(id).bind(phase).bind(done).bind(total).execute(connection).await.map(drop)
}

/// Ends work on a range. Ranges must be held for the change.
pub async fn end_range(connection: &mut PgConnection, id: Uuid) -> Result<(), sqlx::Error> {
    let end = sqlx::query("delete from backfill_ranges where operation_id = $1");
    end.bind(id).execute(connection).await.map(drop)
}

/// Work whose lease is over, or that keeps live records waiting for longer than anybody may.
macro_rules! abandoned {
    () => {
        "(lease_until < clock_timestamp()
             or blocking and phase = 'receiving' and begun_at < clock_timestamp() - interval '1 hour')"
    };
}

pub async fn abandoned(connection: &mut PgConnection) -> Result<Vec<Uuid>, sqlx::Error> {
    let abandoned = sqlx::query_scalar(concat!("select operation_id from backfill_ranges where ", abandoned!()));
    abandoned.fetch_all(connection).await
}

/// Whether that is still so, for the rest of the transaction.
pub async fn is_abandoned(connection: &mut PgConnection, id: Uuid) -> Result<bool, sqlx::Error> {
    let abandoned =
        sqlx::query(concat!("select from backfill_ranges where operation_id = $1 and ", abandoned!(), " for update"));
    Ok(abandoned.bind(id).fetch_optional(connection).await?.is_some())
}

/// How many ranges of a tenant are worked on.
pub async fn ranges_of(connection: &mut PgConnection, tenant: &str) -> Result<i64, sqlx::Error> {
    let ranges = sqlx::query_scalar("select count(*) from backfill_ranges where tenant_id = $1");
    ranges.bind(tenant).fetch_one(connection).await
}
