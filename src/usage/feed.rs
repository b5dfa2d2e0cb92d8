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
    query::within,
    record::invalid_field,
    store::{self, Lane, Listed, Row, unavailable},
};
use crate::{
    api::{
        Call, Handle, Name, ReplyHeaders,
        usage::{FeedPage, LedgerRecord, MOST_OF_THE_FEED, PAGE, ReadFeed},
    },
    error::{Code, Error, Result},
    events::Events,
};

/// How many positions behind the next one are told.
const AHEAD: i64 = 2;

/// Records that are read before it is known how many fit into a message.
const FIRST_LOOK: usize = 500;

/// How long an answer may be held back.
const MOST_WAIT: f64 = 25.0;

/// Whoever waits looks again after this, should the news have been lost.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// News for those who wait: `tm.event.usage.<tenant>.fed`.
pub async fn tell(events: &Events, tenant: &str) {
    events.send(news_of(tenant), &json!({ "tenant": tenant })).await;
}

fn news_of(tenant: &str) -> String {
    format!("usage.{tenant}.fed")
}

/// How far a reader has come in both lanes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Position {
    live: i64,
    corrections: i64,
}

impl Position {
    fn is_within(self, head: Self) -> bool {
        self.live <= head.live && self.corrections <= head.corrections
    }

    /// Positions behind this one that the live lane has reached.
    fn ahead(self, step: i64, head: Self) -> Vec<Self> {
        let further = (1..=AHEAD).map(|times| Self { live: self.live + times * step, ..self });
        further.take_while(|position| step > 0 && position.live < head.live).collect()
    }
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
        let from = position("position", &request.position)?.unwrap_or_default();
        let until = position("until", &request.until)?;
        let asked = Asked { tenant, from, until, limit };
        let wait = request.wait.unwrap_or(0.0);
        if !(0.0..=MOST_WAIT).contains(&wait) {
            return Err(invalid_field("wait", format_args!("must lie between 0 and {MOST_WAIT} seconds")));
        }
        let mut page = self.feed(&asked).await?;
        if page.is_empty(from) && wait > 0.0 {
            let Some(_turn) = self.waiting_turns.try_take(tenant.as_str()) else {
                let message = "too many wait for this tenant's feed already";
                return Err(Error::new(Code::RateLimited, message).retry_after(LOOK_AGAIN));
            };
            // An answer must come before whoever passes it on has given up.
            let wait = Duration::from_secs_f64(wait).min(self.longest_wait);
            page = self.feed_later(&asked, Instant::now() + wait).await?;
        }
        let Page { records, next, ahead, watermark } = page;
        call.context.reply.set(ReplyHeaders::NEXT_POSITION, next);
        if !ahead.is_empty() {
            let ahead: Vec<String> = ahead.iter().map(Position::to_string).collect();
            call.context.reply.set(ReplyHeaders::POSITIONS_AHEAD, ahead.join(","));
        }
        Ok(FeedPage { records, next_position: next.to_string(), watermark })
    }
}

fn position(field: &str, text: &Option<String>) -> Result<Option<Position>> {
    match text.as_deref() {
        None | Some("") => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|()| invalid_field(field, "must be the next_position of a page")),
    }
}

/// Which part of the feed is read.
struct Asked<'a> {
    tenant: &'a Name,
    from: Position,
    until: Option<Position>,
    limit: usize,
}

struct Page {
    records: Vec<LedgerRecord>,
    next: Position,
    /// Where the pages behind the next one may begin.
    ahead: Vec<Position>,
    watermark: Option<DateTime<Utc>>,
}

impl Page {
    /// Whether there is nothing new. Records that are not kept any more are passed over, which leads on.
    fn is_empty(&self, from: Position) -> bool {
        self.next == from
    }
}

impl Usage {
    /// Waits for something new.
    async fn feed_later(&self, asked: &Asked<'_>, deadline: Instant) -> Result<Page> {
        // Without news it is looked now and then.
        let mut news = self.events.follow(news_of(asked.tenant.as_str())).await.ok();
        loop {
            // Also right after listening has begun.
            let page = self.feed(asked).await?;
            if !page.is_empty(asked.from) || Instant::now() >= deadline || self.leaving.is_cancelled() {
                return Ok(page);
            }
            let heard = async {
                match &mut news {
                    Some(news) => news.next().await,
                    None => None,
                }
            };
            let look_at = deadline.min(Instant::now() + LOOK_AGAIN);
            let waited = self.leaving.run_until_cancelled(timeout_at(look_at, heard)).await;
            if let Some(Ok(None)) = waited {
                news = None;
                self.leaving.run_until_cancelled(sleep_until(look_at)).await;
            }
        }
    }

    async fn feed(&self, asked: &Asked<'_>) -> Result<Page> {
        let &Asked { tenant, from, until, limit } = asked;
        let _turn = self.turn_to_read(tenant).await?;
        let tenant = tenant.as_str();
        let heads = store::feed_heads(&self.reading, tenant, self.shards).await.map_err(unavailable)?;
        let head = Position { live: heads.live, corrections: heads.corrections };
        for (field, position) in [("position", Some(from)), ("until", until)] {
            if position.is_some_and(|position| !position.is_within(head)) {
                let problem = "is ahead of the ledger: it belongs to another tenant, or the ledger was put back";
                return Err(invalid_field(field, problem));
            }
        }
        let end = until.unwrap_or(head);
        if !from.is_within(end) {
            return Err(invalid_field("until", "lies before position"));
        }
        let bytes = self.most_bytes();
        // More would not fit into a message.
        let limit = limit.min(bytes / Row::LEAST_SIZE);
        // Whoever says where his page ends knows from the page before what fits.
        let most = if until.is_some() { limit } else { FIRST_LOOK };
        let mut reading = Reading { position: from, watermark: None, records: Vec::new(), bytes, most };
        self.read_lane(tenant, Lane::Live, end.live, limit, &mut reading).await?;
        let came = (reading.position.live - from.live) as usize;
        let step = like_these(came, bytes - reading.bytes, bytes).min(limit);
        let ahead = reading.position.ahead(step as i64, head);
        if reading.position.live == end.live {
            self.read_lane(tenant, Lane::Corrections, end.corrections, limit, &mut reading).await?;
        }
        let Reading { position: next, watermark, records, .. } = reading;
        let watermark = if next == head { heads.judged_until } else { watermark };
        Ok(Page { records, next, ahead, watermark })
    }

    /// Reads on in one lane, as far as there is room.
    async fn read_lane(&self, tenant: &str, lane: Lane, end: i64, limit: usize, reading: &mut Reading) -> Result<()> {
        let position = match lane {
            Lane::Live => &mut reading.position.live,
            Lane::Corrections => &mut reading.position.corrections,
        };
        let up_to = end.min(*position + (limit - reading.records.len()) as i64);
        if up_to == *position || reading.most == 0 {
            return Ok(());
        }
        let listed = store::listed(&self.reading, tenant, lane, *position, up_to).await.map_err(unavailable)?;
        // What is not kept any more is passed over.
        *position = up_to;
        let mut rest = &listed[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(reading.most.min(rest.len()));
            rest = later;
            let (before, room) = (reading.records.len(), reading.bytes);
            let mut unfitting = None;
            for (listed, row) in now.iter().zip(self.rows(now).await?) {
                let Some(Row { record, size }) = row else { continue };
                if size > reading.bytes && !reading.records.is_empty() {
                    unfitting = Some(listed.position);
                    break;
                }
                reading.bytes = reading.bytes.saturating_sub(size);
                reading.records.push(record);
                if lane == Lane::Live {
                    reading.watermark = listed.until.or(reading.watermark);
                }
            }
            // As many as have room if they are like these: nothing is read in vain.
            let read = reading.records.len() - before;
            reading.most = fitting(read, room - reading.bytes, reading.bytes).unwrap_or(reading.most);
            let unread = rest.first().map(|listed| listed.position).filter(|_| reading.most == 0);
            if let Some(without_room) = unfitting.or(unread) {
                *position = without_room - 1;
                break;
            }
        }
        Ok(())
    }

    /// The records of these entries, each in its place. None for one that is not kept any more.
    async fn rows(&self, listed: &[Listed]) -> Result<Vec<Option<Row>>> {
        let wanted: Vec<(Uuid, i32)> = listed.iter().map(|one| (one.id, one.revision)).collect();
        let here = async { store::find(&mut *self.reading.acquire().await?, &wanted).await };
        let mut rows = here.await.map_err(unavailable)?;
        self.historical.fill_in(&self.reading, &wanted, &mut rows).await?;
        Ok(rows)
    }
}

/// How many fit into so many bytes if they are like those that came. None if nothing is known of them.
fn fitting(came: usize, their_bytes: usize, bytes: usize) -> Option<usize> {
    (came * bytes).checked_div(their_bytes)
}

/// The same, a little less: a page that ends before it was meant to spoils those behind it.
fn like_these(came: usize, their_bytes: usize, bytes: usize) -> usize {
    fitting(came, their_bytes, bytes).map_or(0, |most| most - most / 16)
}

/// A page while it is read.
struct Reading {
    position: Position,
    watermark: Option<DateTime<Utc>>,
    records: Vec<LedgerRecord>,
    /// What is left of a message.
    bytes: usize,
    /// Records that are looked up at once.
    most: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_asked_for_ahead_stay_as_large() {
        const BYTES: usize = 1_000_000;
        let mut came = BYTES / 650;
        for _ in 0..100 {
            came = like_these(came, came * 650, BYTES);
            assert!((1400..1500).contains(&came), "{came}");
        }
        assert_eq!((like_these(0, 0, BYTES), like_these(7, 0, BYTES)), (0, 0), "nothing is known");
    }
}
