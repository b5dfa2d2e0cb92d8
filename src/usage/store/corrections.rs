//! Changes of single records.

use rust_decimal::Decimal;
use sqlx::PgConnection;
use uuid::Uuid;

/// Keeps everybody else from changing this record until the transaction ends. What is read afterwards is as it is.
pub async fn hold_record(connection: &mut PgConnection, id: Uuid) -> Result<(), sqlx::Error> {
    let hold = sqlx::query("select pg_advisory_xact_lock(hashtextextended('usage record ' || $1::text, 0))");
    hold.bind(id).execute(connection).await.map(drop)
}

pub async fn deprecate(connection: &mut PgConnection, id: Uuid, revision: i32) -> Result<(), sqlx::Error> {
    let deprecate = sqlx::query("update usage_records set status = 'deprecated' where id = $1 and revision = $2");
    deprecate.bind(id).bind(revision).execute(connection).await.map(drop)
}

/// What a record's next revision has of its own.
pub struct Next<'a> {
    pub value: Decimal,
    pub user_id: Option<&'a str>,
    pub resource_type: Option<&'a str>,
    /// As JSON.
    pub metadata: Option<&'a str>,
}

/// Writes the next revision of a record. The rest of it, and what tells a repeat of the first, is as it was.
pub async fn revise(
    connection: &mut PgConnection,
    id: Uuid,
    revision: i32,
    next: &Next<'_>,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into usage_records (id, revision, tenant_id, source_id, user_id, resource_id, resource_type, usage_type,
             metric_kind, value, event_timestamp, idempotency_key, added_by, lineage, metadata, body_hash,
             series)
         select id, revision + 1, tenant_id, source_id, $4, resource_id, $5, usage_type, metric_kind, $3,
             event_timestamp, idempotency_key, added_by, lineage, $6::jsonb, body_hash, series
         from usage_records where id = $1 and revision = $2",
    )
    .bind(id)
    .bind(revision)
    .bind(next.value)
    .bind(next.user_id)
    .bind(next.resource_type)
    .bind(next.metadata)
    .execute(connection)
    .await
    .map(drop)
}

/// A change, and who made it.
pub struct NewChange<'a> {
    pub id: Uuid,
    pub revision: i32,
    pub action: &'a str,
    pub reason: &'a str,
    pub actor: &'a str,
    pub request_id: Option<&'a str>,
}

pub async fn note_change(connection: &mut PgConnection, change: &NewChange<'_>) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into usage_changes (id, revision, action, reason, actor, request_id) values ($1, $2, $3, $4, $5, $6)",
    )
    .bind(change.id)
    .bind(change.revision)
    .bind(change.action)
    .bind(change.reason)
    .bind(change.actor)
    .bind(change.request_id)
    .execute(connection)
    .await
    .map(drop)
}
