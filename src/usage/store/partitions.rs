//! Partitions of the ledger, made before they are needed.

use sqlx::PgPool;

/// Makes sure that the next four weeks have their partitions. Returns how many were made.
pub async fn extend_partitions(database: &PgPool) -> Result<i32, sqlx::Error> {
    let extend = sqlx::query_scalar("select usage_extend_partitions(now() + interval '4 weeks')");
    extend.fetch_one(database).await
}
