//! The feed: what was written of a tenant, in the order in which it was committed.

use std::collections::{HashMap, hash_map};

use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use sqlx::{FromRow, PgConnection, PgPool};
use uuid::Uuid;

use super::{
    column,
    ledger::{Row, columns},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// What the sink accepts.
    Live,
    /// What is changed afterwards.
    Corrections,
}

impl Lane {
    fn as_str(self) -> &'static str {
        match self {
            Lane::Live => "live",
            Lane::Corrections => "corrections",
        }
    }
}

/// One thing that is told by the feed.
pub struct Entry<'a> {
    pub tenant: &'a str,
    pub id: Uuid,
    pub revision: i32,
}

/// Adds to the feed, in this order. The heads are held until the transaction ends, so this comes last in it.
pub async fn append_feed(
    connection: &mut PgConnection,
    lane: Lane,
    until: DateTime<Utc>,
    entries: &[Entry<'_>],
) -> Result<(), sqlx::Error> {
    if entries.is_empty() {
        return Ok(());
    }
    let amended = entries.iter().any(|entry| entry.revision != 1);
    sqlx::query(
        "with entries as (
             select tenant, count(*) as records, array_agg(id order by nth) as ids,
                 array_agg(revision order by nth) as revisions
             from unnest($1::text[], $2::uuid[], $3::integer[]) with ordinality as entry (tenant, id, revision, nth)
             group by tenant
         ), moved as (
             insert into usage_feed_heads as known (tenant_id, lane, position)
             select tenant, $4, records from entries order by tenant
             on conflict (tenant_id, lane) do update set position = known.position + excluded.position
             returning tenant_id, position
         )
         insert into usage_feed (tenant_id, lane, position, ids, revisions, until)
         select tenant_id, $4, position, ids, case when $5 then revisions end,
             least($6, (select min(arrived_at) from usage_parked parked where parked.tenant_id = moved.tenant_id),
                 (select min(judged_until) from usage_shards where shard >= 0))
         from moved join entries on tenant = tenant_id",
    )
    .bind(column(entries, |entry| entry.tenant))
    .bind(column(entries, |entry| entry.id))
    .bind(column(entries, |entry| entry.revision))
    .bind(lane.as_str())
    .bind(amended)
    .bind(until)
    .execute(connection)
    .await
    .map(drop)
}

/// How far a tenant's feed has come, in one moment.
#[derive(Debug, Clone, Copy, PartialEq, FromRow)]
pub struct FeedHeads {
    pub live: i64,
    pub corrections: i64,
    /// All that the stream had until then is judged. None while a shard has never been read.
    pub judged_until: Option<DateTime<Utc>>,
}

pub async fn feed_heads(database: &PgPool, tenant: &str, shards: u16) -> Result<FeedHeads, sqlx::Error> {
    // A tenant's shard depends on how many there are, and there may have been others: the slowest counts. What could not
    // be rewritten into a shard is nobody's.
    sqlx::query_as(
        "select coalesce(max(position) filter (where lane = 'live'), 0) as live,
             coalesce(max(position) filter (where lane = 'corrections'), 0) as corrections,
             (select least(min(judged_until), (select min(arrived_at) from usage_parked where tenant_id = $1))
              from usage_shards where shard >= 0
              having count(judged_until) = count(*) and count(*) >= $2) as judged_until
         from usage_feed_heads where tenant_id = $1",
    )
    .bind(tenant)
    .bind(i64::from(shards))
    .fetch_one(database)
    .await
}

/// What one transaction told.
#[derive(Debug, FromRow)]
struct Telling {
    /// Of the last entry.
    position: i64,
    ids: Vec<Uuid>,
    revisions: Option<Vec<i32>>,
    until: DateTime<Utc>,
}

/// A record that the feed tells of.
#[derive(Debug, Clone, Copy)]
pub struct Listed {
    pub position: i64,
    /// Of the last entry of a transaction.
    pub until: Option<DateTime<Utc>>,
    pub id: Uuid,
    pub revision: i32,
}

/// The entries after one position, up to another.
pub async fn listed(
    database: &PgPool,
    tenant: &str,
    lane: Lane,
    after: i64,
    up_to: i64,
) -> Result<Vec<Listed>, sqlx::Error> {
    // The first transaction that reaches the end is the last that is needed.
    let tellings: Vec<Telling> = sqlx::query_as(
        "select position, ids, revisions, until from usage_feed
         where tenant_id = $1 and lane = $2 and position > $3 and position <= (
             select position from usage_feed where tenant_id = $1 and lane = $2 and position >= $4
             order by position limit 1)
         order by position",
    )
    .bind(tenant)
    .bind(lane.as_str())
    .bind(after)
    .bind(up_to)
    .fetch_all(database)
    .await?;
    let mut listed = Vec::new();
    for Telling { position: last, ids, revisions, until } in tellings {
        let first = last - ids.len() as i64 + 1;
        for (index, (id, position)) in ids.into_iter().zip(first..).enumerate() {
            if position > after && position <= up_to {
                let revision = revisions.as_ref().and_then(|of| of.get(index).copied()).unwrap_or(1);
                listed.push(Listed { position, until: (position == last).then_some(until), id, revision });
            }
        }
    }
    Ok(listed)
}

/// The records of these ids and revisions, each in its place. None for one that is not kept.
pub async fn find(connection: &mut PgConnection, wanted: &[(Uuid, i32)]) -> Result<Vec<Option<Row>>, sqlx::Error> {
    let ids: Vec<Uuid> = wanted.iter().map(|(id, _)| *id).collect();
    let mut rows: Vec<Option<Row>> = wanted.iter().map(|_| None).collect();
    let (mut places, mut twins) = (HashMap::with_capacity(wanted.len()), Vec::new());
    for (place, key) in wanted.iter().enumerate() {
        match places.entry(*key) {
            hash_map::Entry::Vacant(entry) => drop(entry.insert(place)),
            hash_map::Entry::Occupied(entry) => twins.push((place, *entry.get())),
        }
    }
    // The list does not tell which partitions are needed, its bounds do.
    let (least, greatest) = (ids.iter().min().copied(), ids.iter().max().copied());
    let mut found =
        sqlx::query(concat!("select ", columns!(), " from usage_records where id = any($1) and id >= $2 and id <= $3"))
            .bind(ids)
            .bind(least)
            .bind(greatest)
            .fetch(connection);
    while let Some(row) = found.try_next().await? {
        let row = Row::from_row(&row)?;
        if let Some(place) = places.get(&row.key()) {
            rows[*place] = Some(row);
        }
    }
    for (place, first) in twins {
        rows[place] = rows[first].clone();
    }
    Ok(rows)
}
