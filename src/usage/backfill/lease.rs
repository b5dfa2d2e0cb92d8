//! Work on a range lasts as long as its lease is renewed, and is ended by whoever finds it.

use std::{sync::Weak, time::Duration};

use tokio::time::sleep;
use uuid::Uuid;

use crate::{
    error::{Code, Error, Result},
    usage::{
        Usage,
        store::{
            backfills,
            ranges::{abandoned, change_ranges, end_range, renew_range},
            unavailable,
        },
    },
};

/// How often abandoned work is looked for, at most.
const LOOK: Duration = Duration::from_secs(5);

impl Usage {
    /// Works as long as the lease can be renewed.
    pub(super) async fn leased<T>(&self, id: Uuid, work: impl Future<Output = Result<T>>) -> Result<T> {
        let renewing = async {
            loop {
                sleep(self.lease / 3).await;
                let renew = async { renew_range(&mut *self.database.acquire().await?, id, self.lease).await };
                match renew.await {
                    Ok(true) => {}
                    Ok(false) => return,
                    // There is time to try again.
                    Err(error) => tracing::debug!(%error, "the lease of a backfill was not renewed"),
                }
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
        self.end(id, None).await
    }

    /// Ends a backfill that is not written. Nothing of it is in the ledger.
    pub(super) async fn give_up(&self, id: Uuid, error: &Error) -> Result<()> {
        self.end(id, Some(error)).await
    }

    async fn end(&self, id: Uuid, error: Option<&Error>) -> Result<()> {
        let end = async {
            let mut transaction = self.database.begin().await?;
            change_ranges(&mut transaction).await?;
            backfills::complete_operation(&mut transaction, id).await?;
            if let Some(error) = error {
                backfills::fail_operation(&mut transaction, id, error).await?;
            }
            end_range(&mut transaction, id).await?;
            transaction.commit().await?;
            backfills::forget_staged(&mut *self.database.acquire().await?, id).await
        };
        end.await.map_err(unavailable)?;
        self.ranges.changed(&self.database).await;
        Ok(())
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
                if let Err(error) = usage.give_up(id, &error).await {
                    tracing::warn!(%error, %id, "a backfill that was left behind is tried again");
                }
            }
        }
    }
}
