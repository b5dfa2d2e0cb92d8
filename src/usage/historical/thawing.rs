//! Bringing records back, in the transaction that corrects them.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Historical, away};
use crate::{
    error::Result,
    usage::store::{
        Place,
        historical::{Frozen, Span, rows_beside, rows_of_moment, rows_of_record, rows_of_span},
        moved::{Moved, drop_floors, hold_moved, hold_thaw, reading, thaw},
        unavailable,
    },
};

/// Rows that are brought back at once.
const BATCH: i64 = 5000;

/// Counters whose neighbours are looked for at once.
const SERIES: usize = 1000;

impl Historical {
    /// Brings back a record that is to be changed, and what it is compared with. Nothing moves until the transaction ends.
    pub async fn thaw_record(&self, transaction: &mut PgConnection, tenant: &str, id: Uuid) -> Result<()> {
        let moved = hold_moved(transaction).await.map_err(unavailable)?;
        // Somebody may be bringing it back for much longer than we need.
        sqlx::raw_sql("set local lock_timeout = '2s'").execute(&mut *transaction).await.map_err(unavailable)?;
        if !moved.is_empty() {
            hold_thaw(transaction, tenant).await.map_err(unavailable)?;
        }
        if moved.may_have(id) {
            let rows = rows_of_record(&mut *self.reader().await?, tenant, id).await.map_err(away)?;
            bring(transaction, &moved, rows).await?;
        }
        if let Some((series, at)) = reading(transaction, tenant, id).await.map_err(unavailable)? {
            if moved.overlaps(Some(at), None) {
                let rows = rows_of_moment(&mut *self.reader().await?, series, at).await.map_err(away)?;
                bring(transaction, &moved, rows).await?;
            }
            self.bring_beside(transaction, &moved, &[series], at, at + TimeDelta::microseconds(1)).await?;
        }
        sqlx::raw_sql("set local lock_timeout = default").execute(transaction).await.map_err(unavailable)?;
        Ok(())
    }

    /// Brings back all that a tenant has of a type in some time.
    pub async fn thaw_span(&self, transaction: &mut PgConnection, span: &Span<'_>) -> Result<()> {
        let moved = hold_moved(transaction).await.map_err(unavailable)?;
        if !moved.overlaps(Some(span.from), Some(span.to)) {
            return Ok(());
        }
        let mut after = Place { event_timestamp: span.from, id: Uuid::nil(), revision: 0 };
        loop {
            // Not for long: others want to read there.
            let rows = rows_of_span(&mut *self.reader().await?, span, after, BATCH).await.map_err(away)?;
            let is_last = rows.len() < BATCH as usize;
            after = rows.last().map_or(after, Frozen::place);
            bring(transaction, &moved, rows).await?;
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
        for series in series.chunks(SERIES) {
            self.bring_beside(transaction, &moved, series, from, to).await?;
        }
        Ok(())
    }

    async fn bring_beside(
        &self,
        transaction: &mut PgConnection,
        moved: &Moved,
        series: &[Uuid],
        from: DateTime<Utc>,
        to: DateTime<Utc>,
    ) -> Result<()> {
        // Floors tell of what moved before; unless they are about to change themselves, also those of a week that stayed.
        let were_floors = drop_floors(transaction, series, from, to).await.map_err(unavailable)?;
        if moved.is_empty() || !(were_floors || moved.overlaps(Some(from), None)) {
            return Ok(());
        }
        let rows = rows_beside(&mut *self.reader().await?, series, from, to).await.map_err(away)?;
        bring(transaction, moved, rows).await
    }
}

/// A copy of a week that did not move is nothing.
async fn bring(transaction: &mut PgConnection, moved: &Moved, rows: Vec<Frozen>) -> Result<()> {
    let rows = rows.into_iter().filter(|row| moved.may_have(row.id));
    let rows: Vec<String> = rows.map(|row| row.json).collect();
    thaw(transaction, &rows).await.map_err(unavailable)
}
