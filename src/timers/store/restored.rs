//! After the timers were put back to an older state.

use sqlx::PgPool;

/// Pauses what was due until now, or was being called: nobody knows whether it has fired since. `all` pauses also what is due
/// later, because it may have been fired by hand, moved or canceled. Tells how many there are.
pub async fn pause_what_may_have_fired(database: &PgPool, all: bool) -> Result<u64, sqlx::Error> {
    let paused = sqlx::query(
        "update timers
         set status = case when after_run = 'canceled' then after_run else 'paused' end, generation = generation + 1,
             updated_at = clock_timestamp(), after_run = null, owner = null, claim = null, claimed_at = null,
             claim_until = null, last_error = 'a backup was restored: it may have fired since'
         where status = 'executing' or status = 'pending' and ($1 or due_at <= clock_timestamp())",
    );
    Ok(paused.bind(all).execute(database).await?.rows_affected())
}
