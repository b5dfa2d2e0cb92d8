//! A place in a transaction where a process stands still, to be killed there.

use sqlx::{PgConnection, PgPool};

use super::eventually;

/// Holds a lock that a trigger waits for.
pub struct Barrier {
    held: PgConnection,
    database: PgPool,
    table: String,
}

impl Barrier {
    /// On a table; the trigger is called `barrier`, and executes `wait_here()`.
    pub async fn at(database: &PgPool, table: &str, trigger: &str) -> Self {
        let mut held = database.acquire().await.unwrap().detach();
        sqlx::query("select pg_advisory_lock(4711)").execute(&mut held).await.unwrap();
        let function = "create or replace function wait_here() returns trigger language plpgsql as
             $$ begin perform pg_advisory_lock_shared(4711); return new; end $$";
        sqlx::query(function).execute(database).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(trigger.to_owned())).execute(database).await.unwrap();
        Self { held, database: database.clone(), table: table.to_owned() }
    }

    /// Returns when somebody stands before it.
    pub async fn reached(&self) {
        eventually("the step is reached", async || {
            let waiting = "select count(*) from pg_locks where locktype = 'advisory' and objid = 4711 and not granted
                 and database = (select oid from pg_database where datname = current_database())";
            let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&self.database).await.unwrap();
            (waiting > 0).then_some(())
        })
        .await;
    }

    pub async fn lift(mut self) {
        sqlx::query("select pg_advisory_unlock(4711)").execute(&mut self.held).await.unwrap();
        // Whoever stood there goes on first.
        let drop = format!("drop trigger barrier on {}", self.table);
        sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&self.database).await.unwrap();
    }
}
