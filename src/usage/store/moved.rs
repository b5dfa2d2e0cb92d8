//! What the operational database knows of the historical one: the weeks that are there, and what came back.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgConnection, PgPool};
use uuid::Uuid;

use super::column;
use crate::usage::identity::time_of;

/// A week whose records moved, by the time in their ids.
#[derive(Debug, Clone, PartialEq, FromRow)]
pub struct Week {
    pub starts_at: DateTime<Utc>,
    pub ends_at: DateTime<Utc>,
    pub least_event: DateTime<Utc>,
    pub greatest_event: DateTime<Utc>,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Moved(Vec<Week>);

impl Moved {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn starts(&self) -> Vec<DateTime<Utc>> {
        column(&self.0, |week| week.starts_at)
    }

    /// Whether the record may be there.
    pub fn may_have(&self, id: Uuid) -> bool {
        let at = time_of(id);
        self.0.iter().any(|week| week.starts_at <= at && at < week.ends_at)
    }

    /// Whether something that is there was used between these.
    pub fn overlaps(&self, from: Option<DateTime<Utc>>, to: Option<DateTime<Utc>>) -> bool {
        let overlaps = |week: &Week| {
            from.is_none_or(|from| from <= week.greatest_event) && to.is_none_or(|to| week.least_event <= to)
        };
        self.0.iter().any(overlaps)
    }
}

/// The weeks that moved, now. Whoever has looked for a record here before will find it here or there.
pub async fn moved(connection: &mut PgConnection) -> Result<Moved, sqlx::Error> {
    let weeks = sqlx::query_as("select starts_at, ends_at, least_event, greatest_event from usage_moved");
    weeks.fetch_all(connection).await.map(Moved)
}

/// The weeks that moved, and no other does until the transaction ends.
pub async fn hold_moved(connection: &mut PgConnection) -> Result<Moved, sqlx::Error> {
    sqlx::raw_sql("lock table only usage_records in access share mode").execute(&mut *connection).await?;
    moved(connection).await
}

/// Those of the records that are here too, whatever has become of them.
pub async fn present(
    connection: &mut PgConnection,
    records: impl Iterator<Item = (Uuid, i32)>,
) -> Result<HashSet<(Uuid, i32)>, sqlx::Error> {
    let (ids, revisions): (Vec<Uuid>, Vec<i32>) = records.unzip();
    let present: Vec<(Uuid, i32)> = sqlx::query_as(
        "select found.* from unnest($1::uuid[], $2::integer[]) as wanted (id, revision) cross join lateral (
             select id, revision from usage_records record
             where record.id = wanted.id and record.revision = wanted.revision
         ) as found",
    )
    .bind(ids)
    .bind(revisions)
    .fetch_all(connection)
    .await?;
    Ok(present.into_iter().collect())
}

/// Brings rows back as JSON, unless they are here: what is here is right.
pub async fn thaw(connection: &mut PgConnection, rows: &[String]) -> Result<(), sqlx::Error> {
    if rows.is_empty() {
        return Ok(());
    }
    let thaw = sqlx::query(
        "insert into usage_records
         select row.* from unnest($1::text[]) as frozen cross join lateral
             jsonb_populate_record(null::usage_records, frozen::jsonb || '{\"thawed\": true}') as row
         on conflict (id, revision) do nothing",
    );
    thaw.bind(rows).execute(connection).await.map(drop)
}

/// The counter that a record is a reading of, and when it was read.
pub async fn reading(
    connection: &mut PgConnection,
    tenant: &str,
    id: Uuid,
) -> Result<Option<(Uuid, DateTime<Utc>)>, sqlx::Error> {
    let reading = sqlx::query_as(
        "select series, event_timestamp from usage_records
         where id = $1 and tenant_id = $2 and series is not null limit 1",
    );
    reading.bind(id).bind(tenant).fetch_optional(connection).await
}

/// Whoever brings back records of a tenant for single corrections does it one after the other.
pub async fn hold_thaw(connection: &mut PgConnection, tenant: &str) -> Result<(), sqlx::Error> {
    let hold = sqlx::query("select pg_advisory_xact_lock(hashtextextended('usage thaw ' || $1, 0))");
    hold.bind(tenant).execute(connection).await.map(drop)
}

/// Readings that are about to be changed are no floors. True if there were some.
pub async fn drop_floors(
    connection: &mut PgConnection,
    series: &[Uuid],
    from: DateTime<Utc>,
    to: DateTime<Utc>,
) -> Result<bool, sqlx::Error> {
    let drop_floors = sqlx::query(
        "delete from usage_floors where series = any($1) and event_timestamp >= $2 and event_timestamp < $3",
    );
    Ok(drop_floors.bind(series).bind(from).bind(to).execute(connection).await?.rows_affected() > 0)
}

/// Notes that a record's partition was written, so that it does not move just now.
pub async fn note_written(connection: &mut PgConnection, id: Uuid) -> Result<(), sqlx::Error> {
    let note = sqlx::query(
        "update usage_partitions set last_written = clock_timestamp()
         where starts_at <= $1 and $1 < ends_at and last_written < clock_timestamp() - interval '1 hour'",
    );
    note.bind(time_of(id)).execute(connection).await.map(drop)
}

/// A partition that may move.
#[derive(Debug, Clone, FromRow)]
pub struct Quiet {
    pub name: String,
    pub starts_at: DateTime<Utc>,
    pub ends_at: DateTime<Utc>,
    pub greatest_event: DateTime<Utc>,
}

/// Partitions that have something, and nothing newer than this.
pub async fn quiet_partitions(database: &PgPool, older_than: DateTime<Utc>) -> Result<Vec<Quiet>, sqlx::Error> {
    sqlx::query_as(
        "select name, starts_at, ends_at, greatest_event from usage_partitions
         where not dropped and starts_at > '-infinity' and ends_at < $1 and greatest_event < $1 and last_written < $1
             and coalesce(last_deleted < $1, true)
         order by starts_at",
    )
    .bind(older_than)
    .fetch_all(database)
    .await
}

/// Whether it is still a partition.
pub async fn is_partition(database: &PgPool, name: &str) -> Result<bool, sqlx::Error> {
    let known = sqlx::query_scalar("select exists (select from usage_partitions where name = $1)");
    known.bind(name).fetch_one(database).await
}

/// Keeps in mind the latest readings of a partition that moves.
pub async fn raise_floors(database: &PgPool, name: &str) -> Result<(), sqlx::Error> {
    let raise = format!(
        "insert into usage_floors as known (series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value)
         select distinct on (series) series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value
         from \"{name}\" where series is not null and status = 'active' order by series, event_timestamp desc, value desc
         on conflict (series) do update set event_timestamp = excluded.event_timestamp, value = excluded.value
             where (excluded.event_timestamp, excluded.value) > (known.event_timestamp, known.value)"
    );
    // The name is the catalog's.
    sqlx::raw_sql(sqlx::AssertSqlSafe(raise)).execute(database).await.map(drop)
}

/// Which historical database belongs to this one. As long as nothing has moved it may be another.
pub async fn bind_historical(database: &PgPool, id: Uuid) -> Result<Uuid, sqlx::Error> {
    sqlx::query(
        "insert into usage_historical (database_id) values ($1)
         on conflict (only_one) do update set database_id = excluded.database_id, settled = 0
             where usage_historical.database_id <> excluded.database_id and not exists (select from usage_moved)",
    )
    .bind(id)
    .execute(database)
    .await?;
    sqlx::query_scalar("select database_id from usage_historical").fetch_one(database).await
}

/// Something that retention let go in the historical database.
#[derive(Debug, FromRow)]
pub struct Gone {
    pub position: i64,
    pub tenant_id: String,
    pub source_id: String,
    pub usage_type: String,
    pub records: i64,
    pub ids: Option<Vec<Uuid>>,
    pub week: Option<DateTime<Utc>>,
}

/// Up to where that is taken off the tallies.
pub async fn settled(database: &PgPool) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar("select settled from usage_historical").fetch_one(database).await
}

/// Takes it off the tallies, once: whoever comes second finds it done.
pub async fn settle(database: &PgPool, after: i64, gone: &[Gone]) -> Result<(), sqlx::Error> {
    let Some(last) = gone.last() else { return Ok(()) };
    let mut transaction = database.begin().await?;
    let first = sqlx::query("update usage_historical set settled = $2 where settled = $1");
    if first.bind(after).bind(last.position).execute(&mut *transaction).await?.rows_affected() == 0 {
        return Ok(());
    }
    let ids: Vec<Uuid> = gone.iter().filter_map(|one| one.ids.as_ref()).flatten().copied().collect();
    let forget = sqlx::query("delete from usage_changes where id = any($1)");
    forget.bind(ids).execute(&mut *transaction).await?;
    let weeks: Vec<DateTime<Utc>> = gone.iter().filter_map(|one| one.week).collect();
    sqlx::query(
        "with gone as (delete from usage_moved where starts_at = any($1) returning starts_at, ends_at)
         delete from usage_changes using gone where id >= usage_id_at(starts_at) and id < usage_id_at(ends_at)",
    )
    .bind(weeks)
    .execute(&mut *transaction)
    .await?;
    // In the same order as everyone.
    sqlx::query(
        "select from usage_tallies where (tenant_id, source_id, usage_type) in (select * from unnest($1::text[], $2::text[],
             $3::text[])) order by tenant_id collate \"C\", source_id collate \"C\", usage_type collate \"C\" for update",
    )
    .bind(column(gone, |one| one.tenant_id.as_str()))
    .bind(column(gone, |one| one.source_id.as_str()))
    .bind(column(gone, |one| one.usage_type.as_str()))
    .execute(&mut *transaction)
    .await?;
    sqlx::query(
        "update usage_tallies tally set records = tally.records - gone.records from (
             select tenant, source, usage_type, sum(records)::bigint as records
             from unnest($1::text[], $2::text[], $3::text[], $4::bigint[]) as gone (tenant, source, usage_type, records)
             group by 1, 2, 3
         ) as gone where tally.tenant_id = tenant and tally.source_id = source and tally.usage_type = gone.usage_type",
    )
    .bind(column(gone, |one| one.tenant_id.as_str()))
    .bind(column(gone, |one| one.source_id.as_str()))
    .bind(column(gone, |one| one.usage_type.as_str()))
    .bind(column(gone, |one| one.records))
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await
}
