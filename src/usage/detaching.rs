//! Taking partitions out of the ledger. Writers wait for an instant; what takes long is done to a table that is nobody's.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgPool;
use tokio::time::sleep;

use super::store::partitions::{self, Copied};
use crate::database::is_passing;

/// How often a partition that is in use is tried, and how long is waited in between.
const TRIES: usize = 10;
const PAUSE: Duration = Duration::from_millis(500);

/// Takes a partition out if nothing in it is newer, and nobody has written to it since it was copied, if it moves. False if it is none any more.
pub async fn detach(
    database: &PgPool,
    name: &str,
    older_than: DateTime<Utc>,
    copied: Option<Copied>,
) -> Result<bool, sqlx::Error> {
    let mut tries = 0;
    loop {
        match partitions::detach_partition(database, name, older_than, copied).await {
            Err(error) if is_passing(&error) && tries < TRIES => tries += 1,
            ended => return ended,
        }
        sleep(PAUSE).await;
    }
}

/// Drops what somebody took out, and died.
pub async fn drop_leftovers(database: &PgPool) -> Result<(), sqlx::Error> {
    for name in partitions::detached(database).await? {
        match partitions::drop_detached(database, &name).await {
            Ok(Some(records)) => {
                tracing::info!(partition = name, records, "usage: a partition that was taken out is dropped");
            }
            Ok(None) => {}
            Err(error) => tracing::error!(%error, partition = name, "usage: a partition that was taken out stays"),
        }
    }
    Ok(())
}
