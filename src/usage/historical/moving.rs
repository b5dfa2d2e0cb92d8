//! Moving weeks that are old and quiet.

use chrono::{DateTime, TimeDelta, Utc};

use super::{Historical, Second, away};
use crate::{
    error::{Error, Result},
    usage::{
        detaching::detach,
        store::{
            historical::{self, copy_week, empty_week, make_week, mark_arrived},
            moved::{Quiet, is_partition, moved, quiet_partitions, raise_floors},
            partitions::{Copied, drop_detached},
            unavailable,
        },
    },
};

impl Historical {
    /// What is written before this may move.
    fn older_than(&self) -> DateTime<Utc> {
        self.clock.now() - TimeDelta::from_std(self.after).unwrap_or(TimeDelta::MAX / 2)
    }

    /// What would move now.
    pub async fn movable(&self) -> Result<Vec<Quiet>> {
        match self.second {
            Some(_) => quiet_partitions(&self.database, self.older_than()).await.map_err(unavailable),
            None => Ok(Vec::new()),
        }
    }

    /// Moves it, a week at a time. What moved, and how many records each had.
    pub async fn move_weeks(&self) -> Result<Vec<(Quiet, i64)>> {
        let mut done = Vec::new();
        for week in self.movable().await? {
            let second = self.second().await?;
            match self.move_week(second, &week).await {
                Ok(Some(records)) => done.push((week, records)),
                Ok(None) => {}
                // While something is in the way, the others would only make writers wait.
                Err(error) => {
                    tracing::warn!(%error, partition = week.name, "usage: a partition was not moved; in an hour again");
                    break;
                }
            }
        }
        Ok(done)
    }

    /// Copies it, and then gives it up if nobody has written to it meanwhile. A copy that nobody gave up for is made again.
    async fn move_week(&self, second: &Second, week: &Quiet) -> Result<Option<i64>> {
        make_week(&second.writing, week).await.map_err(away)?;
        let mut copying = second.writing.begin().await.map_err(away)?;
        if !empty_week(&mut copying, &week.name).await.map_err(away)?
            || !is_partition(&self.database, &week.name).await.map_err(unavailable)?
        {
            return Ok(None);
        }
        let copied = copy_week(&self.database, &mut copying, week).await.map_err(away)?;
        copying.commit().await.map_err(away)?;
        raise_floors(&self.database, &week.name).await.map_err(unavailable)?;
        let to = *second.ready.get().ok_or_else(|| Error::internal("a database that is not ready"))?;
        let copied = Copied { rows: copied as i64, to };
        let given_up = detach(&self.database, &week.name, self.older_than(), Some(copied));
        if !given_up.await.map_err(unavailable)? {
            return Ok(None);
        }
        self.note_arrived(second).await?;
        drop_detached(&self.database, &week.name).await.map_err(unavailable)
    }

    /// Drops copies of weeks that will never be given up, because they are gone here.
    pub(super) async fn discard_copies(&self, second: &Second) -> Result<()> {
        for week in historical::weeks(&second.writing).await.map_err(away)?.iter().filter(|week| !week.arrived) {
            if !is_partition(&self.database, &week.name).await.map_err(unavailable)? {
                historical::discard_week(&second.writing, &week.name).await.map_err(away)?;
            }
        }
        Ok(())
    }

    /// Tells the historical database which weeks are its own: also those that somebody else gave up, and died.
    pub(super) async fn note_arrived(&self, second: &Second) -> Result<()> {
        let mut connection = self.database.acquire().await.map_err(unavailable)?;
        let starts = moved(&mut connection).await.map_err(unavailable)?.starts();
        mark_arrived(&second.writing, &starts).await.map_err(away)
    }
}
