//! Backfills: their audit records, their replacement records, and what they do to the ledger.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use rust_decimal::Decimal;
use sqlx::{FromRow, PgConnection, PgPool};
use uuid::Uuid;

use super::{Tally, TallyKey, add_tallies, column, historical::Span};
use crate::{
    api::usage::{Backfill, BackfillMode, BackfillProgress, BackfillStatus, MetricKind, Reason, ResourcePreview},
    database::{json_without_nul, without_nul},
    error::{Code, Error, Result},
    usage::record::Record,
};

/// What a backfill is about.
#[derive(Debug, Clone, FromRow)]
pub struct Operation {
    pub id: Uuid,
    pub tenant_id: String,
    pub usage_type: String,
    pub range_start: DateTime<Utc>,
    pub range_end: DateTime<Utc>,
    mode: String,
    pub status: String,
    operator_id: String,
    reason: String,
    pub events_added: Option<i64>,
    pub events_archived: Option<i64>,
    affects_invoiced_period: bool,
    created_at: DateTime<Utc>,
    completed_at: Option<DateTime<Utc>>,
    code: Option<String>,
    message: Option<String>,
    details: Option<String>,
    phase: Option<String>,
    done: Option<i64>,
    total: Option<i64>,
    lease_until: Option<DateTime<Utc>>,
    pub reverted_at: Option<DateTime<Utc>>,
    reverted_by: Option<String>,
    revert_reason: Option<String>,
}

impl Operation {
    pub fn span(&self) -> Span<'_> {
        Span { tenant: &self.tenant_id, usage_type: &self.usage_type, from: self.range_start, to: self.range_end }
    }

    pub fn is_blocking(&self) -> bool {
        self.mode == BackfillMode::Blocking.as_str()
    }

    /// How many replacement records have come.
    pub fn received(&self) -> i64 {
        self.total.unwrap_or_default()
    }

    pub fn shown(self) -> Result<Backfill> {
        let broken = |what: &str| Error::internal(format!("a backfill has a strange {what}"));
        let progress = match (self.phase, self.lease_until) {
            (Some(phase), Some(lease_until)) => Some(BackfillProgress {
                phase,
                done: self.done.unwrap_or_default(),
                total: self.total.unwrap_or_default(),
                lease_until,
            }),
            _ => None,
        };
        let error = self.code.map(|code| Reason {
            code: Code::ALL.iter().copied().find(|known| known.as_str() == code).unwrap_or(Code::Internal),
            message: self.message.unwrap_or_default().into(),
            details: self.details.and_then(|details| serde_json::from_str(&details).ok()),
        });
        let modes = [BackfillMode::Blocking, BackfillMode::NonBlocking];
        Ok(Backfill {
            id: self.id,
            tenant_id: self.tenant_id,
            usage_type: self.usage_type,
            range_start: self.range_start,
            range_end: self.range_end,
            mode: modes.into_iter().find(|mode| mode.as_str() == self.mode).ok_or_else(|| broken("mode"))?,
            status: BackfillStatus::from_word(&self.status).ok_or_else(|| broken("status"))?,
            operator_id: self.operator_id,
            reason: self.reason,
            events_added: self.events_added,
            events_archived: self.events_archived,
            affects_invoiced_period: self.affects_invoiced_period,
            created_at: self.created_at,
            completed_at: self.completed_at,
            audit_record_id: self.id,
            error,
            progress,
            reverted_at: self.reverted_at,
            reverted_by: self.reverted_by,
            revert_reason: self.revert_reason,
        })
    }
}

/// A tenant's backfill, as it is.
pub async fn operation(
    connection: &mut PgConnection,
    tenant: &str,
    id: Uuid,
) -> Result<Option<Operation>, sqlx::Error> {
    sqlx::query_as(
        "select operation.id, operation.tenant_id, operation.usage_type, operation.range_start, operation.range_end, mode,
             status, operation.operator_id, operation.reason, events_added, events_archived, affects_invoiced_period,
             created_at, completed_at, code, message, details::text as details, phase, done, total, lease_until,
             reversion.at as reverted_at, reversion.operator_id as reverted_by, reversion.reason as revert_reason
         from backfill_operations operation
         left join backfill_ranges range on range.operation_id = operation.id
         left join backfill_reversions reversion on reversion.operation_id = operation.id
         where operation.id = $1 and operation.tenant_id = $2",
    )
    .bind(id)
    .bind(tenant)
    .fetch_optional(connection)
    .await
}

pub struct NewOperation<'a> {
    pub id: Uuid,
    pub tenant: &'a str,
    pub usage_type: &'a str,
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
    pub mode: BackfillMode,
    pub operator: &'a str,
    pub request_id: Option<&'a str>,
    pub reason: &'a str,
}

pub async fn create_operation(connection: &mut PgConnection, new: &NewOperation<'_>) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into backfill_operations (id, tenant_id, usage_type, range_start, range_end, mode, status, operator_id,
             request_id, reason, affects_invoiced_period, created_at)
         values ($1, $2, $3, $4, $5, $6, 'pending', $7, $8, $9,
             exists (select from usage_invoiced where tenant_id = $2 and until > $4), clock_timestamp())",
    )
    .bind(new.id)
    .bind(new.tenant)
    .bind(new.usage_type)
    .bind(new.from)
    .bind(new.to)
    .bind(new.mode.as_str())
    .bind(new.operator)
    .bind(new.request_id)
    .bind(without_nul(new.reason))
    .execute(connection)
    .await
    .map(drop)
}

/// Whether a moment lies before what a tenant has been invoiced.
pub async fn is_invoiced(
    connection: &mut PgConnection,
    tenant: &str,
    from: DateTime<Utc>,
) -> Result<bool, sqlx::Error> {
    let invoiced = sqlx::query_scalar("select exists (select from usage_invoiced where tenant_id = $1 and until > $2)");
    invoiced.bind(tenant).bind(from).fetch_one(connection).await
}

pub async fn invoiced_until(connection: &mut PgConnection, tenant: &str) -> Result<Option<DateTime<Utc>>, sqlx::Error> {
    let until = sqlx::query_scalar("select until from usage_invoiced where tenant_id = $1");
    until.bind(tenant).fetch_optional(connection).await
}

pub async fn set_invoiced_until(
    connection: &mut PgConnection,
    tenant: &str,
    until: DateTime<Utc>,
) -> Result<(), sqlx::Error> {
    let set = sqlx::query(
        "insert into usage_invoiced (tenant_id, until) values ($1, $2)
         on conflict (tenant_id) do update set until = excluded.until, updated_at = now()",
    );
    set.bind(tenant).bind(until).execute(connection).await.map(drop)
}

/// A replacement record.
pub struct NewEvent {
    /// Its place in the request.
    pub index: usize,
    pub source: String,
    pub record: Record,
    pub kind: MetricKind,
}

/// Keeps replacement records, in one order for all, so that parts that share some don't lock each other out. The bodies of those
/// that were there already.
pub async fn stage(
    connection: &mut PgConnection,
    operation: Uuid,
    events: &[NewEvent],
) -> Result<HashMap<Uuid, Vec<u8>>, sqlx::Error> {
    let mut sorted: Vec<&NewEvent> = events.iter().collect();
    sorted.sort_unstable_by_key(|event| event.record.id);
    let events = &sorted[..];
    let inserted: Vec<Uuid> = sqlx::query_scalar(
        "insert into backfill_events (operation_id, id, source_id, user_id, resource_id, resource_type, metric_kind, value,
             event_timestamp, idempotency_key, lineage, metadata, body_hash, series)
         select $1, * from unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::numeric[],
             $9::timestamptz[], $10::text[], $11::text[], $12::text[], $13::bytea[], $14::uuid[])
         on conflict (operation_id, id) do nothing returning id",
    )
    .bind(operation)
    .bind(column(events, |event| event.record.id))
    .bind(column(events, |event| event.source.as_str()))
    .bind(column(events, |event| event.record.user_id.as_deref()))
    .bind(column(events, |event| event.record.resource_id.as_str()))
    .bind(column(events, |event| event.record.resource_type.as_deref()))
    .bind(column(events, |event| event.kind.as_str()))
    .bind(column(events, |event| event.record.value))
    .bind(column(events, |event| event.record.event_timestamp))
    .bind(column(events, |event| event.record.idempotency_key.as_str()))
    .bind(column(events, |event| event.record.lineage.as_deref()))
    .bind(column(events, |event| event.record.metadata.as_deref()))
    .bind(column(events, |event| &event.record.body_hash[..]))
    .bind(column(events, |event| (event.kind == MetricKind::Counter).then_some(event.record.series)))
    .fetch_all(&mut *connection)
    .await?;
    if inserted.len() == events.len() {
        return Ok(HashMap::new());
    }
    let there: Vec<(Uuid, Vec<u8>)> = sqlx::query_as(
        "select id, body_hash from backfill_events where operation_id = $1 and id = any($2) and not id = any($3)",
    )
    .bind(operation)
    .bind(column(events, |event| event.record.id))
    .bind(inserted)
    .fetch_all(connection)
    .await?;
    Ok(there.into_iter().collect())
}

pub async fn forget_staged(connection: &mut PgConnection, operation: Uuid) -> Result<(), sqlx::Error> {
    let forget = sqlx::query("delete from backfill_events where operation_id = $1");
    forget.bind(operation).execute(connection).await.map(drop)
}

/// Whether it waits for records, which it does until the transaction ends.
pub async fn is_pending(connection: &mut PgConnection, operation: Uuid) -> Result<bool, sqlx::Error> {
    let pending = sqlx::query("select from backfill_operations where id = $1 and status = 'pending' for share");
    Ok(pending.bind(operation).fetch_optional(connection).await?.is_some())
}

/// From waiting to working. False if it waits no more.
pub async fn start_operation(connection: &mut PgConnection, operation: Uuid) -> Result<bool, sqlx::Error> {
    let start =
        sqlx::query("update backfill_operations set status = 'in_progress' where id = $1 and status = 'pending'");
    Ok(start.bind(operation).execute(connection).await?.rows_affected() == 1)
}

/// What a statement has changed, of one partition and source.
#[derive(Debug, FromRow)]
pub struct Changed {
    partition: String,
    source_id: String,
    pub records: i64,
    /// How many of them are readings of counters.
    pub readings: i64,
    earliest: DateTime<Utc>,
    latest: DateTime<Utc>,
}

/// Sums up what a statement changes while it does, so that nobody has to go through a million rows for it afterwards.
macro_rules! summed_up {
    ($statement:literal) => {
        concat!(
            "with changed as (",
            $statement,
            " returning tableoid, source_id, series, event_timestamp)
             select (select relname::text from pg_class where oid = changed.tableoid) as partition, source_id,
                 count(*) as records, count(series) as readings,
                 min(event_timestamp) as earliest, max(event_timestamp) as latest
             from changed group by changed.tableoid, source_id"
        )
    };
}

/// Archives what is active in the range, or of that what was there before the backfill began.
pub async fn archive_range(connection: &mut PgConnection, operation: &Operation) -> Result<Vec<Changed>, sqlx::Error> {
    sqlx::query_as(summed_up!(
        "update usage_records set status = 'archived', backfill_operation_id = $1
         where tenant_id = $2 and usage_type = $3 and event_timestamp >= $4 and event_timestamp < $5
             and status = 'active' and ($6 or created_at < $7)"
    ))
    .bind(operation.id)
    .bind(&operation.tenant_id)
    .bind(&operation.usage_type)
    .bind(operation.range_start)
    .bind(operation.range_end)
    .bind(operation.is_blocking())
    .bind(operation.created_at)
    .fetch_all(connection)
    .await
}

/// The last of the next so many replacement records after one.
pub async fn chunk_end(
    connection: &mut PgConnection,
    operation: Uuid,
    after: Uuid,
    records: i64,
) -> Result<Option<Uuid>, sqlx::Error> {
    sqlx::query_scalar(
        "select id from (select id from backfill_events where operation_id = $1 and id > $2 order by id limit $3) as chunk
         order by id desc limit 1",
    )
    .bind(operation)
    .bind(after)
    .bind(records)
    .fetch_optional(connection)
    .await
}

/// Writes replacement records into the ledger, in the order of their ids.
pub async fn write_chunk(
    connection: &mut PgConnection,
    operation: &Operation,
    after: Uuid,
    up_to: Uuid,
) -> Result<Vec<Changed>, sqlx::Error> {
    sqlx::query_as(summed_up!(
        "insert into usage_records (id, tenant_id, source_id, user_id, resource_id, resource_type, usage_type, metric_kind,
             value, event_timestamp, idempotency_key, added_by, lineage, metadata, body_hash, series)
         select id, $2, source_id, user_id, resource_id, resource_type, $3, metric_kind, value, event_timestamp,
             idempotency_key, $1, lineage::jsonb, metadata::jsonb, body_hash, series
         from backfill_events where operation_id = $1 and id > $4 and id <= $5 order by id"
    ))
    .bind(operation.id)
    .bind(&operation.tenant_id)
    .bind(&operation.usage_type)
    .bind(after)
    .bind(up_to)
    .fetch_all(connection)
    .await
}

/// The rows that a backfill has touched: what it archived and what it added.
macro_rules! touched {
    () => {
        "usage_records where tenant_id = $2 and usage_type = $3 and event_timestamp >= $4 and event_timestamp < $5
             and (added_by = $1 or backfill_operation_id = $1) and status in ('active', 'archived')"
    };
}

macro_rules! bind_touched {
    ($query:expr, $operation:expr) => {
        $query
            .bind($operation.id)
            .bind(&$operation.tenant_id)
            .bind(&$operation.usage_type)
            .bind($operation.range_start)
            .bind($operation.range_end)
    };
}

/// The counters that it has touched.
pub async fn touched_series(connection: &mut PgConnection, operation: &Operation) -> Result<Vec<Uuid>, sqlx::Error> {
    let series = sqlx::query_scalar(concat!(
        "select distinct series from ",
        touched!(),
        " and series is not null order by series"
    ));
    bind_touched!(series, operation).fetch_all(connection).await
}

/// Makes heads for counters that had none, so that they can be held.
pub async fn make_heads(connection: &mut PgConnection, operation: &Operation) -> Result<(), sqlx::Error> {
    let make = sqlx::query(concat!(
        "insert into counter_heads (series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value)
         select distinct on (series) series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value from ",
        touched!(),
        " and series is not null order by series, event_timestamp desc, value desc
         on conflict (series) do nothing"
    ));
    bind_touched!(make, operation).execute(connection).await.map(drop)
}

/// A counter that goes down, in the range or at its edges.
#[derive(Debug, FromRow)]
pub struct Descent {
    pub source_id: String,
    pub resource_id: String,
    pub event_timestamp: DateTime<Utc>,
    pub value: Decimal,
    pub before: Decimal,
}

pub async fn descent(
    connection: &mut PgConnection,
    operation: &Operation,
    series: &[Uuid],
) -> Result<Option<Descent>, sqlx::Error> {
    sqlx::query_as(
        "with readings as (
             select record.series, record.event_timestamp, record.value, source_id, resource_id
             from unnest($1::uuid[]) as touched (series) cross join lateral (
                 (select * from usage_reading_before(touched.series, $2))
                 union all
                 (select series, tenant_id, source_id, usage_type, resource_id, event_timestamp, value
                  from usage_records record where record.series = touched.series and status = 'active'
                      and event_timestamp >= $2 and event_timestamp < $3)
                 union all
                 -- From the range's end on.
                 (select * from usage_reading_after(touched.series, $3 - interval '1 microsecond'))
             ) as record
         ), ordered as (
             select *, lag(value) over (partition by series order by event_timestamp, value) as before from readings
         )
         select source_id, resource_id, event_timestamp, value, before from ordered where value < before limit 1",
    )
    .bind(series)
    .bind(operation.range_start)
    .bind(operation.range_end)
    .fetch_optional(connection)
    .await
}

/// Adds what was written to the tallies.
pub async fn tally_written(
    connection: &mut PgConnection,
    operation: &Operation,
    written: &[Changed],
) -> Result<(), sqlx::Error> {
    let mut tallies: HashMap<TallyKey<'_>, Tally> = HashMap::new();
    for Changed { source_id, records, earliest, latest, .. } in written {
        let more = Tally { records: *records, earliest: *earliest, latest: *latest };
        let key = (operation.tenant_id.as_str(), source_id.as_str(), operation.usage_type.as_str());
        tallies.entry(key).and_modify(|tally| tally.add(more)).or_insert(more);
    }
    add_tallies(connection, &tallies).await
}

/// Widens the catalog of partitions by what was changed.
pub async fn widen_changed(connection: &mut PgConnection, changed: &[Changed]) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update usage_partitions part set least_event = least(least_event, new.least),
             greatest_event = greatest(greatest_event, new.greatest), last_written = clock_timestamp()
         from (
             select name, min(earliest) as least, max(latest) as greatest
             from unnest($1::text[], $2::timestamptz[], $3::timestamptz[]) as changed (name, earliest, latest) group by name
         ) as new
         where part.name = new.name",
    )
    .bind(column(changed, |one| one.partition.as_str()))
    .bind(column(changed, |one| one.earliest))
    .bind(column(changed, |one| one.latest))
    .execute(connection)
    .await
    .map(drop)
}

/// Tells the feed of all that was touched, what is archived first.
pub async fn feed_touched(connection: &mut PgConnection, operation: &Operation) -> Result<(), sqlx::Error> {
    // A million of them are sorted twice.
    sqlx::raw_sql("set local work_mem = '64MB'").execute(&mut *connection).await?;
    let feed = sqlx::query(concat!(
        "with entries as (
             select id, revision,
                 row_number() over (order by status = 'active', event_timestamp, id, revision) as nth
             from ",
        touched!(),
        "), chunks as (
             select (nth - 1) / 1000 as chunk, array_agg(id order by nth) as ids,
                 array_agg(revision order by nth) as revisions, max(nth) as last
             from entries group by 1
         ), head as (
             insert into usage_feed_heads as known (tenant_id, lane, position)
             select $2, 'corrections', max(last) from chunks having count(*) > 0
             on conflict (tenant_id, lane) do update set position = known.position + excluded.position
             returning position
         )
         insert into usage_feed (tenant_id, lane, position, ids, revisions, until)
         select $2, 'corrections', head.position - (select max(last) from chunks) + last, ids, revisions, now()
         from chunks cross join head"
    ));
    bind_touched!(feed, operation).execute(connection).await.map(drop)
}

/// Notes that the ledger has it all. False if the backfill was given up meanwhile.
pub async fn note_written(
    connection: &mut PgConnection,
    operation: Uuid,
    added: i64,
    archived: i64,
) -> Result<bool, sqlx::Error> {
    let note = sqlx::query(
        "update backfill_operations set written = true, events_added = $2, events_archived = $3
         where id = $1 and status = 'in_progress' and not written",
    );
    Ok(note.bind(operation).bind(added).bind(archived).execute(connection).await?.rows_affected() == 1)
}

/// Ends a backfill that is written.
pub async fn complete_operation(connection: &mut PgConnection, operation: Uuid) -> Result<(), sqlx::Error> {
    let complete = sqlx::query(
        "update backfill_operations set status = 'completed', completed_at = clock_timestamp()
         where id = $1 and status = 'in_progress' and written",
    );
    complete.bind(operation).execute(connection).await.map(drop)
}

/// Ends a backfill that is not written. False if it is.
pub async fn fail_operation(
    connection: &mut PgConnection,
    operation: Uuid,
    error: &Error,
) -> Result<bool, sqlx::Error> {
    let fail = sqlx::query(
        "update backfill_operations set status = 'failed', completed_at = clock_timestamp(), code = $2, message = $3,
             details = $4::jsonb
         where id = $1 and status in ('pending', 'in_progress') and not written",
    )
    .bind(operation)
    .bind(error.code.as_str())
    .bind(without_nul(&error.message))
    .bind(error.details.as_ref().map(json_without_nul));
    Ok(fail.execute(connection).await?.rows_affected() == 1)
}

/// Ends a backfill that waits for records. False if it does not.
pub async fn fail_pending(connection: &mut PgConnection, operation: Uuid, error: &Error) -> Result<bool, sqlx::Error> {
    let pending = sqlx::query("select from backfill_operations where id = $1 and status = 'pending' for update");
    match pending.bind(operation).fetch_optional(&mut *connection).await? {
        Some(_) => fail_operation(connection, operation, error).await,
        None => Ok(false),
    }
}

/// How many rows a backfill has added and archived that nobody has changed since.
pub async fn unchanged(connection: &mut PgConnection, operation: &Operation) -> Result<(i64, i64), sqlx::Error> {
    let unchanged = sqlx::query_as(concat!(
        "select count(*) filter (where added_by = $1 and status = 'active' and revision = 1),
             count(*) filter (where backfill_operation_id = $1 and status = 'archived')
         from ",
        touched!()
    ));
    bind_touched!(unchanged, operation).fetch_one(connection).await
}

/// What was archived is active again, and what was added is archived.
pub async fn swap_touched(connection: &mut PgConnection, operation: &Operation) -> Result<Vec<Changed>, sqlx::Error> {
    let swap = sqlx::query_as(summed_up!(
        "update usage_records set status = case status when 'active' then 'archived' else 'active' end,
             backfill_operation_id = $1
         where tenant_id = $2 and usage_type = $3 and event_timestamp >= $4 and event_timestamp < $5
             and (added_by = $1 and status = 'active' or backfill_operation_id = $1 and status = 'archived')"
    ));
    bind_touched!(swap, operation).fetch_all(connection).await
}

/// Notes that a backfill was taken back. False if it was before.
pub async fn note_reverted(
    connection: &mut PgConnection,
    operation: Uuid,
    operator: &str,
    request_id: Option<&str>,
    reason: &str,
) -> Result<bool, sqlx::Error> {
    let note = sqlx::query(
        "insert into backfill_reversions (operation_id, operator_id, request_id, reason) values ($1, $2, $3, $4)
         on conflict (operation_id) do nothing",
    );
    let note = note.bind(operation).bind(operator).bind(request_id).bind(without_nul(reason));
    Ok(note.execute(connection).await?.rows_affected() == 1)
}

/// What is active in a range: how many, and by source and resource those with the most and those of the events.
pub async fn active_in_range(
    connection: &mut PgConnection,
    span: &Span<'_>,
    most: i64,
    events: &[NewEvent],
) -> Result<(i64, Vec<ResourcePreview>), sqlx::Error> {
    let rows: Vec<(String, String, i64, String, i64)> = sqlx::query_as(
        "with there as (
             select source_id, resource_id, count(*) as records, trim_scale(sum(value))::text as value,
                 (sum(count(*)) over ())::bigint as total,
                 row_number() over (order by count(*) desc, source_id, resource_id) as place
             from usage_records
             where tenant_id = $1 and usage_type = $2 and event_timestamp >= $3 and event_timestamp < $4
                 and status = 'active'
             group by source_id, resource_id
         )
         select source_id, resource_id, records, value, total from there
         where place <= $5 or (source_id, resource_id) in (select * from unnest($6::text[], $7::text[]))
         order by place",
    )
    .bind(span.tenant)
    .bind(span.usage_type)
    .bind(span.from)
    .bind(span.to)
    .bind(most)
    .bind(column(events, |event| event.source.as_str()))
    .bind(column(events, |event| event.record.resource_id.as_str()))
    .fetch_all(connection)
    .await?;
    let total = rows.first().map_or(0, |row| row.4);
    let preview = |(source_id, resource_id, events_archived, value_archived, _)| ResourcePreview {
        source_id,
        resource_id,
        events_archived,
        value_archived,
        events_added: 0,
        value_added: "0".to_owned(),
    };
    Ok((total, rows.into_iter().map(preview).collect()))
}

/// Replacement records that nobody will ever write.
pub async fn forget_orphans(database: &PgPool) -> Result<u64, sqlx::Error> {
    let forget = sqlx::query(
        "delete from backfill_events where operation_id not in (select operation_id from backfill_ranges)
         and operation_id not in (select id from backfill_operations where status in ('pending', 'in_progress'))",
    );
    Ok(forget.execute(database).await?.rows_affected())
}
