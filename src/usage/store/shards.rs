//! How far each shard has been written down, and who writes it.

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgConnection, PgPool};

use super::ranges::RANGES;

/// Locks of shards among the database's advisory locks.
const LOCKS: i32 = 0x7469_6465;

/// Tries to become the shard's writer, for as long as this connection lasts. It spares two writers the trouble of
/// standing in each other's way; what keeps them from doing harm is the position.
pub async fn take_shard(connection: &mut PgConnection, shard: i32) -> Result<bool, sqlx::Error> {
    // A writer whose machine is gone lets go within seconds.
    sqlx::query(
        "select set_config('tcp_keepalives_idle', '5', false), set_config('tcp_keepalives_interval', '2', false),
             set_config('tcp_keepalives_count', '3', false)",
    )
    .execute(&mut *connection)
    .await?;
    sqlx::query_scalar("select pg_try_advisory_lock($1, $2)").bind(LOCKS).bind(shard).fetch_one(connection).await
}

/// The shards that have ever been written.
pub async fn shards(database: &PgPool) -> Result<Vec<u16>, sqlx::Error> {
    let known: Vec<i32> =
        sqlx::query_scalar("select shard from usage_shards order by shard").fetch_all(database).await?;
    Ok(known.into_iter().filter_map(|shard| shard.try_into().ok()).collect())
}

/// How far a shard was written down, and in which life of the stream.
#[derive(Debug, Clone, PartialEq, FromRow)]
pub struct Written {
    pub stream_created: String,
    pub position: i64,
}

pub async fn written(connection: &mut PgConnection, shard: i32) -> Result<Option<Written>, sqlx::Error> {
    let written = sqlx::query_as("select stream_created, position from usage_shards where shard = $1");
    written.bind(shard).fetch_optional(connection).await
}

/// Begins with a shard, or again. False if somebody else has written it since.
pub async fn begin_shard(
    connection: &mut PgConnection,
    shard: i32,
    before: Option<&Written>,
    stream_created: &str,
) -> Result<bool, sqlx::Error> {
    let begun = sqlx::query(
        "insert into usage_shards as known (shard, stream_created, position) values ($1, $2, 0)
         on conflict (shard) do update set stream_created = excluded.stream_created, position = 0, updated_at = now()
             where known.stream_created = $3 and known.position = $4",
    );
    let begun = begun
        .bind(shard)
        .bind(stream_created)
        .bind(before.map(|before| before.stream_created.as_str()))
        .bind(before.map(|before| before.position));
    Ok(begun.execute(connection).await?.rows_affected() == 1)
}

/// After the ledger and the stream were put back, each to a moment of its own: what the stream has is read again, and the ledger
/// knows what it knows. Sequences of before say nothing about it.
pub async fn forget_positions(database: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::query("update usage_shards set stream_created = 'restored'").execute(database).await.map(drop)
}

/// Moves the position, if it is where we left it. Whoever finds it elsewhere is not the writer any more. From then on the
/// ranges that somebody works on stay as they are until the transaction ends.
pub async fn move_position(
    connection: &mut PgConnection,
    shard: i32,
    stream_created: &str,
    from: i64,
    to: i64,
    judged_until: DateTime<Utc>,
) -> Result<bool, sqlx::Error> {
    let moved = sqlx::query(
        "update usage_shards set position = $4, judged_until = greatest(judged_until, $5), updated_at = now()
         where shard = $1 and stream_created = $2 and position = $3 returning pg_advisory_xact_lock_shared($6)",
    );
    let moved = moved
        .bind(shard)
        .bind(stream_created)
        .bind(from)
        .bind(to)
        .bind(judged_until)
        .bind(RANGES)
        .execute(connection)
        .await?;
    Ok(moved.rows_affected() == 1)
}
