//! Reading timers.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Timers, store::Page};
use crate::{
    api::{
        Call, Handle,
        timers::{
            Attempts, GetTimer, GetTimerSecrets, ListAttempts, ListTimers, MOST_LISTED, Order, Sort, Timer, TimerPage,
            TimerSummary,
        },
    },
    error::{Error, Result},
};

const LISTED: i64 = 50;
const MOST_ATTEMPTS: i64 = 200;

impl Handle<GetTimer> for Timers {
    async fn handle(&self, call: Call<GetTimer>) -> Result<Timer> {
        self.rates.admit(&call.target)?;
        Ok(self.store.get(&call.target, call.request.id.0).await?.timer(false))
    }
}

impl Handle<GetTimerSecrets> for Timers {
    async fn handle(&self, call: Call<GetTimerSecrets>) -> Result<Timer> {
        self.rates.admit(&call.target)?;
        Ok(self.store.get(&call.target, call.request.id.0).await?.timer(true))
    }
}

impl Handle<ListAttempts> for Timers {
    async fn handle(&self, call: Call<ListAttempts>) -> Result<Attempts> {
        self.rates.admit(&call.target)?;
        Ok(Attempts { attempts: self.store.attempts(&call.target, call.request.id.0, MOST_ATTEMPTS).await? })
    }
}

impl Handle<ListTimers> for Timers {
    async fn handle(&self, call: Call<ListTimers>) -> Result<TimerPage> {
        self.rates.admit(&call.target)?;
        let filter = call.request;
        let (limit, offset) = (filter.limit.unwrap_or(LISTED), filter.offset.unwrap_or_default());
        if !(1..=MOST_LISTED).contains(&limit) {
            return Err(Error::field("limit", format!("must lie between 1 and {MOST_LISTED}")));
        }
        if offset < 0 {
            return Err(Error::field("offset", "must not be negative"));
        }
        let (sort, order) = (filter.sort.unwrap_or_default(), filter.order.unwrap_or_default());
        let after = filter.cursor.as_deref().map(|text| Cursor::read(text, sort, order)).transpose()?;
        if after.is_some() && filter.offset.is_some() {
            return Err(Error::field("offset", "and cursor can't both be given"));
        }
        if filter.metadata.iter().any(|(member, text)| member.contains('\0') || text.contains('\0')) {
            return Err(Error::field("metadata", "must not contain U+0000"));
        }
        let page = Page {
            tenant: &call.target,
            status: filter.status,
            metadata: &filter.metadata,
            sort,
            order,
            limit,
            offset,
            after: after.map(|cursor| (cursor.at, cursor.id)),
        };
        let (timers, total) = self.store.list(&page).await?;
        let is_full = timers.len() as i64 == limit;
        let next_cursor = timers.last().filter(|_| is_full).map(|last| Cursor::behind(last, sort, order));
        Ok(TimerPage { timers, total, limit, offset, next_cursor })
    }
}

/// Where a page ended. Only we read it.
#[derive(Serialize, Deserialize)]
struct Cursor {
    sort: Sort,
    order: Order,
    at: DateTime<Utc>,
    id: Uuid,
}

impl Cursor {
    fn behind(last: &TimerSummary, sort: Sort, order: Order) -> String {
        let at = match sort {
            Sort::CreatedAt => last.created_at,
            Sort::ExecuteAt => last.execute_at,
        };
        let cursor = Self { sort, order, at, id: last.id.0 };
        BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(&cursor).expect("plain values are JSON"))
    }

    fn read(text: &str, sort: Sort, order: Order) -> Result<Self> {
        let decoded = BASE64_URL_SAFE_NO_PAD.decode(text).ok();
        let cursor: Option<Self> = decoded.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match cursor {
            Some(cursor) if (cursor.sort, cursor.order) == (sort, order) => Ok(cursor),
            Some(_) => Err(Error::field("cursor", "belongs to another sort or order")),
            None => Err(Error::field("cursor", "is none of ours")),
        }
    }
}
