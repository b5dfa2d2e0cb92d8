//! What was refused.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::{FromRow, PgConnection, PgPool, QueryBuilder};
use uuid::Uuid;

use super::column;
use crate::{
    api::usage::Reason,
    database::{json_without_nul, without_nul},
    usage::identity::Origin,
};

/// A record, or a message that could not be read, on its way into quarantine.
pub struct Refused<'a> {
    pub id: Uuid,
    pub origin: Origin<'a>,
    pub received_at: DateTime<Utc>,
    pub user: Option<&'a str>,
    pub idempotency_key: Option<&'a str>,
    pub reason: &'a Reason,
    pub payload: &'a [u8],
}

fn json(details: &Option<Value>) -> Option<String> {
    details.as_ref().map(json_without_nul)
}

pub async fn quarantine(connection: &mut PgConnection, refused: &[Refused<'_>]) -> Result<(), sqlx::Error> {
    if refused.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "insert into usage_quarantine (id, tenant_id, source_id, received_at, user_id, idempotency_key, code, message,
             details, payload)
         select id, tenant, source, at, user_id, key, code, message, details::jsonb, payload
         from unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[], $5::text[], $6::text[], $7::text[],
             $8::text[], $9::text[], $10::bytea[])
             as new (id, tenant, source, at, user_id, key, code, message, details, payload)",
    )
    .bind(column(refused, |one| one.id))
    .bind(column(refused, |one| one.origin.tenant))
    .bind(column(refused, |one| one.origin.source))
    .bind(column(refused, |one| one.received_at))
    .bind(column(refused, |one| one.user.map(without_nul)))
    .bind(column(refused, |one| one.idempotency_key.map(without_nul)))
    .bind(column(refused, |one| one.reason.code.as_str()))
    .bind(column(refused, |one| without_nul(&one.reason.message)))
    .bind(column(refused, |one| json(&one.reason.details)))
    .bind(column(refused, |one| one.payload))
    .execute(connection)
    .await
    .map(drop)
}

/// Notes that these were replayed and taken.
pub async fn mark_replayed(connection: &mut PgConnection, ids: &[Uuid]) -> Result<(), sqlx::Error> {
    if ids.is_empty() {
        return Ok(());
    }
    let mark = sqlx::query("update usage_quarantine set replayed_at = now() where id = any($1)");
    mark.bind(ids).execute(connection).await.map(drop)
}

/// Notes why these were refused again.
pub async fn refuse_again(connection: &mut PgConnection, reasons: &[(Uuid, &Reason)]) -> Result<(), sqlx::Error> {
    if reasons.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "update usage_quarantine known set code = again.code, message = again.message, details = again.details::jsonb
         from unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) as again (id, code, message, details)
         where known.id = again.id and known.replayed_at is null",
    )
    .bind(column(reasons, |(id, _)| *id))
    .bind(column(reasons, |(_, reason)| reason.code.as_str()))
    .bind(column(reasons, |(_, reason)| without_nul(&reason.message)))
    .bind(column(reasons, |(_, reason)| json(&reason.details)))
    .execute(connection)
    .await
    .map(drop)
}

/// An entry that was not replayed yet: where it came from, and its bytes.
#[derive(Debug, FromRow)]
pub struct Size {
    pub id: Uuid,
    pub source_id: String,
    pub bytes: i32,
}

/// Those of a tenant's entries that were not replayed yet.
pub async fn waiting_sizes(database: &PgPool, tenant: &str, ids: &[Uuid]) -> Result<Vec<Size>, sqlx::Error> {
    sqlx::query_as(
        "select id, source_id, octet_length(payload) as bytes from usage_quarantine
         where id = any($1) and tenant_id = $2 and replayed_at is null",
    )
    .bind(ids)
    .bind(tenant)
    .fetch_all(database)
    .await
}

/// What is there to be replayed.
#[derive(Debug, FromRow)]
pub struct Waiting {
    pub id: Uuid,
    pub received_at: DateTime<Utc>,
    pub user_id: Option<String>,
    pub payload: Vec<u8>,
}

/// The same of one source with what they say, as many as fit into so many bytes, and one at least.
pub async fn waiting(
    database: &PgPool,
    origin: Origin<'_>,
    ids: &[Uuid],
    most_bytes: usize,
) -> Result<Vec<Waiting>, sqlx::Error> {
    sqlx::query_as(
        "select id, received_at, user_id, payload from usage_quarantine join (
             select id, sum(octet_length(payload)) over (order by id) - octet_length(payload) as before
             from usage_quarantine
             where id = any($1) and tenant_id = $2 and source_id = $3 and replayed_at is null
         ) as fits using (id) where before < $4 order by id",
    )
    .bind(ids)
    .bind(origin.tenant)
    .bind(origin.source)
    .bind(most_bytes as i64)
    .fetch_all(database)
    .await
}

/// An entry as people look at it.
#[derive(Debug, FromRow)]
pub struct Reviewed {
    pub id: Uuid,
    pub source_id: String,
    pub received_at: DateTime<Utc>,
    pub idempotency_key: Option<String>,
    pub code: String,
    pub message: String,
    pub details: Option<String>,
    pub payload: Vec<u8>,
    pub replayed_at: Option<DateTime<Utc>>,
}

/// A tenant's entries, newest first.
pub async fn quarantined(
    database: &PgPool,
    tenant: &str,
    source: Option<&str>,
    code: Option<&str>,
    include_replayed: bool,
    before: Option<Uuid>,
    most: i64,
) -> Result<Vec<Reviewed>, sqlx::Error> {
    let mut query = QueryBuilder::new(
        "select id, source_id, received_at, idempotency_key, code, message, details::text as details,
             substring(payload from 1 for 20000) as payload, replayed_at
         from usage_quarantine where tenant_id = ",
    );
    query.push_bind(tenant);
    if let Some(source) = source {
        query.push(" and source_id = ").push_bind(source);
    }
    if let Some(code) = code {
        query.push(" and code = ").push_bind(code);
    }
    if !include_replayed {
        query.push(" and replayed_at is null");
    }
    if let Some(before) = before {
        query.push(" and id < ").push_bind(before);
    }
    query.push(" order by id desc limit ").push_bind(most);
    query.build_query_as().fetch_all(database).await
}

/// Drops what is older. Ids are made when something is refused, so they tell.
pub async fn forget_quarantined(database: &PgPool, kept: Duration) -> Result<u64, sqlx::Error> {
    let forget = sqlx::query("delete from usage_quarantine where id < usage_id_at(now() - make_interval(secs => $1))");
    Ok(forget.bind(kept.as_secs_f64()).execute(database).await?.rows_affected())
}
