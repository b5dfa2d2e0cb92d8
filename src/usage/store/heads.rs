//! The latest reading of each counter.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use rust_decimal::Decimal;
use sqlx::PgConnection;
use uuid::Uuid;

use super::column;
use crate::usage::{identity::Origin, record::Record};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Head {
    pub event_timestamp: DateTime<Utc>,
    pub value: Decimal,
}

/// The heads of these series, held until the end of the transaction. In the same order by everyone.
pub async fn heads(connection: &mut PgConnection, series: &[Uuid]) -> Result<HashMap<Uuid, Head>, sqlx::Error> {
    if series.is_empty() {
        return Ok(HashMap::new());
    }
    let rows: Vec<(Uuid, DateTime<Utc>, Decimal)> = sqlx::query_as(
        "select series, event_timestamp, value from counter_heads where series = any($1) order by series for update",
    )
    .bind(series)
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|(series, event_timestamp, value)| (series, Head { event_timestamp, value })).collect())
}

/// Moves heads, or makes them. Each comes with one of its readings. Those that were made.
pub async fn move_heads(
    connection: &mut PgConnection,
    heads: &[(Origin<'_>, &Record, Head)],
) -> Result<HashSet<Uuid>, sqlx::Error> {
    if heads.is_empty() {
        return Ok(HashSet::new());
    }
    let moved: Vec<(Uuid, bool)> = sqlx::query_as(
        "insert into counter_heads (series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value)
         select * from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[], $7::numeric[])
         on conflict (series) do update set event_timestamp = excluded.event_timestamp, value = excluded.value
             where (excluded.event_timestamp, excluded.value) > (counter_heads.event_timestamp, counter_heads.value)
         returning series, xmax = 0",
    )
    .bind(column(heads, |(_, record, _)| record.series))
    .bind(column(heads, |(origin, ..)| origin.tenant))
    .bind(column(heads, |(origin, ..)| origin.source))
    .bind(column(heads, |(_, record, _)| record.usage_type.as_str()))
    .bind(column(heads, |(_, record, _)| record.resource_id.as_str()))
    .bind(column(heads, |(.., head)| head.event_timestamp))
    .bind(column(heads, |(.., head)| head.value))
    .fetch_all(connection)
    .await?;
    Ok(moved.into_iter().filter_map(|(series, made)| made.then_some(series)).collect())
}

/// Sets heads to what the ledger has, after a change of readings that were there. They must be held.
pub async fn mend_heads(connection: &mut PgConnection, series: &[Uuid]) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into counter_heads (series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value)
         select latest.* from unnest($1::uuid[]) as changed (series)
             cross join lateral usage_reading_before(changed.series, 'infinity') as latest order by latest.series
         on conflict (series) do update set event_timestamp = excluded.event_timestamp, value = excluded.value",
    )
    .bind(series)
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "delete from counter_heads head using unnest($1::uuid[]) as changed (series) where head.series = changed.series
         and not exists (
             select from usage_reading_before(changed.series, 'infinity'))",
    )
    .bind(series)
    .execute(connection)
    .await
    .map(drop)
}
