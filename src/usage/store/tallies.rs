//! What the ledger has of each tenant, source and type.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};

use super::column;

/// Tenant, source and type.
pub type TallyKey<'a> = (&'a str, &'a str, &'a str);

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tally {
    pub records: i64,
    pub earliest: DateTime<Utc>,
    pub latest: DateTime<Utc>,
}

impl Tally {
    pub fn one(at: DateTime<Utc>) -> Self {
        Self { records: 1, earliest: at, latest: at }
    }

    pub fn add(&mut self, other: Self) {
        self.records += other.records;
        self.earliest = self.earliest.min(other.earliest);
        self.latest = self.latest.max(other.latest);
    }
}

/// Adds to the tallies. In the same order by everyone.
pub async fn add_tallies(
    connection: &mut PgConnection,
    tallies: &HashMap<TallyKey<'_>, Tally>,
) -> Result<(), sqlx::Error> {
    if tallies.is_empty() {
        return Ok(());
    }
    let mut tallies: Vec<_> = tallies.iter().collect();
    tallies.sort_by_key(|(key, _)| **key);
    sqlx::query(
        "insert into usage_tallies as known (tenant_id, source_id, usage_type, records, earliest, latest)
         select * from unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::timestamptz[], $6::timestamptz[])
         on conflict (tenant_id, source_id, usage_type) do update set records = known.records + excluded.records,
             earliest = least(known.earliest, excluded.earliest), latest = greatest(known.latest, excluded.latest)",
    )
    .bind(column(&tallies, |(key, _)| key.0))
    .bind(column(&tallies, |(key, _)| key.1))
    .bind(column(&tallies, |(key, _)| key.2))
    .bind(column(&tallies, |(_, tally)| tally.records))
    .bind(column(&tallies, |(_, tally)| tally.earliest))
    .bind(column(&tallies, |(_, tally)| tally.latest))
    .execute(connection)
    .await
    .map(drop)
}

/// A tenant's tallies by source.
pub type Tallies = BTreeMap<String, Tally>;

pub async fn tallies(database: &PgPool, tenant: &str) -> Result<Tallies, sqlx::Error> {
    let rows: Vec<(String, i64, DateTime<Utc>, DateTime<Utc>)> = sqlx::query_as(
        "select source_id, sum(records)::bigint, min(earliest), max(latest) from usage_tallies
         where tenant_id = $1 group by source_id",
    )
    .bind(tenant)
    .fetch_all(database)
    .await?;
    Ok(rows
        .into_iter()
        .map(|(source, records, earliest, latest)| (source, Tally { records, earliest, latest }))
        .collect())
}
