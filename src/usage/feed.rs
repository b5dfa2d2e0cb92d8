//! The feed: records in the order in which they were accepted, from a position.
//!
//! A page by event time silently misses a record that comes late. The feed does not: each lane's head is held by whoever
//! moves it until he has committed, so whoever has read up to a head has read all that will ever be before it. The live lane is
//! read before the corrections that were there at the same moment, so no correction comes before its record.

use std::{fmt, str::FromStr, time::Duration};

use chrono::{DateTime, Utc};
use futures::StreamExt;
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout_at};
use uuid::Uuid;

use super::{
    Usage,
    query::{fitting, within},
    record::invalid_field,
    store::{self, FeedHeads, Lane, Listed, Row, unavailable},
};
use crate::{
    api::{
        Call, Handle, Name, ReplyHeaders,
        usage::{FeedPage, FeedRequest, MOST_OF_THE_FEED, PAGE, ReadFeed},
    },
    error::{Code, Error, Result},
    events::Events,
};

/// How long an answer may be held back.
const MOST_WAIT: f64 = 25.0;

/// Whoever waits looks again after this, should the news have been lost.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// News for those who wait: `tm.event.usage.fed.<tenant>`.
pub async fn tell(events: &Events, tenant: &str) {
    events.send(format!("usage.fed.{tenant}"), &json!({ "tenant": tenant })).await;
}

/// How far a reader has come in both lanes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Position {
    live: i64,
    corrections: i64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.live, self.corrections)
    }
}

impl FromStr for Position {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse::<i64>().map_err(drop),
            false => Err(()),
        };
        let (live, corrections) = text.split_once('-').ok_or(())?;
        Ok(Self { live: number(live)?, corrections: number(corrections)? })
    }
}

impl Handle<ReadFeed> for Usage {
    async fn handle(&self, call: Call<ReadFeed>) -> Result<FeedPage> {
        let (tenant, request) = (&call.target, &call.request);
        let limit = within("limit", request.limit, PAGE, MOST_OF_THE_FEED)?;
        let from = position(request)?;
        let wait = request.wait.unwrap_or(0.0);
        if !(0.0..=MOST_WAIT).contains(&wait) {
            return Err(invalid_field("wait", format_args!("must lie between 0 and {MOST_WAIT} seconds")));
        }
        let mut page = self.feed(tenant, from, limit).await?;
        if page.records.is_empty() && wait > 0.0 {
            let Some(_turn) = self.waiting_turns.try_take(tenant) else {
                let message = "too many wait for this tenant's feed already";
                return Err(Error::new(Code::RateLimited, message).retry_after(LOOK_AGAIN));
            };
            // An answer must come before whoever passes it on has given up.
            let wait = Duration::from_secs_f64(wait).min(self.longest_wait);
            page = self.feed_later(tenant, from, limit, Instant::now() + wait).await?;
        }
        call.context.reply.set(ReplyHeaders::NEXT_POSITION, &page.next_position);
        Ok(page)
    }
}

fn position(request: &FeedRequest) -> Result<Position> {
    match request.position.as_deref() {
        None | Some("") => Ok(Position::default()),
        Some(text) => text.parse().map_err(|()| invalid_field("position", "must be the next_position of a page")),
    }
}

impl Usage {
    /// Waits for something new.
    async fn feed_later(&self, tenant: &Name, from: Position, limit: usize, deadline: Instant) -> Result<FeedPage> {
        // Without news it is looked now and then.
        let mut news = self.events.follow(format!("usage.fed.{tenant}")).await.ok();
        loop {
            // Also right after listening has begun.
            let page = self.feed(tenant, from, limit).await?;
            if !page.records.is_empty() || Instant::now() >= deadline {
                return Ok(page);
            }
            let heard = async {
                match &mut news {
                    Some(news) => news.next().await,
                    None => None,
                }
            };
            let look_at = deadline.min(Instant::now() + LOOK_AGAIN);
            if let Ok(None) = timeout_at(look_at, heard).await {
                news = None;
                sleep_until(look_at).await;
            }
        }
    }

    async fn feed(&self, tenant: &Name, from: Position, limit: usize) -> Result<FeedPage> {
        let _turn = self.reading_turns.take(tenant).await?;
        let tenant = tenant.as_str();
        let heads = store::feed_heads(&self.reading, tenant, self.shards).await.map_err(unavailable)?;
        if from.live > heads.live || from.corrections > heads.corrections {
            let problem = "is ahead of the ledger: it belongs to another tenant, or the ledger was put back";
            return Err(invalid_field("position", problem));
        }
        let mut reading = Reading { position: from, watermark: None, records: Vec::new(), bytes: self.most_bytes() };
        // More would not fit into a message.
        let limit = limit.min(reading.bytes / Row::LEAST_SIZE);
        self.read_lane(tenant, Lane::Live, heads, limit, &mut reading).await?;
        if reading.position.live == heads.live {
            self.read_lane(tenant, Lane::Corrections, heads, limit, &mut reading).await?;
        }
        if (reading.position.live, reading.position.corrections) == (heads.live, heads.corrections) {
            reading.watermark = heads.judged_until;
        }
        let Reading { position, watermark, records, .. } = reading;
        let records = records.into_iter().map(|told: Told| told.row.record()).collect::<Result<_>>()?;
        Ok(FeedPage { records, next_position: position.to_string(), watermark })
    }

    /// Reads on in one lane, as far as there is room.
    async fn read_lane(
        &self,
        tenant: &str,
        lane: Lane,
        heads: FeedHeads,
        limit: usize,
        reading: &mut Reading,
    ) -> Result<()> {
        let (position, head) = match lane {
            Lane::Live => (&mut reading.position.live, heads.live),
            Lane::Corrections => (&mut reading.position.corrections, heads.corrections),
        };
        let up_to = head.min(*position + (limit - reading.records.len()) as i64);
        if up_to == *position {
            return Ok(());
        }
        let mut told = self.told(tenant, lane, *position, up_to).await?;
        let fitting = if reading.bytes == 0 { 0 } else { fitting(told.iter().map(|told| &told.row), reading.bytes) };
        // What is not kept any more is passed over.
        *position = match told.get(fitting) {
            Some(next) => next.position - 1,
            None => up_to,
        };
        told.truncate(fitting);
        reading.bytes = reading.bytes.saturating_sub(told.iter().map(|told| told.row.size()).sum());
        if lane == Lane::Live {
            reading.watermark = told.iter().rev().find_map(|told| told.until);
        }
        reading.records.extend(told);
        Ok(())
    }
}

/// One entry of the feed.
struct Told {
    position: i64,
    /// Of the last entry of a transaction.
    until: Option<DateTime<Utc>>,
    row: Row,
}

impl Usage {
    /// The entries after one position, up to another. What is not kept any more is left out.
    async fn told(&self, tenant: &str, lane: Lane, after: i64, up_to: i64) -> Result<Vec<Told>> {
        let listed = store::listed(&self.reading, tenant, lane, after, up_to).await.map_err(unavailable)?;
        let wanted: Vec<(Uuid, i32)> = listed.iter().map(|one| (one.id, one.revision)).collect();
        let here = async { store::find(&mut *self.reading.acquire().await?, &wanted).await };
        let mut rows = here.await.map_err(unavailable)?;
        let missing: Vec<(Uuid, i32)> = wanted.into_iter().filter(|one| !rows.contains_key(one)).collect();
        rows.extend(self.historical.found(&self.reading, &missing).await?);
        // One that was corrected twice is told twice.
        let each_once = rows.len() == listed.len();
        let mut row_of = |key: (Uuid, i32)| if each_once { rows.remove(&key) } else { rows.get(&key).cloned() };
        let told =
            |Listed { position, until, id, revision }| row_of((id, revision)).map(|row| Told { position, until, row });
        Ok(listed.into_iter().filter_map(told).collect())
    }
}

/// A page while it is read.
struct Reading {
    position: Position,
    watermark: Option<DateTime<Utc>>,
    records: Vec<Told>,
    /// What is left of a message.
    bytes: usize,
}
