//! What the ledger needs now and then: partitions ahead of time, and an end to what is kept for a while.

use std::{sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::retention::Retainer;
use super::store::{backfills::forget_orphans, forget_minutes, forget_quarantined, partitions::extend_partitions};
use crate::error::Code;

const INTERVAL: Duration = Duration::from_secs(3600);

/// Whoever has just started lets nothing go at once: he may have been started with the wrong settings.
const FIRST: Duration = Duration::from_secs(300);

/// A database that does not answer any more must not keep partitions from being made.
const LONGEST: Duration = Duration::from_secs(12 * 3600);

pub struct Upkeep {
    pub database: PgPool,
    pub retention: Arc<Retainer>,
    pub quarantine_kept: Duration,
    pub reconciliation_kept: Duration,
}

impl Upkeep {
    /// Any number of processes may do it.
    pub async fn run(self, stop: CancellationToken) {
        let mut pause = FIRST;
        loop {
            match self.tend().await {
                Ok(0) => {}
                Ok(made) => tracing::info!(made, "usage: partitions were made"),
                Err(error) => tracing::warn!(%error, "usage: upkeep is tried again in a while"),
            }
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
            pause = INTERVAL;
            // It may be broken off anywhere.
            let applying = stop.run_until_cancelled(timeout(LONGEST, self.retention.apply()));
            let Some(applied) = applying.await else { return };
            let Ok(applied) = applied else {
                tracing::warn!("usage: retention took too long, and is tried again in an hour");
                continue;
            };
            match applied {
                Err(error) if error.code == Code::Conflict => tracing::debug!(%error, "usage: somebody else's turn"),
                Ok(report) if report.is_empty() => {}
                Ok(report) => tracing::info!(?report, "usage: what was kept long enough has moved, or is gone"),
                Err(error) => tracing::warn!(%error, "usage: retention is tried again in an hour"),
            }
        }
    }

    async fn tend(&self) -> Result<i32, sqlx::Error> {
        let made = extend_partitions(&self.database).await?;
        forget_quarantined(&self.database, self.quarantine_kept).await?;
        forget_minutes(&self.database, self.reconciliation_kept).await?;
        forget_orphans(&self.database).await?;
        Ok(made)
    }
}
