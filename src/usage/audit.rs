//! Every change of what governs the ledger leaves a row, also one that failed half-way.

use std::future::Future;

use serde_json::Value;
use sqlx::PgPool;

use super::{Usage, store::unavailable};
use crate::{
    api::{Context, Name},
    database::json_without_nul,
    error::Result,
};

/// What is about to be changed.
pub struct Change<'a> {
    pub operation: &'static str,
    pub tenant: Option<&'a Name>,
    pub details: Value,
}

impl Usage {
    /// Makes a change between two entries: that it was begun, and how it ended. Without the first it is not made.
    pub(super) async fn audited<T>(
        &self,
        change: Change<'_>,
        context: &Context,
        making: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let entry = begin(&self.database, &change, context).await.map_err(unavailable)?;
        let made = making.await;
        let outcome = match &made {
            Ok(_) => "done".to_owned(),
            Err(error) => format!("{}: {error}", error.code),
        };
        if let Err(error) = end(&self.database, entry, &outcome).await {
            tracing::warn!(%error, operation = change.operation, outcome, "the end of a change was not audited");
        }
        made
    }
}

async fn begin(database: &PgPool, change: &Change<'_>, context: &Context) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "insert into usage_audit (actor, request_id, operation, tenant_id, details)
         values ($1, $2, $3, $4, $5::jsonb) returning id",
    )
    .bind(context.actor())
    .bind(context.request_id().as_deref())
    .bind(change.operation)
    .bind(change.tenant.map(Name::as_str))
    .bind(json_without_nul(&change.details))
    .fetch_one(database)
    .await
}

async fn end(database: &PgPool, entry: i64, outcome: &str) -> Result<(), sqlx::Error> {
    let update = sqlx::query("update usage_audit set outcome = $2 where id = $1");
    update.bind(entry).bind(outcome).execute(database).await.map(drop)
}
