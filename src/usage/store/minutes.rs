//! What came and what became of it, by source and minute.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, DurationRound, TimeDelta, Utc};
use sqlx::{PgConnection, PgPool};

use super::column;
use crate::api::usage::Minute;

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MinuteKey {
    pub tenant: String,
    pub source: String,
    pub minute: DateTime<Utc>,
}

impl MinuteKey {
    pub fn new(tenant: &str, source: &str, at: DateTime<Utc>) -> Self {
        let minute = at.duration_trunc(TimeDelta::minutes(1)).unwrap_or(at);
        Self { tenant: tenant.to_owned(), source: source.to_owned(), minute }
    }
}

/// How many records there were of each kind. All that came are the sum.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Count {
    pub accepted: i64,
    pub duplicates: i64,
    pub rejected: i64,
}

impl Count {
    pub fn reject(&mut self, records: usize) {
        self.rejected += records as i64;
    }

    pub fn add(&mut self, other: Self) {
        self.accepted += other.accepted;
        self.duplicates += other.duplicates;
        self.rejected += other.rejected;
    }

    pub fn emitted(&self) -> i64 {
        self.accepted + self.duplicates + self.rejected
    }
}

/// Adds to the minutes. In the same order by everyone.
pub async fn add_minutes(
    connection: &mut PgConnection,
    minutes: &HashMap<MinuteKey, Count>,
) -> Result<(), sqlx::Error> {
    let mut minutes: Vec<_> = minutes.iter().collect();
    minutes.sort_by_key(|(key, _)| *key);
    sqlx::query(
        "insert into usage_minutes as known (tenant_id, source_id, minute, emitted, accepted, duplicates, rejected)
         select * from unnest($1::text[], $2::text[], $3::timestamptz[], $4::bigint[], $5::bigint[], $6::bigint[],
             $7::bigint[])
         on conflict (tenant_id, source_id, minute) do update set emitted = known.emitted + excluded.emitted,
             accepted = known.accepted + excluded.accepted, duplicates = known.duplicates + excluded.duplicates,
             rejected = known.rejected + excluded.rejected",
    )
    .bind(column(&minutes, |(key, _)| key.tenant.as_str()))
    .bind(column(&minutes, |(key, _)| key.source.as_str()))
    .bind(column(&minutes, |(key, _)| key.minute))
    .bind(column(&minutes, |(_, count)| count.emitted()))
    .bind(column(&minutes, |(_, count)| count.accepted))
    .bind(column(&minutes, |(_, count)| count.duplicates))
    .bind(column(&minutes, |(_, count)| count.rejected))
    .execute(connection)
    .await
    .map(drop)
}

/// A tenant's minutes, newest first.
pub async fn minutes(
    database: &PgPool,
    tenant: &str,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    most: i64,
) -> Result<Vec<Minute>, sqlx::Error> {
    let rows: Vec<(String, DateTime<Utc>, i64, i64, i64, i64)> = sqlx::query_as(
        "select source_id, minute, emitted, accepted, duplicates, rejected from usage_minutes
         where tenant_id = $1 and minute >= $2 and minute < $3 order by minute desc, source_id limit $4",
    )
    .bind(tenant)
    .bind(from)
    .bind(to)
    .bind(most)
    .fetch_all(database)
    .await?;
    let minute = |(source_id, minute, emitted, accepted, duplicates, rejected)| Minute {
        source_id,
        minute,
        emitted,
        accepted,
        duplicates,
        rejected,
    };
    Ok(rows.into_iter().map(minute).collect())
}

/// Drops what is older.
pub async fn forget_minutes(database: &PgPool, kept: Duration) -> Result<u64, sqlx::Error> {
    let forget = sqlx::query("delete from usage_minutes where minute < now() - make_interval(secs => $1)");
    Ok(forget.bind(kept.as_secs_f64()).execute(database).await?.rows_affected())
}
