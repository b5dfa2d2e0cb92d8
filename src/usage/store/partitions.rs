//! Partitions of the ledger: made before they are needed, and taken out when they are not.

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use uuid::Uuid;

/// Makes sure that the next four weeks have their partitions. Returns how many were made.
pub async fn extend_partitions(database: &PgPool) -> Result<i32, sqlx::Error> {
    let extend = sqlx::query_scalar("select usage_extend_partitions(now() + interval '4 weeks')");
    extend.fetch_one(database).await
}

/// A partition that was copied.
#[derive(Debug, Clone, Copy)]
pub struct Copied {
    pub rows: i64,
    /// The historical database that has them.
    pub to: Uuid,
}

/// Takes a partition out. False if it is none any more.
pub async fn detach_partition(
    database: &PgPool,
    name: &str,
    older_than: DateTime<Utc>,
    copied: Option<Copied>,
) -> Result<bool, sqlx::Error> {
    let detach = sqlx::query_scalar("select usage_detach_partition($1, $2, $3, $4)");
    let detach = detach.bind(name).bind(older_than);
    let detach = detach.bind(copied.map(|copied| copied.rows)).bind(copied.map(|copied| copied.to));
    detach.fetch_one(database).await
}

/// What was taken out and is not dropped.
pub async fn detached(database: &PgPool) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar("select name from usage_detached order by starts_at").fetch_all(database).await
}

/// Drops it. How many rows it had, unless somebody else did.
pub async fn drop_detached(database: &PgPool, name: &str) -> Result<Option<i64>, sqlx::Error> {
    sqlx::query_scalar("select usage_drop_detached($1)").bind(name).fetch_one(database).await
}
