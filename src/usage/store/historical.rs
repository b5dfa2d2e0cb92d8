//! The historical database.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use sqlx::{FromRow, PgConnection, PgPool, postgres::PgPoolCopyExt};
use uuid::Uuid;

use super::{
    ledger::Place,
    moved::{Gone, Quiet},
    retention::ALONG_INDEXES,
};

/// What both databases have of a record.
macro_rules! copied {
    () => {
        "id, revision, tenant_id, source_id, user_id, resource_id, resource_type, usage_type, metric_kind, value, \
         event_timestamp, idempotency_key, status, backfill_operation_id, lineage, metadata, created_at, body_hash, \
         series, added_by"
    };
}

pub async fn identity(historical: &PgPool) -> Result<Uuid, sqlx::Error> {
    sqlx::query_scalar("select id from usage_identity").fetch_one(historical).await
}

/// A week that is here.
#[derive(Debug, Clone, FromRow)]
pub struct HistoricalWeek {
    pub name: String,
    pub greatest_event: Option<DateTime<Utc>>,
    /// The operational database has given it up.
    pub arrived: bool,
}

pub async fn weeks(historical: &PgPool) -> Result<Vec<HistoricalWeek>, sqlx::Error> {
    let weeks = sqlx::query_as("select name, greatest_event, arrived from usage_partitions order by starts_at");
    weeks.fetch_all(historical).await
}

pub async fn make_week(historical: &PgPool, week: &Quiet) -> Result<(), sqlx::Error> {
    let make = sqlx::query("select usage_make_week($1, $2, $3)");
    make.bind(&week.name).bind(week.starts_at).bind(week.ends_at).execute(historical).await.map(drop)
}

/// Empties a week for a copy, which nobody else makes until the transaction ends. False if it has arrived before.
pub async fn empty_week(connection: &mut PgConnection, name: &str) -> Result<bool, sqlx::Error> {
    let hold = sqlx::query("select from usage_partitions where name = $1 and not arrived for update");
    if hold.bind(name).fetch_optional(&mut *connection).await?.is_none() {
        return Ok(false);
    }
    // The name is the catalog's.
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("delete from \"{name}\""))).execute(connection).await?;
    Ok(true)
}

/// Copies a partition of the operational database. How many rows it has.
pub async fn copy_week(operational: &PgPool, connection: &mut PgConnection, week: &Quiet) -> Result<u64, sqlx::Error> {
    let name = &week.name;
    let from = format!(concat!("copy (select ", copied!(), " from \"{}\") to stdout"), name);
    let to = format!(concat!("copy \"{}\" (", copied!(), ") from stdin"), name);
    let mut rows = operational.copy_out_raw(&from).await?;
    let mut copy = connection.copy_in_raw(&to).await?;
    loop {
        match rows.try_next().await {
            Ok(Some(chunk)) => copy.send(chunk).await.map(drop)?,
            Ok(None) => break,
            Err(error) => {
                copy.abort("what was copied broke off").await.ok();
                return Err(error);
            }
        }
    }
    let copied = copy.finish().await?;
    let note = sqlx::query("update usage_partitions set greatest_event = $2 where name = $1");
    note.bind(name).bind(week.greatest_event).execute(connection).await?;
    Ok(copied)
}

/// Notes which weeks the operational database has given up, and which not: it may have been put back to before.
pub async fn mark_arrived(historical: &PgPool, starts: &[DateTime<Utc>]) -> Result<(), sqlx::Error> {
    let mark = sqlx::query(
        "update usage_partitions set arrived = starts_at = any($1) where arrived is distinct from (starts_at = any($1))",
    );
    mark.bind(starts).execute(historical).await.map(drop)
}

/// Drops the copy of a week that never arrived.
pub async fn discard_week(historical: &PgPool, name: &str) -> Result<(), sqlx::Error> {
    sqlx::query("select usage_discard_week($1)").bind(name).execute(historical).await.map(drop)
}

/// Drops a week. How many rows it had, unless somebody else did.
pub async fn drop_week(historical: &PgPool, name: &str) -> Result<Option<i64>, sqlx::Error> {
    sqlx::query_scalar("select usage_drop_week($1)").bind(name).fetch_one(historical).await
}

/// Deletes some of what is older, and notes it. How many rows went.
pub async fn delete_older(
    historical: &PgPool,
    tenant: &str,
    usage_type: &str,
    than: DateTime<Utc>,
    most: i64,
) -> Result<i64, sqlx::Error> {
    let mut transaction = historical.begin().await?;
    // What is noted is committed in order.
    sqlx::query("select pg_advisory_xact_lock(hashtext('usage gone'))").execute(&mut *transaction).await?;
    sqlx::raw_sql(ALONG_INDEXES).execute(&mut *transaction).await?;
    let gone = sqlx::query_scalar(
        "with old as (
             select id, revision from usage_records record
             where tenant_id = $1 and usage_type = $2 and event_timestamp < $3 and exists (
                 select from usage_partitions part where arrived
                     and usage_id_at(starts_at) <= record.id and record.id < usage_id_at(ends_at))
             order by event_timestamp limit $4
         ), gone as (
             delete from usage_records record using old where record.id = old.id and record.revision = old.revision
             returning record.id, record.source_id
         ), noted as (
             insert into usage_gone (tenant_id, source_id, usage_type, records, ids)
             select $1, source_id, $2, count(*), array_agg(id) from gone group by source_id
         )
         select count(*) from gone",
    )
    .bind(tenant)
    .bind(usage_type)
    .bind(than)
    .bind(most)
    .fetch_one(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(gone)
}

/// What is noted as gone after a position, in order.
pub async fn gone(historical: &PgPool, after: i64, most: i64) -> Result<Vec<Gone>, sqlx::Error> {
    sqlx::query_as(
        "select position, tenant_id, source_id, usage_type, records, ids, week from usage_gone where position > $1
         order by position limit $2",
    )
    .bind(after)
    .bind(most)
    .fetch_all(historical)
    .await
}

pub async fn forget_gone(historical: &PgPool, up_to: i64) -> Result<(), sqlx::Error> {
    sqlx::query("delete from usage_gone where position <= $1").bind(up_to).execute(historical).await.map(drop)
}

/// A tenant's type from one time to another.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    pub tenant: &'a str,
    pub usage_type: &'a str,
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
}

/// A row, whole.
#[derive(Debug, FromRow)]
pub struct Frozen {
    pub event_timestamp: DateTime<Utc>,
    pub id: Uuid,
    pub revision: i32,
    pub json: String,
}

impl Frozen {
    pub fn place(&self) -> Place {
        Place { event_timestamp: self.event_timestamp, id: self.id, revision: self.revision }
    }
}

/// Up to so many rows of a span after one of them.
pub async fn rows_of_span(
    connection: &mut PgConnection,
    span: &Span<'_>,
    after: Place,
    most: i64,
) -> Result<Vec<Frozen>, sqlx::Error> {
    sqlx::query_as(
        "select event_timestamp, id, revision, to_jsonb(record)::text as json from usage_records record
         where tenant_id = $1 and usage_type = $2 and event_timestamp >= $3 and event_timestamp < $4
             and (event_timestamp, id, revision) > ($3, $5, $6)
         order by event_timestamp, id, revision limit $7",
    )
    .bind(span.tenant)
    .bind(span.usage_type)
    .bind(after.event_timestamp)
    .bind(span.to)
    .bind(after.id)
    .bind(after.revision)
    .bind(most)
    .fetch_all(connection)
    .await
}

/// All revisions of a tenant's record.
pub async fn rows_of_record(connection: &mut PgConnection, tenant: &str, id: Uuid) -> Result<Vec<Frozen>, sqlx::Error> {
    sqlx::query_as(
        "select event_timestamp, id, revision, to_jsonb(record)::text as json from usage_records record
         where id = $1 and tenant_id = $2",
    )
    .bind(id)
    .bind(tenant)
    .fetch_all(connection)
    .await
}

/// The readings of a counter at one moment.
pub async fn rows_of_moment(
    connection: &mut PgConnection,
    series: Uuid,
    at: DateTime<Utc>,
) -> Result<Vec<Frozen>, sqlx::Error> {
    sqlx::query_as(
        "select event_timestamp, id, revision, to_jsonb(record)::text as json from usage_records record
         where series = $1 and event_timestamp = $2",
    )
    .bind(series)
    .bind(at)
    .fetch_all(connection)
    .await
}

/// The readings of counters right before and right after a time.
pub async fn rows_beside(
    connection: &mut PgConnection,
    series: &[Uuid],
    from: DateTime<Utc>,
    to: DateTime<Utc>,
) -> Result<Vec<Frozen>, sqlx::Error> {
    sqlx::query_as(
        "select record.event_timestamp, record.id, record.revision, to_jsonb(record)::text as json
         from unnest($1::uuid[]) as wanted (series) cross join lateral (
             (select * from usage_records record where record.series = wanted.series and status = 'active'
                  and event_timestamp < $2 order by event_timestamp desc, value desc limit 1)
             union all
             (select * from usage_records record where record.series = wanted.series and status = 'active'
                  and event_timestamp >= $3 order by event_timestamp, value limit 1)
         ) as record",
    )
    .bind(series)
    .bind(from)
    .bind(to)
    .fetch_all(connection)
    .await
}

/// The earliest event of each source.
pub async fn earliest(
    historical: &PgPool,
    tenant: &str,
    usage_type: &str,
    sources: &[String],
) -> Result<HashMap<String, DateTime<Utc>>, sqlx::Error> {
    let rows: Vec<(String, DateTime<Utc>)> = sqlx::query_as(
        "select source, event_timestamp from unnest($3::text[]) as source cross join lateral (
             select event_timestamp from usage_records
             where tenant_id = $1 and usage_type = $2 and source_id = source order by event_timestamp limit 1
         ) as first",
    )
    .bind(tenant)
    .bind(usage_type)
    .bind(sources)
    .fetch_all(historical)
    .await?;
    Ok(rows.into_iter().collect())
}
