//! PostgreSQL, by its own programs.

use std::{path::Path, process::Stdio, str::FromStr};

use sqlx::{
    AssertSqlSafe, PgPool,
    postgres::{PgConnectOptions, PgSslMode},
};
use tokio::process::Command;

use super::{BackupError, Result};
use crate::{config, embedded};

/// Saves a database into a file.
pub async fn save(database: &config::Database, file: &Path) -> Result<()> {
    super::private(file)?;
    let arguments = ["--format=custom", "--no-owner", "--no-privileges", "--file"];
    run("pg_dump", database, &arguments, file).await
}

/// Whether the file can be read.
pub async fn check(database: &config::Database, file: &Path) -> Result<()> {
    run("pg_restore", database, &["--list"], file).await
}

/// Removes everything.
pub async fn empty(pool: &PgPool) -> Result<()> {
    let schema: String = sqlx::query_scalar("select quote_ident(current_schema())").fetch_one(pool).await?;
    let statement = format!("drop schema {schema} cascade; create schema {schema}");
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(pool).await?;
    Ok(())
}

/// Puts a saved database into an empty one, all of it or nothing.
pub async fn load(database: &config::Database, file: &Path) -> Result<()> {
    let arguments = ["--no-owner", "--no-privileges", "--single-transaction", "--dbname="];
    run("pg_restore", database, &arguments, file).await
}

async fn run(program: &str, database: &config::Database, arguments: &[&str], file: &Path) -> Result<()> {
    let refused = |problem: String| BackupError::Refused(format!("{program}: {problem}"));
    let pool = crate::database::pool(database)?;
    let version: i32 =
        sqlx::query_scalar("select current_setting('server_version_num')::int / 10000").fetch_one(&pool).await?;
    let path = tokio::task::spawn_blocking({
        let program = program.to_owned();
        move || embedded::find_postgres_program(&program, version as u64)
    });
    let path = path.await.map_err(|error| refused(error.to_string()))?.map_err(|error| refused(error.to_string()))?;
    let mut command = Command::new(path);
    command.args(arguments).arg(file).envs(environment(database)?).stdin(Stdio::null());
    let output = command.output().await.map_err(|error| refused(error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// How the programs are told where to go: nothing secret on the command line, where everybody could read it.
fn environment(database: &config::Database) -> Result<Vec<(&'static str, String)>> {
    let Some(url) = &database.url else {
        let password = database.password.as_ref().map(|password| ("PGPASSWORD", password.expose().to_owned()));
        let named = [
            ("PGHOST", database.host.clone()),
            ("PGPORT", database.port.to_string()),
            ("PGUSER", database.user.clone()),
            ("PGDATABASE", database.name.clone()),
        ];
        return Ok(named.into_iter().chain(password).collect());
    };
    let refused = |problem: String| BackupError::Refused(format!("the database's URL: {problem}"));
    let options = PgConnectOptions::from_str(url.expose()).map_err(|error| refused(error.to_string()))?;
    let parsed = url::Url::parse(url.expose()).map_err(|error| refused(error.to_string()))?;
    let password = parsed.password().map(|password| {
        let decoded = percent_encoding::percent_decode_str(password).decode_utf8_lossy();
        ("PGPASSWORD", decoded.into_owned())
    });
    let mode = match options.get_ssl_mode() {
        PgSslMode::Disable => "disable",
        PgSslMode::Allow => "allow",
        PgSslMode::Prefer => "prefer",
        PgSslMode::Require => "require",
        PgSslMode::VerifyCa => "verify-ca",
        PgSslMode::VerifyFull => "verify-full",
    };
    let named = [
        ("PGHOST", options.get_host().to_owned()),
        ("PGPORT", options.get_port().to_string()),
        ("PGUSER", options.get_username().to_owned()),
        ("PGDATABASE", options.get_database().unwrap_or(options.get_username()).to_owned()),
        ("PGSSLMODE", mode.to_owned()),
    ];
    Ok(named.into_iter().chain(password).collect())
}
