//! Records as they are read.

use chrono::{DateTime, Utc};
use rust_decimal::Decimal;
use sqlx::{FromRow, PgConnection, PgPool, Postgres, QueryBuilder, Row as _, postgres::PgRow};
use uuid::Uuid;

use crate::api::{
    Json,
    usage::{LedgerRecord, MetricKind, RecordChange, Status},
};

/// What [`Row`] reads, in this order.
macro_rules! columns {
    () => {
        "id, revision, tenant_id, source_id, user_id, resource_id, resource_type, usage_type, metric_kind, value, \
         event_timestamp, idempotency_key, status, backfill_operation_id, added_by, lineage::text as lineage, \
         metadata::text as metadata, created_at"
    };
}
pub(super) use columns;

/// A record, and about how many bytes it takes to tell.
#[derive(Debug, Clone)]
pub struct Row {
    pub record: LedgerRecord,
    pub size: usize,
}

impl FromRow<'_, PgRow> for Row {
    /// By place, and without a look at the types of columns that we name ourselves: there are thousands of rows.
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let text = |place: usize| row.try_get_unchecked::<String, _>(place);
        let optional = |place: usize| row.try_get_unchecked::<Option<String>, _>(place);
        let json = |place: usize| row.try_get_unchecked::<Option<&str>, _>(place);
        let unknown = |what: &str, word: &str| sqlx::Error::Decode(format!("a record has the {what} {word:?}").into());
        let unread = |error: serde_json::Error| sqlx::Error::Decode(error.into());
        let (kind, status) = (row.try_get_unchecked(8)?, row.try_get_unchecked(12)?);
        let (lineage, metadata) = (json(15)?, json(16)?);
        let record = LedgerRecord {
            id: row.try_get_unchecked(0)?,
            revision: row.try_get_unchecked(1)?,
            tenant_id: text(2)?,
            source_id: text(3)?,
            user_id: optional(4)?,
            resource_id: text(5)?,
            resource_type: optional(6)?,
            usage_type: text(7)?,
            metric_kind: MetricKind::from_word(kind).ok_or_else(|| unknown("kind", kind))?,
            value: row.try_get_unchecked::<Decimal, _>(9)?.normalize().to_string(),
            event_timestamp: row.try_get_unchecked(10)?,
            idempotency_key: text(11)?,
            status: Status::from_word(status).ok_or_else(|| unknown("status", status))?,
            backfill_operation_id: row.try_get_unchecked(13)?,
            added_by: row.try_get_unchecked(14)?,
            lineage: lineage.map(serde_json::from_str).transpose().map_err(unread)?,
            metadata: metadata.map(Json::from_text),
            created_at: row.try_get_unchecked(17)?,
        };
        let json = [lineage, metadata].into_iter().flatten();
        Ok(Self { size: size(&record, json), record })
    }
}

/// Some characters are escaped.
fn size<'a>(record: &'a LedgerRecord, json: impl Iterator<Item = &'a str>) -> usize {
    let LedgerRecord { tenant_id, source_id, resource_id, usage_type, idempotency_key, .. } = record;
    let texts = [tenant_id, source_id, resource_id, usage_type, idempotency_key];
    let optional = [&record.user_id, &record.resource_type].into_iter().flatten();
    let texts = texts.into_iter().chain(optional).map(String::as_str).chain(json);
    Row::LEAST_SIZE + texts.map(|text| text.len() + text.len() / 8).sum::<usize>()
}

impl Row {
    /// The bytes of names and numbers.
    pub const LEAST_SIZE: usize = 500;

    /// The record's id and its revision, which nothing else has.
    pub fn key(&self) -> (Uuid, i32) {
        (self.record.id, self.record.revision)
    }

    pub fn place(&self) -> Place {
        let LedgerRecord { event_timestamp, id, revision, .. } = self.record;
        Place { event_timestamp, id, revision }
    }
}

/// A place in the order of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub event_timestamp: DateTime<Utc>,
    pub id: Uuid,
    pub revision: i32,
}

/// What a page shows.
#[derive(Clone)]
pub struct Selection<'a> {
    pub tenant: &'a str,
    /// Columns and what they must be.
    pub equal: Vec<(&'static str, &'a str)>,
    pub from: Option<DateTime<Utc>>,
    pub to: Option<DateTime<Utc>>,
    pub statuses: &'a [Status],
    pub after: Option<Place>,
}

impl Selection<'_> {
    /// The time that it begins with.
    pub fn begin(&self) -> Option<DateTime<Utc>> {
        self.after.map(|place| place.event_timestamp).max(self.from)
    }
}

/// Up to so many records in order. The text of the statement depends on which filters there are, never on their values, so
/// that it is planned once.
pub async fn page(
    connection: &mut PgConnection,
    selection: &Selection<'_>,
    most: usize,
) -> Result<Vec<Row>, sqlx::Error> {
    let mut query: QueryBuilder<Postgres> =
        QueryBuilder::new(concat!("select ", columns!(), " from usage_records where tenant_id = "));
    query.push_bind(selection.tenant);
    for (column, value) in &selection.equal {
        query.push(" and ").push(column).push(" = ").push_bind(*value);
    }
    // The comparison of whole places does not tell the index where to begin.
    if let Some(from) = selection.begin() {
        query.push(" and event_timestamp >= ").push_bind(from);
    }
    if let Some(to) = selection.to {
        query.push(" and event_timestamp < ").push_bind(to);
    }
    if let Some(Place { event_timestamp, id, revision }) = selection.after {
        query.push(" and (event_timestamp, id, revision) > (").push_bind(event_timestamp);
        query.push(", ").push_bind(id).push(", ").push_bind(revision).push(")");
    }
    if selection.statuses.len() < Status::ALL.len() {
        let mut statuses = query.push(" and status in (").separated(", ");
        for status in selection.statuses {
            statuses.push("'").push_unseparated(status.as_str()).push_unseparated("'");
        }
        query.push(")");
    }
    query.push(" order by event_timestamp, id, revision limit ").push_bind(most as i64);
    query.build_query_as().fetch_all(connection).await
}

/// All revisions of a tenant's record, oldest first.
pub async fn versions(connection: &mut PgConnection, tenant: &str, id: Uuid) -> Result<Vec<Row>, sqlx::Error> {
    let versions = sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from usage_records where id = $1 and tenant_id = $2 order by revision"
    ));
    versions.bind(id).bind(tenant).fetch_all(connection).await
}

/// Who changed a record, oldest first.
pub async fn changes(connection: &mut PgConnection, id: Uuid) -> Result<Vec<RecordChange>, sqlx::Error> {
    #[derive(FromRow)]
    struct Found {
        revision: i32,
        action: String,
        reason: String,
        actor: String,
        request_id: Option<String>,
        at: DateTime<Utc>,
    }
    let found: Vec<Found> = sqlx::query_as(
        "select revision, action, reason, actor, request_id, at from usage_changes where id = $1 order by revision, at",
    )
    .bind(id)
    .fetch_all(connection)
    .await?;
    let change = |Found { revision, action, reason, actor, request_id, at }| RecordChange {
        revision,
        action,
        reason,
        actor,
        request_id,
        at,
    };
    Ok(found.into_iter().map(change).collect())
}

/// What cursors are signed with.
pub async fn cursor_secret(database: &PgPool) -> Result<Vec<u8>, sqlx::Error> {
    sqlx::query_scalar("select secret from usage_secrets where name = 'cursor'").fetch_one(database).await
}
