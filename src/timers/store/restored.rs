//! After the timers were put back to an older state.

use chrono::{DateTime, Utc};
use sqlx::PgPool;

/// Pauses what was due until now, or was being called: nobody knows whether it has fired since. Tells how many there are.
pub async fn pause_what_was_due(database: &PgPool, now: DateTime<Utc>) -> Result<u64, sqlx::Error> {
    let paused = sqlx::query(
        "update timers
         set status = 'paused', generation = generation + 1, updated_at = $1, after_run = null,
             owner = null, claim = null, claimed_at = null, claim_until = null,
             last_error = 'due before a backup was restored: it may have fired'
         where status = 'executing' or status = 'pending' and due_at <= $1",
    );
    Ok(paused.bind(now).execute(database).await?.rows_affected())
}
