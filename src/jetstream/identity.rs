//! Applies all declarations, and refuses a stream that holds identity and has vanished, been made anew or been put back.

use std::collections::HashMap;

use async_nats::jetstream::Context;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row};

use super::streams::{ApplyError, Declaration, Drift, Live, apply, live};

/// Any number; only we take this lock.
const LOCK: i64 = 0x7469_6465_6d61_726b;

/// What PostgreSQL remembers of a stream.
struct Remembered {
    created: String,
    last_sequence: i64,
}

/// Stands in the database while a backup is restored. A schema, so that it outlives what is removed.
const RESTORING: &str = "tidemark_restoring";

/// Says that a backup is being restored. Nobody starts until that has ended.
pub async fn begin_restore(database: &PgPool) -> Result<(), sqlx::Error> {
    let statement = format!("create schema if not exists {RESTORING}");
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(database).await.map(drop)
}

pub async fn end_restore(database: &PgPool) -> Result<(), sqlx::Error> {
    let statement = format!("drop schema if exists {RESTORING}");
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(database).await.map(drop)
}

async fn refuse_while_restoring(connection: &mut PgConnection) -> Result<(), ApplyError> {
    let restoring: bool =
        sqlx::query_scalar("select to_regnamespace($1) is not null").bind(RESTORING).fetch_one(connection).await?;
    match restoring {
        false => Ok(()),
        true => Err(ApplyError::Identity(
            "a backup is being restored, or its restore was broken off: wait for it, or run `tidemark restore` again with \
             --replace"
                .into(),
        )),
    }
}

/// Applies the declarations, one instance at a time. `fresh` says that a stream that lost its identity is meant.
pub async fn apply_guarded(
    database: &PgPool,
    jetstream: &Context,
    declarations: &[Declaration],
    fresh: bool,
) -> Result<Vec<Drift>, ApplyError> {
    let mut transaction = database.begin().await?;
    sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *transaction).await?;
    refuse_while_restoring(&mut transaction).await?;
    let remembered: HashMap<String, Remembered> =
        sqlx::query("select stream, created, last_sequence from jetstream_identity")
            .fetch_all(&mut *transaction)
            .await?
            .into_iter()
            .map(|row| {
                let remembered = Remembered { created: row.get("created"), last_sequence: row.get("last_sequence") };
                (row.get("stream"), remembered)
            })
            .collect();
    let guarded = || declarations.iter().filter(|declaration| declaration.holds_identity);
    if !fresh {
        // All are looked at before the first is made, so that a refused start leaves nothing behind.
        for declaration in guarded() {
            if let Some(remembered) = remembered.get(declaration.name()) {
                check(declaration.name(), remembered, live(jetstream, declaration.name()).await?)?;
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
                "insert into jetstream_identity (stream, created, last_sequence) values ($1, $2, $3)
                 on conflict (stream) do update
                 set created = excluded.created, last_sequence = excluded.last_sequence, recorded_at = now()",
            )
            .bind(declaration.name())
            .bind(live.created)
            .bind(live.state.last_sequence)
            .execute(&mut *transaction)
            .await?;
        }
    }
    transaction.commit().await?;
    Ok(drifts)
}

fn check(stream: &str, remembered: &Remembered, live: Option<Live>) -> Result<(), ApplyError> {
    let what = match live {
        None => "is missing".to_owned(),
        Some(live) if live.created != remembered.created => "was deleted and made anew".to_owned(),
        Some(live) if live.state.last_sequence < remembered.last_sequence => format!(
            "was put back to an older state (sequence {}, it had {})",
            live.state.last_sequence, remembered.last_sequence
        ),
        Some(_) => return Ok(()),
    };
    Err(ApplyError::Identity(format!(
        "the JetStream stream {stream} {what}. It holds what was already given out; going on would give ids again. Connect \
         to the server that has it, restore its newest state, or start with --fresh if repeating ids is meant"
    )))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_has_lost_its_identity_is_refused() {
        let remembered = Remembered { created: "2026-01-01T00:00:00Z".into(), last_sequence: 7 };
        let live = |created: &str, last: i64| {
            serde_json::from_value(json!({ "created": created, "state": { "last_seq": last }, "config": {} })).unwrap()
        };
        for (live, complaint) in [
            (None, Some("is missing")),
            (live("2026-01-02T00:00:00Z", 9), Some("made anew")),
            (live("2026-01-01T00:00:00Z", 6), Some("put back to an older state (sequence 6, it had 7)")),
            (live("2026-01-01T00:00:00Z", 7), None),
            (live("2026-01-01T00:00:00Z", 8), None),
        ] {
            let outcome = check("S", &remembered, live).err().map(|error| error.to_string());
            assert_eq!(outcome.is_some(), complaint.is_some(), "{outcome:?}");
            assert!(outcome.unwrap_or_default().contains(complaint.unwrap_or_default()), "{complaint:?}");
        }
    }
}
