//! Bringing records back, in the transaction that corrects them.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Historical, away};
use crate::{
    error::Result,
    usage::store::{
        historical::{Frozen, Span, rows_beside, rows_of_record, rows_of_span},
        moved::{Moved, drop_floors, hold_moved, reading, thaw},
        unavailable,
    },
};

/// Rows that are brought back at once.
const BATCH: i64 = 5000;

impl Historical {
    /// Brings back a record that is to be changed, and what it is compared with. Nothing moves until the transaction ends.
    pub async fn thaw_record(&self, transaction: &mut PgConnection, tenant: &str, id: Uuid) -> Result<()> {
        let moved = hold_moved(transaction).await.map_err(unavailable)?;
        if moved.may_have(id) {
            let rows = rows_of_record(&mut *self.reader().await?, tenant, id).await.map_err(away)?;
            // Somebody may be bringing it back for much longer than we need.
            sqlx::raw_sql("set local lock_timeout = '2s'").execute(&mut *transaction).await.map_err(unavailable)?;
            bring(transaction, rows).await?;
            sqlx::raw_sql("set local lock_timeout = default").execute(&mut *transaction).await.map_err(unavailable)?;
        }
        match reading(transaction, tenant, id).await.map_err(unavailable)? {
            Some((series, at)) => {
                self.bring_beside(transaction, &moved, &[series], at, at + TimeDelta::microseconds(1)).await
            }
            None => Ok(()),
        }
    }

    /// Brings back all that a tenant has of a type in some time.
    pub async fn thaw_span(&self, transaction: &mut PgConnection, span: &Span<'_>) -> Result<()> {
        let moved = hold_moved(transaction).await.map_err(unavailable)?;
        if !moved.overlaps(Some(span.from), Some(span.to)) {
            return Ok(());
        }
        let mut there = self.reader().await?;
        let mut after = (Uuid::nil(), 0);
        loop {
            let rows = rows_of_span(&mut there, span, after, BATCH).await.map_err(away)?;
            let is_last = rows.len() < BATCH as usize;
            after = rows.last().map_or(after, |last| (last.id, last.revision));
            bring(transaction, rows).await?;
            if is_last {
                return Ok(());
            }
        }
    }

    /// Brings back the readings beside some time of these counters.
    pub async fn thaw_beside(
        &self,
        transaction: &mut PgConnection,
        series: &[Uuid],
        from: DateTime<Utc>,
        to: DateTime<Utc>,
    ) -> Result<()> {
        let moved = hold_moved(transaction).await.map_err(unavailable)?;
        self.bring_beside(transaction, &moved, series, from, to).await
    }

    async fn bring_beside(
        &self,
        transaction: &mut PgConnection,
        moved: &Moved,
        series: &[Uuid],
        from: DateTime<Utc>,
        to: DateTime<Utc>,
    ) -> Result<()> {
        // What moved before is told by the floors.
        if !moved.overlaps(Some(from), None) {
            return Ok(());
        }
        let rows = rows_beside(&mut *self.reader().await?, series, from, to).await.map_err(away)?;
        bring(transaction, rows).await?;
        drop_floors(transaction, series, from, to).await.map_err(unavailable)
    }
}

async fn bring(transaction: &mut PgConnection, rows: Vec<Frozen>) -> Result<()> {
    let rows: Vec<String> = rows.into_iter().map(|row| row.json).collect();
    thaw(transaction, &rows).await.map_err(unavailable)
}
