//! Applies all declarations, and refuses a stream that holds identity and has vanished or been made anew.

use std::collections::HashMap;

use async_nats::jetstream::Context;
use sqlx::{PgPool, Row};

use super::streams::{ApplyError, Declaration, Drift, apply, live};

/// Any number; only we take this lock.
const LOCK: i64 = 0x7469_6465_6d61_726b;

/// Applies the declarations, one instance at a time. `fresh` says that a vanished or remade stream is meant.
pub async fn refuse_or_remember(
    database: &PgPool,
    jetstream: &Context,
    declarations: &[Declaration],
    fresh: bool,
) -> Result<Vec<Drift>, ApplyError> {
    let mut transaction = database.begin().await?;
    sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *transaction).await?;
    let remembered: HashMap<String, String> = sqlx::query("select stream, created from jetstream_identity")
        .fetch_all(&mut *transaction)
        .await?
        .into_iter()
        .map(|row| (row.get("stream"), row.get("created")))
        .collect();
    let guarded = || declarations.iter().filter(|declaration| declaration.holds_identity);
    if !fresh {
        // All are looked at before the first is made, so that a refused start leaves nothing behind.
        for declaration in guarded() {
            let name = declaration.name();
            let Some(expected) = remembered.get(name) else { continue };
            match live(jetstream, name).await? {
                None => return Err(refused(name, "is missing")),
                Some(live) if live.created != *expected => return Err(refused(name, "was deleted and made anew")),
                Some(_) => {}
            }
        }
    }
    let mut drifts = Vec::with_capacity(declarations.len());
    for declaration in declarations {
        drifts.push(apply(jetstream, declaration).await?);
    }
    for declaration in guarded() {
        if let Some(live) = live(jetstream, declaration.name()).await? {
            sqlx::query(
                "insert into jetstream_identity (stream, created) values ($1, $2)
                 on conflict (stream) do update set created = excluded.created, recorded_at = now()
                 where jetstream_identity.created <> excluded.created",
            )
            .bind(declaration.name())
            .bind(live.created)
            .execute(&mut *transaction)
            .await?;
        }
    }
    transaction.commit().await?;
    Ok(drifts)
}

fn refused(stream: &str, what: &str) -> ApplyError {
    ApplyError::Identity(format!(
        "the JetStream stream {stream} {what}. It holds what was already given out; going on without it would give ids \
         again. Restore it from a backup, connect to the server that has it, or start with --fresh if losing it is meant"
    ))
}
