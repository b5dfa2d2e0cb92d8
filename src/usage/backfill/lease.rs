//! Work on a range lasts as long as its lease is renewed, and is ended by whoever finds it.

use std::{sync::Weak, time::Duration};

use sqlx::{Postgres, Transaction};
use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    database::is_passing,
    error::{Code, Error, Result},
    usage::{
        Usage,
        store::{
            backfills,
            ranges::{abandoned, change_ranges, end_range, is_abandoned, renew_range},
            unavailable,
        },
    },
};

/// How often abandoned work is looked for, at most.
const LOOK: Duration = Duration::from_secs(5);

/// How often, and after what pause, ranges are tried to be changed.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);

/// How work on a range ends. What is written is completed in any case.
enum Ending<'a> {
    Written,
    Failed(&'a Error),
    /// Failed, if it was waiting for records.
    Pending(&'a Error),
    /// Failed, if its lease is over.
    Abandoned(&'a Error),
}

impl Usage {
    /// Works as long as the lease can be renewed.
    pub(super) async fn leased<T>(&self, id: Uuid, work: impl Future<Output = Result<T>>) -> Result<T> {
        let renewing = async {
            loop {
                let renew = async { renew_range(&mut *self.database.acquire().await?, id, self.lease, 0).await };
                match renew.await {
                    Ok(true) => {}
                    Ok(false) => return,
                    // There is time to try again.
                    Err(error) => tracing::debug!(%error, "the lease of a backfill was not renewed"),
                }
                sleep(self.lease / 3).await;
            }
        };
        tokio::select! {
            done = work => done,
            () = renewing => Err(Error::new(Code::BackfillConflict, "the lease of the backfill has ended")),
            () = self.stop.cancelled() => Err(Error::unavailable("the instance that worked on it was stopped")),
        }
    }

    /// Ends a backfill that is written: from now on the range is open.
    pub(super) async fn finish(&self, id: Uuid) -> Result<()> {
        self.end(id, Ending::Written).await.map(drop)
    }

    /// Ends a backfill that is not written. Nothing of it is in the ledger.
    pub(super) async fn give_up(&self, id: Uuid, error: &Error) -> Result<()> {
        self.end(id, Ending::Failed(error)).await.map(drop)
    }

    /// The same, if nobody works on it.
    pub(super) async fn give_up_pending(&self, id: Uuid, error: &Error) -> Result<bool> {
        self.end(id, Ending::Pending(error)).await
    }

    /// Whether there was anything to end.
    async fn end(&self, id: Uuid, ending: Ending<'_>) -> Result<bool> {
        let mut tries = 0;
        let ended = loop {
            match self.try_to_end(id, &ending).await {
                // Somebody has held the ranges for long.
                Err(error) if is_passing(&error) && tries < TRIES => tries += 1,
                ended => break ended,
            }
            sleep(PAUSE).await;
        };
        let ended = ended.map_err(unavailable)?;
        if ended {
            self.ranges.changed(&self.database).await;
        }
        Ok(ended)
    }

    /// The operation first, which others may hold for a while; then the ranges, which all wait for.
    async fn try_to_end(&self, id: Uuid, ending: &Ending<'_>) -> Result<bool, sqlx::Error> {
        let mut transaction = self.database.begin().await?;
        match ending {
            Ending::Written => {}
            Ending::Failed(error) => drop(backfills::fail_operation(&mut transaction, id, error).await?),
            Ending::Pending(error) => {
                if !backfills::fail_pending(&mut transaction, id, error).await? {
                    return Ok(false);
                }
            }
            Ending::Abandoned(error) => {
                if !is_abandoned(&mut transaction, id).await? {
                    return Ok(false);
                }
                backfills::fail_operation(&mut transaction, id, error).await?;
            }
        }
        backfills::complete_operation(&mut transaction, id).await?;
        change_ranges(&mut transaction).await?;
        end_range(&mut transaction, id).await?;
        transaction.commit().await?;
        // Whatever is left of it is forgotten later.
        backfills::forget_staged(&mut *self.database.acquire().await?, id).await.ok();
        Ok(true)
    }

    /// A transaction in which ranges can be changed.
    pub(super) async fn changing_ranges(&self) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        let mut tries = 0;
        loop {
            let mut transaction = self.database.begin().await?;
            match change_ranges(&mut transaction).await {
                Ok(()) => return Ok(transaction),
                Err(error) if is_passing(&error) && tries < TRIES => tries += 1,
                Err(error) => return Err(error),
            }
            transaction.rollback().await?;
            sleep(PAUSE).await;
        }
    }

    /// Ends what others have left behind, as long as there is one of us.
    pub(in crate::usage) async fn end_abandoned(me: Weak<Self>, lease: Duration) {
        loop {
            sleep(LOOK.min(lease / 4)).await;
            let Some(usage) = me.upgrade() else { return };
            let found = async { abandoned(&mut *usage.database.acquire().await?).await };
            for id in found.await.unwrap_or_default() {
                tracing::warn!(%id, "a backfill was left behind");
                let error = Error::new(Code::BackfillConflict, "whoever worked on it was gone when its lease ended");
                if let Err(error) = usage.end(id, Ending::Abandoned(&error)).await {
                    tracing::warn!(%error, %id, "a backfill that was left behind is tried again");
                }
            }
        }
    }
}
