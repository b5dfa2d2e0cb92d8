//! The records themselves.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use rust_decimal::Decimal;
use serde_json::{Value, json};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use super::column;
use crate::{
    api::usage::MetricKind,
    error::{Code, Error},
    usage::{identity::Origin, record::Record},
};

/// A record that is to be kept.
#[derive(Clone, Copy)]
pub struct NewRow<'a> {
    pub origin: Origin<'a>,
    pub record: &'a Record,
    pub kind: MetricKind,
}

/// Adds rows, and returns how many of them were new.
pub async fn insert(connection: &mut PgConnection, rows: &[NewRow<'_>]) -> Result<usize, sqlx::Error> {
    let inserted = sqlx::query(
        "insert into usage_records (id, tenant_id, source_id, user_id, resource_id, resource_type, usage_type,
             metric_kind, value, event_timestamp, idempotency_key, lineage, metadata, body_hash, series)
         select id, tenant, source, user_id, resource_id, resource_type, usage_type, kind, value, at, key,
             lineage::jsonb, metadata::jsonb, body_hash, series
         from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
             $9::numeric[], $10::timestamptz[], $11::text[], $12::text[], $13::text[], $14::bytea[], $15::uuid[])
             as new (id, tenant, source, user_id, resource_id, resource_type, usage_type, kind, value, at, key, lineage,
                 metadata, body_hash, series)
         on conflict (id, revision) do nothing",
    )
    .bind(column(rows, |row| row.record.id))
    .bind(column(rows, |row| row.origin.tenant))
    .bind(column(rows, |row| row.origin.source))
    .bind(column(rows, |row| row.record.user_id.as_deref()))
    .bind(column(rows, |row| row.record.resource_id.as_str()))
    .bind(column(rows, |row| row.record.resource_type.as_deref()))
    .bind(column(rows, |row| row.record.usage_type.as_str()))
    .bind(column(rows, |row| row.kind.as_str()))
    .bind(column(rows, |row| row.record.value))
    .bind(column(rows, |row| row.record.event_timestamp))
    .bind(column(rows, |row| row.record.idempotency_key.as_str()))
    .bind(column(rows, |row| row.record.lineage.as_deref()))
    .bind(column(rows, |row| row.record.metadata.as_deref()))
    .bind(column(rows, |row| &row.record.body_hash[..]))
    .bind(column(rows, |row| (row.kind == MetricKind::Counter).then_some(row.record.series)))
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() as usize)
}

/// A record as it was first kept.
#[derive(Debug, Clone, FromRow)]
pub struct Stored {
    pub id: Uuid,
    idempotency_key: String,
    pub body_hash: Vec<u8>,
    value: Decimal,
    event_timestamp: DateTime<Utc>,
    user_id: Option<String>,
    resource_type: Option<String>,
    lineage: Option<String>,
    metadata: Option<String>,
}

impl Stored {
    pub fn is_same(&self, record: &Record) -> bool {
        self.body_hash == record.body_hash && self.idempotency_key == record.idempotency_key
    }

    /// What is another in the record.
    pub fn differences(&self, record: &Record) -> Vec<&'static str> {
        let json = |text: &Option<String>| text.as_ref().and_then(|text| serde_json::from_str::<Value>(text).ok());
        let mut fields: Vec<_> = [
            ("idempotency_key", self.idempotency_key != record.idempotency_key),
            ("value", self.value != record.value),
            ("event_timestamp", self.event_timestamp != record.event_timestamp),
            ("user_id", self.user_id != record.user_id),
            ("resource_type", self.resource_type != record.resource_type),
            ("lineage", json(&self.lineage) != json(&record.lineage)),
            ("metadata", json(&self.metadata) != json(&record.metadata)),
        ]
        .into_iter()
        .filter_map(|(field, differs)| differs.then_some(field))
        .collect();
        if fields.is_empty() {
            fields.push("body");
        }
        fields
    }

    /// What a record that is about to be kept will be.
    pub fn of(record: &Record) -> Self {
        Self {
            id: record.id,
            idempotency_key: record.idempotency_key.clone(),
            body_hash: record.body_hash.to_vec(),
            value: record.value,
            event_timestamp: record.event_timestamp,
            user_id: record.user_id.clone(),
            resource_type: record.resource_type.clone(),
            lineage: record.lineage.clone(),
            metadata: record.metadata.clone(),
        }
    }
}

/// Those of the records that are there. Each id is looked for in the one partition that may have it.
pub async fn stored(connection: &mut PgConnection, ids: &[Uuid]) -> Result<HashMap<Uuid, Stored>, sqlx::Error> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let rows: Vec<Stored> = sqlx::query_as(
        "select found.* from unnest($1::uuid[]) as wanted (id) cross join lateral (
             select id, idempotency_key, body_hash, value, event_timestamp, user_id, resource_type,
                 lineage::text as lineage, metadata::text as metadata
             from usage_records record where record.id = wanted.id and revision = 1
         ) as found",
    )
    .bind(ids)
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|row| (row.id, row)).collect())
}

/// The readings of a counter right before and right after a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, FromRow)]
pub struct Neighbours {
    pub before: Option<Decimal>,
    pub after: Option<Decimal>,
    /// Whether readings of that time have moved to the historical database.
    pub below_floor: bool,
}

impl Neighbours {
    /// Why a reading does not lie between them.
    pub fn violation(&self, value: Decimal) -> Option<Error> {
        let problem = match (self.before, self.after) {
            (Some(before), _) if value < before => format!("{value} is less than {before} before it"),
            (_, Some(after)) if value > after => format!("{value} is more than {after} after it"),
            _ => return None,
        };
        let text = |value: Option<Decimal>| value.map(|value| value.to_string());
        let message = format!("value: a counter does not go down: {problem}");
        Some(Error::new(Code::CounterViolation, message).details(json!({
            "field": "value", "before": text(self.before), "after": text(self.after),
        })))
    }
}

/// The neighbours of each of these moments in its series.
pub async fn neighbours(
    connection: &mut PgConnection,
    moments: &[(Uuid, DateTime<Utc>)],
) -> Result<HashMap<(Uuid, DateTime<Utc>), Neighbours>, sqlx::Error> {
    if moments.is_empty() {
        return Ok(HashMap::new());
    }
    #[derive(FromRow)]
    struct Found {
        series: Uuid,
        at: DateTime<Utc>,
        #[sqlx(flatten)]
        neighbours: Neighbours,
    }
    let rows: Vec<Found> = sqlx::query_as(
        "select wanted.series, wanted.at,
             (select value from usage_reading_before(wanted.series, wanted.at)) as before,
             (select value from usage_reading_after(wanted.series, wanted.at)) as after,
             exists (select from usage_floors floor where floor.series = wanted.series and event_timestamp >= wanted.at)
                 as below_floor
         from unnest($1::uuid[], $2::timestamptz[]) as wanted (series, at)",
    )
    .bind(column(moments, |(series, _)| *series))
    .bind(column(moments, |(_, at)| *at))
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|found| ((found.series, found.at), found.neighbours)).collect())
}
