//! What is due when.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use sqlx::{Row, postgres::PgRow};
use uuid::Uuid;

use super::{Store, bounded};
use crate::timers::callback::NATS;

/// A timer that waits for its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub due_at: DateTime<Utc>,
    pub id: Uuid,
    pub destination: Arc<str>,
}

impl Entry {
    fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let destination: &str = row.try_get("destination")?;
        Ok(Self { due_at: row.try_get("due_at")?, id: row.try_get("id")?, destination: destination.into() })
    }
}

impl Store {
    /// The pending timers of one span of time.
    pub async fn due_between(&self, from: DateTime<Utc>, to: DateTime<Utc>) -> Result<Vec<Entry>, sqlx::Error> {
        let rows = sqlx::query(
            "select id, due_at, destination from timers where status = 'pending' and due_at >= $1 and due_at < $2",
        )
        .bind(from)
        .bind(to)
        .fetch_all(&self.pool);
        bounded(rows).await?.iter().map(Entry::of).collect()
    }

    /// The pending timers whose time has passed, the oldest first: those for NATS, or the others, but for some destinations.
    pub async fn overdue(&self, for_nats: bool, but_for: &[Arc<str>], most: i64) -> Result<Vec<Entry>, sqlx::Error> {
        let rows = sqlx::query(
            "select id, due_at, destination from timers where status = 'pending' and due_at <= now()
                 and (destination = $1) = $2 and destination <> all($4)
             order by due_at limit $3",
        )
        .bind(NATS)
        .bind(for_nats)
        .bind(most)
        .bind(but_for.iter().map(|name| name.to_string()).collect::<Vec<_>>())
        .fetch_all(&self.pool);
        bounded(rows).await?.iter().map(Entry::of).collect()
    }

    /// Those of the timers that are pending, and PostgreSQL's clock.
    pub(super) async fn still_pending(&self, ids: &[Uuid]) -> Result<(Option<DateTime<Utc>>, Vec<Entry>), sqlx::Error> {
        let rows = sqlx::query(
            "select id, due_at, destination, clock_timestamp() as now from timers
             where id = any($1) and status = 'pending'",
        )
        .bind(ids)
        .fetch_all(&self.pool);
        let rows = bounded(rows).await?;
        let now = rows.first().map(|row| row.try_get("now")).transpose()?;
        Ok((now, rows.iter().map(Entry::of).collect::<Result<_, _>>()?))
    }

    /// The seconds before a moment in which a timer is due. Goes from second to second through the index, however many
    /// timers share one.
    pub async fn seconds_until(&self, horizon: DateTime<Utc>) -> Result<Vec<i64>, sqlx::Error> {
        sqlx::query_scalar(
            "with recursive seconds (second) as (
                 (select date_trunc('second', due_at) from timers
                  where status = 'pending' and due_at > now() and due_at < $1 order by due_at limit 1)
                 union all
                 select (select date_trunc('second', due_at) from timers
                         where status = 'pending' and due_at >= seconds.second + interval '1 second' and due_at < $1
                         order by due_at limit 1)
                 from seconds where second is not null
             )
             select extract(epoch from second)::bigint from seconds where second is not null",
        )
        .bind(horizon)
        .fetch_all(&self.pool)
        .await
    }

    /// How many timers wait, counted up to a bound.
    pub async fn pending(&self, most: i64) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar("select count(*) from (select 1 from timers where status = 'pending' limit $1) as pending")
            .bind(most)
            .fetch_one(&self.pool)
            .await
    }
}
