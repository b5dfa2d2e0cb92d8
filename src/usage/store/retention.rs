//! Policies of how long usage is kept, and the end of what is not.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgConnection, PgPool};
use uuid::Uuid;

use super::column;

#[derive(Debug, Clone, FromRow)]
pub struct Policy {
    pub tenant_id: String,
    pub usage_type: String,
    pub days: i32,
    pub updated_at: DateTime<Utc>,
}

pub async fn policies(database: &PgPool) -> Result<Vec<Policy>, sqlx::Error> {
    sqlx::query_as("select tenant_id, usage_type, days, updated_at from usage_retention").fetch_all(database).await
}

pub async fn set_policy(database: &PgPool, tenant: &str, usage_type: &str, days: i32) -> Result<(), sqlx::Error> {
    let set = sqlx::query(
        "insert into usage_retention (tenant_id, usage_type, days) values ($1, $2, $3)
         on conflict (tenant_id, usage_type) do update set days = excluded.days, updated_at = now()",
    );
    set.bind(tenant).bind(usage_type).bind(days).execute(database).await.map(drop)
}

/// Tenants and types that the ledger has something of.
pub async fn tenants_and_types(database: &PgPool) -> Result<Vec<(String, String)>, sqlx::Error> {
    let all = sqlx::query_as("select distinct tenant_id, usage_type from usage_tallies order by 1, 2");
    all.fetch_all(database).await
}

/// What was accepted, by the week that its ids are of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extent {
    /// A moment of that week.
    pub at: DateTime<Utc>,
    pub least: DateTime<Utc>,
    pub greatest: DateTime<Utc>,
    pub written: DateTime<Utc>,
}

/// Widens the catalog. True if every one of them is of a partition that it knows.
pub async fn widen_partitions(connection: &mut PgConnection, extents: &[Extent]) -> Result<bool, sqlx::Error> {
    let widened = sqlx::query(
        "update usage_partitions part set least_event = least(least_event, new.least),
             greatest_event = greatest(greatest_event, new.greatest),
             last_written = greatest(last_written, new.written)
         from unnest($1::timestamptz[], $2::timestamptz[], $3::timestamptz[], $4::timestamptz[])
             as new (at, least, greatest, written)
         where part.starts_at <= new.at and new.at < part.ends_at",
    )
    .bind(column(extents, |one| one.at))
    .bind(column(extents, |one| one.least))
    .bind(column(extents, |one| one.greatest))
    .bind(column(extents, |one| one.written))
    .execute(connection)
    .await?;
    Ok(widened.rows_affected() as usize == extents.len())
}

/// A dated partition.
#[derive(Debug, Clone, FromRow)]
pub struct Partition {
    pub name: String,
    pub greatest_event: Option<DateTime<Utc>>,
}

/// Partitions with nothing newer than this.
pub async fn old_partitions(database: &PgPool, older_than: DateTime<Utc>) -> Result<Vec<Partition>, sqlx::Error> {
    sqlx::query_as(
        "select name, greatest_event from usage_partitions
         where not dropped and starts_at > '-infinity' and ends_at < $1
             and coalesce(greatest_event < $1 and last_written < $1, true)
         order by starts_at",
    )
    .bind(older_than)
    .fetch_all(database)
    .await
}

/// Counts what is older, up to a limit.
pub async fn count_older(
    database: &PgPool,
    tenant: &str,
    usage_type: &str,
    than: DateTime<Utc>,
    most: i64,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "select count(*) from (
             select from usage_records where tenant_id = $1 and usage_type = $2 and event_timestamp < $3 limit $4
         ) as older",
    )
    .bind(tenant)
    .bind(usage_type)
    .bind(than)
    .bind(most)
    .fetch_one(database)
    .await
}

/// Whether nobody else applies retention, as long as this connection lasts.
pub async fn take_turn(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let take = sqlx::query_scalar("select pg_try_advisory_lock(hashtextextended('usage retention', 0))");
    take.fetch_one(connection).await
}

#[derive(FromRow)]
struct Deleted {
    id: Uuid,
    source_id: String,
    thawed: bool,
    partition: String,
}

/// A few rows out of many: the planner should not think that it is worth reading them all.
pub const ALONG_INDEXES: &str =
    "set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_seqscan = off";

/// Deletes some of what is older, and returns how many went. Those that came back from the historical database only if they
/// are gone from there.
pub async fn delete_older(
    database: &PgPool,
    tenant: &str,
    usage_type: &str,
    than: DateTime<Utc>,
    with_thawed: bool,
    most: i64,
) -> Result<i64, sqlx::Error> {
    let mut transaction = database.begin().await?;
    sqlx::raw_sql(ALONG_INDEXES).execute(&mut *transaction).await?;
    let gone: Vec<Deleted> = sqlx::query_as(
        "with old as (
             select id, revision from usage_records
             where tenant_id = $1 and usage_type = $2 and event_timestamp < $3 and ($5 or not thawed)
             order by event_timestamp limit $4
         )
         delete from usage_records record using old where record.id = old.id and record.revision = old.revision
         returning record.id, record.source_id, record.thawed, record.tableoid::regclass::text as partition",
    )
    .bind(tenant)
    .bind(usage_type)
    .bind(than)
    .bind(most)
    .bind(with_thawed)
    .fetch_all(&mut *transaction)
    .await?;
    let forget = sqlx::query("delete from usage_changes where id = any($1)");
    forget.bind(column(&gone, |one| one.id)).execute(&mut *transaction).await?;
    // One that loses records does not move just now.
    let note = sqlx::query("update usage_partitions set last_deleted = clock_timestamp() where name = any($1)");
    let partitions: HashSet<&str> = gone.iter().map(|one| one.partition.as_str()).collect();
    note.bind(column(partitions, str::to_owned)).execute(&mut *transaction).await?;
    // What moved is counted where it went.
    let counted = gone.iter().filter(|one| !one.thawed).map(|one| one.source_id.as_str());
    sqlx::query(
        "update usage_tallies tally set records = tally.records - gone.records
         from (select source, count(*) as records from unnest($3::text[]) as source group by source order by source) as gone
         where tenant_id = $1 and usage_type = $2 and source_id = gone.source",
    )
    .bind(tenant)
    .bind(usage_type)
    .bind(counted.collect::<Vec<_>>())
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(gone.len() as i64)
}

/// The sources whose earliest record is gone.
pub async fn bereft_sources(
    database: &PgPool,
    tenant: &str,
    usage_type: &str,
    older_than: DateTime<Utc>,
) -> Result<Vec<String>, sqlx::Error> {
    let sources = sqlx::query_scalar(
        "select source_id from usage_tallies where tenant_id = $1 and usage_type = $2 and earliest < $3 and records > 0",
    );
    sources.bind(tenant).bind(usage_type).bind(older_than).fetch_all(database).await
}

/// What is gone is not the earliest any more, and what has nothing left is nothing. Elsewhere may be something earlier than
/// here.
pub async fn mend_tallies(
    database: &PgPool,
    tenant: &str,
    usage_type: &str,
    sources: &[String],
    elsewhere: &HashMap<String, DateTime<Utc>>,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update usage_tallies tally set earliest = coalesce(least(elsewhere, (
             select event_timestamp from usage_records record where record.tenant_id = $1 and record.usage_type = $2
                 and record.source_id = tally.source_id order by event_timestamp limit 1
         )), latest)
         from unnest($3::text[], $4::timestamptz[]) as bereft (source, elsewhere)
         where tenant_id = $1 and usage_type = $2 and source_id = source",
    )
    .bind(tenant)
    .bind(usage_type)
    .bind(sources)
    .bind(column(sources, |source| elsewhere.get(source).copied()))
    .execute(database)
    .await?;
    let nothing = sqlx::query("delete from usage_tallies where tenant_id = $1 and usage_type = $2 and records <= 0");
    nothing.bind(tenant).bind(usage_type).execute(database).await.map(drop)
}

/// Forgets what the feed told so long ago that no policy keeps it.
pub async fn forget_feed(database: &PgPool, older_than: DateTime<Utc>) -> Result<u64, sqlx::Error> {
    let forget = sqlx::query("delete from usage_feed where until < $1");
    Ok(forget.bind(older_than).execute(database).await?.rows_affected())
}
