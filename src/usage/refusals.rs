//! Records that were refused with their request, counted for the reconciliation.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use super::store::{Count, MinuteKey, add_minutes};
use crate::api::Name;

const FLUSH: Duration = Duration::from_secs(1);

/// Minutes that are kept while the database is away.
const MOST_KEPT: usize = 100_000;

#[derive(Default)]
pub struct Refusals(Mutex<HashMap<MinuteKey, Count>>);

impl Refusals {
    pub fn count(&self, tenant: &Name, source: &Name, at: DateTime<Utc>, records: usize) {
        metrics::counter!("tidemark_usage_refused_records_total").increment(records as u64);
        let mut minutes = self.0.lock().expect(UNBROKEN);
        let key = MinuteKey::new(tenant.as_str(), source.as_str(), at);
        if minutes.len() < MOST_KEPT || minutes.contains_key(&key) {
            minutes.entry(key).or_default().reject(records);
        }
    }

    /// Writes them down now and then, and a last time at the end.
    pub async fn write(self: Arc<Self>, database: PgPool, stop: CancellationToken) {
        loop {
            let goes_on = stop.run_until_cancelled(tokio::time::sleep(FLUSH)).await.is_some();
            self.flush(&database).await;
            if !goes_on {
                return;
            }
        }
    }

    async fn flush(&self, database: &PgPool) {
        let minutes = std::mem::take(&mut *self.0.lock().expect(UNBROKEN));
        if minutes.is_empty() {
            return;
        }
        let written = async { add_minutes(&mut *database.acquire().await?, &minutes).await };
        if let Err(error) = written.await {
            tracing::debug!(%error, "refusals are counted later");
            let mut kept = self.0.lock().expect(UNBROKEN);
            minutes.into_iter().for_each(|(key, count)| kept.entry(key).or_default().add(count));
        }
    }
}

const UNBROKEN: &str = "no panic while refusals are held";
