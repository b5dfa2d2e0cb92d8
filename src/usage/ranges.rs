//! What this instance knows of the ranges that are closed to live records.
//!
//! It is for requests, which are better refused at once than kept waiting. The sink looks for itself, and what slips by
//! here waits there.

use std::{
    sync::{Arc, RwLock},
    time::Duration,
};

use chrono::{DateTime, Utc};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{json, value::RawValue};
use sqlx::PgPool;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::store::ranges::{BusyRange, busy_ranges};
use crate::{
    error::{Code, Error},
    events::Events,
};

/// How old the knowledge may be, should the news have been lost.
const AGE: Duration = Duration::from_secs(1);

/// What whoever is refused should wait.
const RETRY: Duration = Duration::from_secs(1);

const NEWS: &str = "usage.ranges";

pub struct Ranges {
    known: RwLock<Arc<Vec<BusyRange>>>,
    events: Events,
}

/// Why a record can't be taken now.
pub fn closed(range: &BusyRange) -> Error {
    let message = "a backfill replaces the records of this range: send it again later";
    Error::new(Code::BackfillInProgress, message).retry_after(RETRY).details(json!({
        "retry_after_ms": RETRY.as_millis() as u64,
        "locked_range": { "from": range.range_start, "to": range.range_end },
        "backfill_id": range.operation_id,
    }))
}

impl Ranges {
    pub fn new(events: Events) -> Self {
        Self { known: RwLock::default(), events }
    }

    /// Keeps up with what changes elsewhere.
    pub async fn follow(self: Arc<Self>, database: PgPool, stop: CancellationToken) {
        let follow = async {
            loop {
                if let Ok(mut news) = self.events.follow(NEWS.to_owned()).await {
                    while !matches!(timeout(AGE, news.next()).await, Ok(None)) {
                        self.refresh(&database).await;
                    }
                }
                self.refresh(&database).await;
                tokio::time::sleep(AGE).await;
            }
        };
        stop.run_until_cancelled(follow).await;
    }

    async fn refresh(&self, database: &PgPool) {
        let read = async { busy_ranges(&mut *database.acquire().await?).await };
        match read.await {
            Ok(ranges) => *self.known.write().expect(UNBROKEN) = Arc::new(ranges),
            Err(error) => tracing::debug!(%error, "usage: closed ranges are not known right now"),
        }
    }

    /// After a change: here at once, elsewhere soon.
    pub async fn changed(&self, database: &PgPool) {
        self.refresh(database).await;
        self.events.send(NEWS.to_owned(), &json!({})).await;
    }

    /// Why these can't be taken now: the first of them that falls into a closed range. A request is taken as a whole or not
    /// at all, for its sender sends it again as a whole.
    pub fn refusal(&self, tenant: &str, records: &[&RawValue]) -> Option<Error> {
        #[derive(Deserialize)]
        struct Placed {
            usage_type: String,
            event_timestamp: DateTime<Utc>,
        }
        let known = self.known.read().expect(UNBROKEN).clone();
        let closing: Vec<&BusyRange> =
            known.iter().filter(|range| range.blocking && range.tenant_id == tenant && is_open(range)).collect();
        if closing.is_empty() {
            return None;
        }
        records.iter().find_map(|raw| {
            let Placed { usage_type, event_timestamp } = serde_json::from_str(raw.get()).ok()?;
            let range = closing.iter().find(|range| range.covers(tenant, &usage_type, event_timestamp))?;
            Some(closed(range))
        })
    }
}

/// While the database is away, what is known of a range grows old.
fn is_open(range: &BusyRange) -> bool {
    range.lease_until > Utc::now()
}

const UNBROKEN: &str = "no panic while ranges are held";
