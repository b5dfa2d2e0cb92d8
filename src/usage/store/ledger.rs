//! Records as they are read.

use chrono::{DateTime, Utc};
use rust_decimal::Decimal;
use sqlx::{FromRow, PgConnection, PgPool, Postgres, QueryBuilder, Row as _, postgres::PgRow};
use uuid::Uuid;

use crate::{
    api::usage::{LedgerRecord, MetricKind, RecordChange, Status},
    error::{Error, Result},
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

#[derive(Debug, Clone)]
pub struct Row {
    pub id: Uuid,
    pub revision: i32,
    tenant_id: String,
    source_id: String,
    user_id: Option<String>,
    resource_id: String,
    resource_type: Option<String>,
    usage_type: String,
    metric_kind: MetricKind,
    value: Decimal,
    pub event_timestamp: DateTime<Utc>,
    idempotency_key: String,
    status: Status,
    backfill_operation_id: Option<Uuid>,
    added_by: Option<Uuid>,
    lineage: Option<String>,
    metadata: Option<String>,
    created_at: DateTime<Utc>,
}

impl FromRow<'_, PgRow> for Row {
    /// By place: names would be looked up in each of thousands of rows.
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let unknown = |what: &str, word: &str| sqlx::Error::Decode(format!("a record has the {what} {word:?}").into());
        let (kind, status) = (row.try_get(8)?, row.try_get(12)?);
        Ok(Self {
            id: row.try_get(0)?,
            revision: row.try_get(1)?,
            tenant_id: row.try_get(2)?,
            source_id: row.try_get(3)?,
            user_id: row.try_get(4)?,
            resource_id: row.try_get(5)?,
            resource_type: row.try_get(6)?,
            usage_type: row.try_get(7)?,
            metric_kind: MetricKind::from_word(kind).ok_or_else(|| unknown("kind", kind))?,
            value: row.try_get(9)?,
            event_timestamp: row.try_get(10)?,
            idempotency_key: row.try_get(11)?,
            status: Status::from_word(status).ok_or_else(|| unknown("status", status))?,
            backfill_operation_id: row.try_get(13)?,
            added_by: row.try_get(14)?,
            lineage: row.try_get(15)?,
            metadata: row.try_get(16)?,
            created_at: row.try_get(17)?,
        })
    }
}

impl Row {
    /// The bytes of names and numbers.
    pub const LEAST_SIZE: usize = 500;

    /// About as many bytes as it takes to tell.
    pub fn size(&self) -> usize {
        let texts = [&self.tenant_id, &self.source_id, &self.resource_id, &self.usage_type, &self.idempotency_key];
        let optional = [&self.user_id, &self.resource_type, &self.lineage, &self.metadata];
        let optional = optional.into_iter().flatten();
        // Some characters are escaped.
        Self::LEAST_SIZE + texts.into_iter().chain(optional).map(|text| text.len() + text.len() / 8).sum::<usize>()
    }

    pub fn record(self) -> Result<LedgerRecord> {
        Ok(LedgerRecord {
            id: self.id,
            revision: self.revision,
            tenant_id: self.tenant_id,
            source_id: self.source_id,
            user_id: self.user_id,
            resource_id: self.resource_id,
            resource_type: self.resource_type,
            usage_type: self.usage_type,
            metric_kind: self.metric_kind,
            value: self.value.normalize().to_string(),
            event_timestamp: self.event_timestamp,
            idempotency_key: self.idempotency_key,
            status: self.status,
            backfill_operation_id: self.backfill_operation_id,
            added_by: self.added_by,
            lineage: self.lineage.map(|json| serde_json::from_str(&json)).transpose().map_err(Error::internal)?,
            metadata: self.metadata.map(|json| serde_json::from_str(&json)).transpose().map_err(Error::internal)?,
            created_at: self.created_at,
        })
    }
}

/// A place in the order of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub event_timestamp: DateTime<Utc>,
    pub id: Uuid,
    pub revision: i32,
}

impl Row {
    pub fn place(&self) -> Place {
        Place { event_timestamp: self.event_timestamp, id: self.id, revision: self.revision }
    }
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
