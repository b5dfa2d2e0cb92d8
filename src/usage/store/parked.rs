//! Published records that wait until their range is open again.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use super::column;
use crate::usage::{identity::Origin, record::Record};

/// A record that is to wait.
pub struct NewParked<'a> {
    pub origin: Origin<'a>,
    pub record: &'a Record,
    /// When the stream had it.
    pub arrived_at: DateTime<Utc>,
    /// When it came first.
    pub came_at: DateTime<Utc>,
    pub user: Option<&'a str>,
    /// None for gauges, which need no order.
    pub series: Option<Uuid>,
    pub replay_of: Option<Uuid>,
    pub payload: &'a [u8],
}

pub async fn park(connection: &mut PgConnection, shard: i32, records: &[NewParked<'_>]) -> Result<(), sqlx::Error> {
    if records.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "insert into usage_parked
             (shard, tenant_id, source_id, arrived_at, came_at, user_id, usage_type, event_timestamp, series, replay_of,
              payload)
         select $1, tenant, source, arrived_at, came_at, user_id, usage_type, at, series, replay_of, payload
         from unnest($2::text[], $3::text[], $4::timestamptz[], $5::timestamptz[], $6::text[], $7::text[],
             $8::timestamptz[], $9::uuid[], $10::uuid[], $11::bytea[])
             with ordinality as new (tenant, source, arrived_at, came_at, user_id, usage_type, at, series, replay_of,
                 payload, nth)
         order by nth",
    )
    .bind(shard)
    .bind(column(records, |one| one.origin.tenant))
    .bind(column(records, |one| one.origin.source))
    .bind(column(records, |one| one.arrived_at))
    .bind(column(records, |one| one.came_at))
    .bind(column(records, |one| one.user))
    .bind(column(records, |one| one.record.usage_type.as_str()))
    .bind(column(records, |one| one.record.event_timestamp))
    .bind(column(records, |one| one.series))
    .bind(column(records, |one| one.replay_of))
    .bind(column(records, |one| one.payload))
    .execute(connection)
    .await
    .map(drop)
}

/// Whether something waits in this shard, and which counters must wait behind it.
#[derive(Debug, Default)]
pub struct Waiters {
    pub any: bool,
    pub series: HashSet<Uuid>,
}

pub async fn waiters(connection: &mut PgConnection, shard: i32) -> Result<Waiters, sqlx::Error> {
    let waiting: Vec<Option<Uuid>> = sqlx::query_scalar("select distinct series from usage_parked where shard = $1")
        .bind(shard)
        .fetch_all(connection)
        .await?;
    Ok(Waiters { any: !waiting.is_empty(), series: waiting.into_iter().flatten().collect() })
}

/// A record that has waited long enough.
#[derive(Debug, FromRow)]
pub struct Released {
    pub position: i64,
    pub tenant_id: String,
    pub source_id: String,
    pub arrived_at: DateTime<Utc>,
    pub came_at: DateTime<Utc>,
    pub user_id: Option<String>,
    pub replay_of: Option<Uuid>,
    pub payload: Vec<u8>,
}

/// Those whose range is open, in the order in which they came. None overtakes another of its counter.
pub async fn released(connection: &mut PgConnection, shard: i32, most: i64) -> Result<Vec<Released>, sqlx::Error> {
    sqlx::query_as(
        "with closed as materialized (
             select parked.position, parked.series from usage_parked parked join backfill_ranges range on range.blocking
                 and range.tenant_id = parked.tenant_id and range.usage_type = parked.usage_type
                 and parked.event_timestamp >= range.range_start and parked.event_timestamp < range.range_end
             where parked.shard = $1
         ), first as materialized (
             select series, min(position) as position from closed where series is not null group by series
         )
         select position, tenant_id, source_id, arrived_at, came_at, user_id, replay_of, payload from usage_parked parked
         where shard = $1 and not exists (select from closed where closed.position = parked.position)
             and not exists (select from first where first.series = parked.series and first.position < parked.position)
         order by position limit $2",
    )
    .bind(shard)
    .bind(most)
    .fetch_all(connection)
    .await
}

pub async fn unpark(connection: &mut PgConnection, positions: &[i64]) -> Result<(), sqlx::Error> {
    if positions.is_empty() {
        return Ok(());
    }
    let unpark = sqlx::query("delete from usage_parked where position = any($1)");
    unpark.bind(positions).execute(connection).await.map(drop)
}
