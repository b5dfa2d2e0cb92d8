//! Tells what is wrong, and what to do about it.

use std::{
    fmt,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::{PgPool, migrate::Migrator};

use crate::{
    config::{self, Config},
    database,
    error::chain,
    jetstream::{self, MINIMUM_SERVER},
};

/// Clocks that differ by more than this make timestamps that surprise people.
const TOLERATED_SKEW: Duration = Duration::from_millis(500);

const PATIENCE: Duration = Duration::from_secs(5);

/// One line of the report.
#[derive(Debug)]
pub struct Finding {
    what: &'static str,
    /// What was found, or what is wrong and what to do.
    result: Result<String, String>,
}

impl Finding {
    pub fn is_ok(&self) -> bool {
        self.result.is_ok()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, text) = match &self.result {
            Ok(text) => ("ok   ", text),
            Err(text) => ("WRONG", text),
        };
        write!(f, "{mark} {:<18} {text}", self.what)
    }
}

/// Looks at everything that a process needs.
pub async fn examine(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    examine_nats(config, &mut findings).await;
    examine_database(config, &mut findings).await;
    findings
}

async fn examine_nats(config: &Config, findings: &mut Vec<Finding>) {
    let mut find = |what, result| findings.push(Finding { what, result });
    let nats = match in_time(jetstream::connect(&config.nats)).await {
        Ok(nats) => nats,
        Err(problem) => return find("NATS", Err(format!("{problem}: check nats.url and that the server runs"))),
    };
    let version = nats.server_info().version;
    find("NATS", Ok(format!("{}:{}", nats.server_info().host, nats.server_info().port)));
    find(
        "NATS version",
        match jetstream::require_version(&nats) {
            Ok(()) => Ok(version),
            Err(_) => Err(format!("{version}: install {MINIMUM_SERVER} or newer")),
        },
    );
    find(
        "NATS access",
        match nats.server_info().auth_required {
            true => Ok("asks for credentials".into()),
            false => Err("lets everyone in, and whoever reaches it is operator: give it users with permissions".into()),
        },
    );
    find(
        "sync policy",
        match &config.nats.monitor_url {
            None => Err("unknown: set nats.monitor_url to the server's monitoring address".into()),
            Some(url) => match sync_policy(url).await {
                Ok(policy) if policy.is_always() => Ok(format!("{policy}: what is acknowledged is on disk")),
                Ok(policy) => Err(format!(
                    "{policy}: a power failure loses acknowledged writes; set jetstream {{ sync_interval: always }}"
                )),
                Err(problem) => Err(format!("{problem}: check nats.monitor_url")),
            },
        },
    );
    let context = async_nats::jetstream::new(nats);
    let asked = Instant::now();
    let declarations = jetstream::declarations(config);
    let first = declarations.first().map(|declaration| declaration.name().to_owned()).unwrap_or_default();
    let info: Result<Value, String> = in_time(context.request(format!("STREAM.INFO.{first}"), &json!({}))).await;
    find(
        "JetStream",
        match &info {
            Ok(info) if info["error"]["code"] == 503 => Err("not enabled: configure jetstream on the server".into()),
            Ok(_) => Ok("answers".into()),
            Err(problem) => Err(format!(
                "{problem}: is JetStream enabled for this account, and are these the service's own credentials?"
            )),
        },
    );
    // Who is not answered now would wait for every stream.
    let Ok(info) = info else { return };
    if let Some(time) = info["ts"].as_str().and_then(|text| text.parse().ok()) {
        find("NATS clock", skew(time, asked.elapsed()));
    }
    for declaration in &declarations {
        find(
            "stream",
            match jetstream::diff(&context, declaration).await {
                Ok(drift) => match drift.describe(false) {
                    (text, false) => Ok(text),
                    (text, true) => {
                        Err(format!("{text}: run `tidemark streams apply`, which changes it or says why it must not"))
                    }
                },
                Err(error) => Err(chain(&error)),
            },
        );
    }
    let replicas = config.jetstream.replicas;
    find("replicas", Ok(format!("{replicas}{}", if replicas == 1 { ": the loss of one disk loses all" } else { "" })));
}

async fn examine_database(config: &Config, findings: &mut Vec<Finding>) {
    let mut find = |what, result| findings.push(Finding { what, result });
    let pool = match database::pool(&config.database) {
        Ok(pool) => pool,
        Err(error) => return find("PostgreSQL", Err(chain(&error))),
    };
    let version = sqlx::query_scalar::<_, String>("show server_version");
    match in_time(version.fetch_one(&pool)).await {
        Ok(version) => {
            let major: u32 = version.split('.').next().and_then(|text| text.parse().ok()).unwrap_or(0);
            find("PostgreSQL", if major >= 15 { Ok(version) } else { Err(format!("{version}: install 15 or newer")) });
        }
        Err(problem) => {
            return find("PostgreSQL", Err(format!("{problem}: check DATABASE_URL and that the server runs")));
        }
    }
    let asked = Instant::now();
    if let Ok(time) = in_time(sqlx::query_scalar("select clock_timestamp()").fetch_one(&pool)).await {
        find("PostgreSQL clock", skew(time, asked.elapsed()));
    }
    find("migrations", pending_migrations(&pool, &database::MIGRATIONS).await);
    if let Some(historical) = config.historical.database() {
        find("historical", examine_historical(&historical).await);
    }
}

async fn examine_historical(historical: &config::Database) -> Result<String, String> {
    let pool = database::pool(historical).map_err(|error| chain(&error))?;
    let reached = in_time(sqlx::query("select").execute(&pool)).await;
    reached.map_err(|problem| format!("{problem}: check historical.database_url and that the server runs"))?;
    pending_migrations(&pool, &database::HISTORICAL_MIGRATIONS).await
}

async fn pending_migrations(pool: &PgPool, migrations: &Migrator) -> Result<String, String> {
    let applied: Vec<i64> =
        match in_time(sqlx::query_scalar("select version from _sqlx_migrations").fetch_all(pool)).await {
            Ok(applied) => applied,
            Err(problem) if problem.contains("does not exist") => Vec::new(),
            Err(problem) => return Err(problem),
        };
    let missing = migrations.iter().filter(|migration| !applied.contains(&migration.version)).count();
    let foreign = applied.iter().filter(|version| !migrations.version_exists(**version)).count();
    match (missing, foreign) {
        (0, 0) => Ok("all applied".into()),
        (_, 1..) => Err(format!("{foreign} applied by another version: this one won't start on them")),
        (missing, 0) => Err(format!("{missing} not applied: run `tidemark migrate`")),
    }
}

fn skew(theirs: DateTime<Utc>, round_trip: Duration) -> Result<String, String> {
    let ours = Utc::now() - round_trip / 2;
    // Where inside the round trip they looked at their clock, nobody knows.
    let skew = (theirs - ours).abs().to_std().unwrap_or_default().saturating_sub(round_trip / 2);
    let text = format!("differs by {} ms", skew.as_millis());
    if skew <= TOLERATED_SKEW { Ok(text) } else { Err(format!("{text}: synchronise the clocks (NTP)")) }
}

async fn in_time<T, E: std::error::Error + 'static>(work: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(outcome) => outcome.map_err(|error| chain(&error)),
        Err(_) => Err(format!("no answer within {PATIENCE:?}")),
    }
}

/// When an acknowledged write of JetStream is on disk.
#[derive(Debug, Clone, Deserialize)]
pub struct SyncPolicy {
    #[serde(default)]
    sync_always: bool,
    #[serde(default)]
    sync_interval: u64,
}

impl SyncPolicy {
    pub fn is_always(&self) -> bool {
        self.sync_always
    }
}

impl fmt::Display for SyncPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sync_always {
            true => f.write_str("syncs every write"),
            false => write!(f, "syncs every {:?}", Duration::from_nanos(self.sync_interval)),
        }
    }
}

/// Reads the policy from the server's monitoring address.
pub async fn sync_policy(monitor_url: &str) -> Result<SyncPolicy, String> {
    #[derive(Deserialize)]
    struct Varz {
        jetstream: JetStream,
    }
    #[derive(Deserialize)]
    struct JetStream {
        config: Option<SyncPolicy>,
    }
    let url = format!("{}/varz", monitor_url.trim_end_matches('/'));
    let varz: Varz = in_time(async { reqwest::get(&url).await?.error_for_status()?.json().await }).await?;
    varz.jetstream.config.ok_or_else(|| "JetStream is not enabled".into())
}
