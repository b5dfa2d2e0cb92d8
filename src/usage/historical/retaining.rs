//! Letting go in the historical database what is kept no longer. It notes what went, and the operational database takes that
//! off its tallies, once.

use std::collections::HashMap;

use chrono::{DateTime, Utc};

use super::{Historical, Second, away};
use crate::{
    error::Result,
    usage::store::{
        historical::{self, HistoricalWeek},
        moved::{moved, settle, settled},
        retention, unavailable,
    },
};

/// Notes that are taken over at once.
const NOTES: i64 = 1000;

/// The historical database with something in it.
pub struct There<'a> {
    historical: &'a Historical,
    second: &'a Second,
}

impl Historical {
    /// The historical database, if something is there.
    pub async fn there(&self) -> Result<Option<There<'_>>> {
        let mut connection = self.database.acquire().await.map_err(unavailable)?;
        let moved = moved(&mut connection).await.map_err(unavailable)?;
        match moved.is_empty() {
            true => Ok(None),
            false => Ok(Some(There { historical: self, second: self.second().await? })),
        }
    }
}

impl There<'_> {
    /// Whole weeks with nothing newer than this.
    pub async fn old_weeks(&self, older_than: DateTime<Utc>) -> Result<Vec<HistoricalWeek>> {
        let weeks = historical::weeks(&self.second.writing).await.map_err(away)?;
        let is_old =
            |week: &HistoricalWeek| week.arrived && week.greatest_event.is_none_or(|greatest| greatest < older_than);
        Ok(weeks.into_iter().filter(is_old).collect())
    }

    /// Drops a week. How many records it had, unless somebody else did.
    pub async fn drop_week(&self, name: &str) -> Result<Option<i64>> {
        historical::drop_week(&self.second.writing, name).await.map_err(away)
    }

    pub async fn count_older(&self, tenant: &str, usage_type: &str, than: DateTime<Utc>, most: i64) -> Result<i64> {
        retention::count_older(&self.second.reading, tenant, usage_type, than, most).await.map_err(away)
    }

    /// Deletes some of what is older, and returns how many went.
    pub async fn delete_older(&self, tenant: &str, usage_type: &str, than: DateTime<Utc>, most: i64) -> Result<i64> {
        historical::delete_older(&self.second.writing, tenant, usage_type, than, most).await.map_err(away)
    }

    pub async fn earliest(
        &self,
        tenant: &str,
        usage_type: &str,
        sources: &[String],
    ) -> Result<HashMap<String, DateTime<Utc>>> {
        historical::earliest(&self.second.writing, tenant, usage_type, sources).await.map_err(away)
    }

    /// Brings both to the same about which weeks are there.
    pub async fn align(&self) -> Result<()> {
        self.historical.note_arrived(self.second).await?;
        self.historical.discard_copies(self.second).await
    }

    /// Takes off the tallies here what is gone there.
    pub async fn settle(&self) -> Result<()> {
        let (here, there) = (&self.historical.database, &self.second.writing);
        loop {
            let after = settled(here).await.map_err(unavailable)?;
            let gone = historical::gone(there, after, NOTES).await.map_err(away)?;
            historical::forget_gone(there, after).await.map_err(away)?;
            if gone.is_empty() {
                return Ok(());
            }
            settle(here, after, &gone).await.map_err(unavailable)?;
        }
    }
}
