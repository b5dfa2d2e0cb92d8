//! The configuration: one struct, whose manual and defaults are `tidemark.toml`.

use std::{collections::HashMap, fmt, path::Path, path::PathBuf, str::FromStr, time::Duration};

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de};
use sqlx::postgres::PgConnectOptions;
use tracing::level_filters::LevelFilter;

use crate::{
    api::{
        Name,
        stages::LAST_STAGE,
        usage::{EffectiveLimits, LEAST_RETENTION, MOST_RETENTION},
    },
    error::chain,
    roles::Role,
};

/// The manual carries the defaults, so the two can't drift apart.
const DEFAULTS: &str = include_str!("../tidemark.toml");

/// Names that deployments already use, and the keys that they set.
const FAMILIAR: &[(&str, &str)] = &[
    ("NATS_URL", "NATS__URL"),
    ("NATS_CREDS", "NATS__CREDENTIALS"),
    ("DATABASE_URL", "DATABASE__URL"),
    ("PG_HOST", "DATABASE__HOST"),
    ("PG_PORT", "DATABASE__PORT"),
    ("PG_USER", "DATABASE__USER"),
    ("PG_PASSWORD", "DATABASE__PASSWORD"),
    ("PG_DB_NAME", "DATABASE__NAME"),
    ("API_KEY", "AUTH__API_KEY"),
    ("PORT", "HTTP__PORT"),
];

const PREFIX: &str = "TIDEMARK__";

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(deserialize_with = "list")]
    pub roles: Vec<Role>,
    pub nats: Nats,
    pub jetstream: JetStream,
    pub database: Database,
    pub http: Http,
    pub auth: Auth,
    pub watermark: Watermark,
    pub ids: Ids,
    pub noid: Noid,
    pub stages: Stages,
    pub timers: Timers,
    pub usage: Usage,
    pub historical: Historical,
    pub telemetry: Telemetry,
    pub shutdown: Shutdown,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nats {
    pub url: Secret,
    pub credentials: Option<PathBuf>,
    pub monitor_url: Option<String>,
    pub prefix: Name,
    pub inbox_prefix: Name,
    pub concurrency: usize,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JetStream {
    pub replicas: u8,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Database {
    pub url: Option<Secret>,
    pub host: String,
    pub port: u16,
    pub user: String,
    pub password: Option<Secret>,
    pub name: String,
    pub max_connections: u32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    pub host: String,
    pub port: u16,
    #[serde(with = "humantime_serde")]
    pub request_timeout: Duration,
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    pub body_limit: usize,
    #[serde(deserialize_with = "networks")]
    pub trusted_proxies: Vec<IpNet>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Auth {
    pub admin_token: Option<Secret>,
    pub api_key: Option<Secret>,
    pub token_secret: Option<Secret>,
    pub open_pools_and_stages: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watermark {
    #[serde(with = "humantime_serde")]
    pub deadline: Duration,
    #[serde(with = "humantime_serde")]
    pub idempotency_window: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ids {
    pub default_batch_size: i64,
    pub max_batch_size: i64,
    pub prefetch_threshold: f64,
    #[serde(with = "humantime_serde")]
    pub token_ttl: Duration,
    #[serde(with = "humantime_serde")]
    pub lease_ttl: Duration,
    #[serde(with = "humantime_serde")]
    pub unowned_lease_ttl: Duration,
    pub rate_limit: u32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noid {
    pub max_pools: usize,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stages {
    pub first_id: i64,
    #[serde(with = "humantime_serde")]
    pub idempotency_window: Duration,
    pub rate_limit: RateLimit,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timers {
    #[serde(with = "humantime_serde")]
    pub min_delay: Duration,
    #[serde(with = "humantime_serde")]
    pub callback_timeout: Duration,
    pub concurrency: usize,
    pub concurrency_per_destination: usize,
    #[serde(deserialize_with = "networks")]
    pub allow_networks: Vec<IpNet>,
    pub payload_limit: usize,
    #[serde(with = "humantime_serde")]
    pub near_window: Duration,
    #[serde(with = "humantime_serde")]
    pub sweep_interval: Duration,
    #[serde(with = "humantime_serde")]
    pub secret_overlap: Duration,
    #[serde(with = "humantime_serde")]
    pub attempts_kept: Duration,
    pub rate_limit: u32,
    pub tenants: HashMap<Name, TimerTenant>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    pub subject: Name,
    pub shards: u16,
    pub backlog_bytes: i64,
    pub backlog_per_source: i64,
    #[serde(with = "humantime_serde")]
    pub answer_within: Duration,
    #[serde(with = "humantime_serde")]
    pub grace_period: Duration,
    #[serde(with = "humantime_serde")]
    pub future_tolerance: Duration,
    #[serde(with = "humantime_serde")]
    pub quarantine_kept: Duration,
    #[serde(with = "humantime_serde")]
    pub reconciliation_kept: Duration,
    pub retention_days: i64,
    pub readers: u32,
    pub backfill_rate: u32,
    #[serde(with = "humantime_serde")]
    pub backfill_lease: Duration,
    pub limits: UsageLimits,
}

/// A second database, for usage records that are old.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Historical {
    pub database_url: Option<Secret>,
    #[serde(with = "humantime_serde")]
    pub after: Duration,
}

impl Historical {
    /// How it is reached, if there is one.
    pub fn database(&self) -> Option<Database> {
        Some(Database {
            url: Some(self.database_url.clone()?),
            host: String::new(),
            port: 0,
            user: String::new(),
            password: None,
            name: String::new(),
            max_connections: 1,
        })
    }
}

/// The defaults of both levels.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UsageLimits {
    pub tenant: EffectiveLimits,
    pub source: EffectiveLimits,
}

/// What differs for one tenant.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimerTenant {
    pub rate_limit: Option<u32>,
    #[serde(default, deserialize_with = "some_list")]
    pub subjects: Option<Vec<String>>,
}

/// At most so many requests in any time as long as the window.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    pub requests: u32,
    #[serde(with = "humantime_serde")]
    pub window: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Telemetry {
    pub log_format: LogFormat,
    pub log_level: String,
    pub port: Option<u16>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Json,
    Pretty,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shutdown {
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
}

/// Text that must not show up in a log.
#[derive(Clone, Deserialize, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// More than any PostgreSQL is set up for.
const MOST_CONNECTIONS: u32 = 10_000;

/// Why the configuration was refused. Names the key.
#[derive(Debug, thiserror::Error)]
#[error("configuration: {0}")]
pub struct Refused(String);

impl Config {
    /// Defaults, then the file, then the environment.
    pub fn load(file: Option<&Path>) -> Result<Self, Refused> {
        let file = match file {
            Some(path) => Some(path.to_owned()),
            None => Some(PathBuf::from("tidemark.toml")).filter(|path| path.exists()),
        };
        let text = file.as_deref().map(read).transpose()?;
        // What is no text can't be one of ours.
        let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let variables = variables.map(|(name, value)| (name, value.to_string_lossy().into_owned()));
        Self::from_parts(text.as_deref(), variables.collect())
    }

    /// The same from text, which is TOML, and given variables.
    pub fn from_parts(file: Option<&str>, environment: HashMap<String, String>) -> Result<Self, Refused> {
        let toml = |text: &str| config::File::from_str(text, config::FileFormat::Toml);
        let mut sources = config::Config::builder().add_source(toml(DEFAULTS));
        if let Some(text) = file {
            sources = sources.add_source(toml(text));
        }
        // No guessing of types: a token of digits must stay the text that it is.
        let variables = config::Environment::with_prefix("TIDEMARK")
            .prefix_separator("__")
            .separator("__")
            .ignore_empty(true)
            .source(Some(ours(environment)));
        let merged = sources.add_source(variables).build().map_err(|error| Refused(chain(&error)))?;
        let config: Self =
            serde_path_to_error::deserialize(merged).map_err(|error| match error.path().to_string() {
                path if path == "." => Refused(error.into_inner().to_string()),
                path => Refused(format!("{path}: {}", error.into_inner())),
            })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Refused> {
        let refuse = |key: &str, why: String| Err(Refused(format!("{key}: {why}")));
        if self.roles.is_empty() {
            return refuse("roles", format!("must name at least one of {}", Role::names().join(", ")));
        }
        if !matches!(self.jetstream.replicas, 1 | 3) {
            return refuse(
                "jetstream.replicas",
                format!("must be 1 or 3, not {}: two copies tolerate no loss", self.jetstream.replicas),
            );
        }
        for (key, secret) in [
            ("auth.admin_token", &self.auth.admin_token),
            ("auth.api_key", &self.auth.api_key),
            ("auth.token_secret", &self.auth.token_secret),
        ] {
            if let Some(length) = secret.as_ref().map(|secret| secret.expose().chars().count())
                && length < 32
            {
                return refuse(key, format!("must have 32 characters at least, has {length}"));
            }
        }
        if !self.nats.inbox_prefix.as_str().starts_with('_') {
            let why = "must begin with _: requests whose reply goes elsewhere are not answered";
            return refuse("nats.inbox_prefix", why.into());
        }
        if self.usage.subject == self.nats.prefix {
            let why = "must not be nats.prefix: the stream of usage would take requests for events";
            return refuse("usage.subject", why.into());
        }
        if let (Some(historical), Some(operational)) = (&self.historical.database_url, &self.database.url)
            && historical.expose() == operational.expose()
        {
            return refuse("historical.database_url", "must be another database than database.url".into());
        }
        if self.nats.concurrency == 0 {
            return refuse("nats.concurrency", "must be 1 at least: with 0 nothing would be answered".into());
        }
        if !(1..=MOST_CONNECTIONS).contains(&self.database.max_connections) {
            return refuse("database.max_connections", format!("must lie between 1 and {MOST_CONNECTIONS}"));
        }
        for (key, duration) in [
            ("http.request_timeout", self.http.request_timeout),
            ("http.idle_timeout", self.http.idle_timeout),
            ("watermark.deadline", self.watermark.deadline),
            ("watermark.idempotency_window", self.watermark.idempotency_window),
            ("stages.idempotency_window", self.stages.idempotency_window),
            ("stages.rate_limit.window", self.stages.rate_limit.window),
            ("ids.token_ttl", self.ids.token_ttl),
            ("ids.lease_ttl", self.ids.lease_ttl),
            ("ids.unowned_lease_ttl", self.ids.unowned_lease_ttl),
            ("timers.callback_timeout", self.timers.callback_timeout),
            ("timers.near_window", self.timers.near_window),
            ("timers.sweep_interval", self.timers.sweep_interval),
            ("timers.attempts_kept", self.timers.attempts_kept),
            ("usage.answer_within", self.usage.answer_within),
            ("usage.quarantine_kept", self.usage.quarantine_kept),
            ("usage.reconciliation_kept", self.usage.reconciliation_kept),
            ("usage.backfill_lease", self.usage.backfill_lease),
        ] {
            if duration < Duration::from_secs(1) {
                return refuse(key, format!("must be 1s at least, is {duration:?}"));
            }
        }
        if self.usage.answer_within >= self.http.request_timeout {
            return refuse("usage.answer_within", "must be below http.request_timeout, which would cut it off".into());
        }
        // Taken for the name of a part of the program, a misspelt level would silence everything.
        let is_level = |word: &str| word.contains(['=', '[']) || word.trim().parse::<LevelFilter>().is_ok();
        if let Some(word) = self.telemetry.log_level.split(',').find(|word| !is_level(word)) {
            let why = format!("{word:?} is none of off, error, warn, info, debug and trace");
            return refuse("telemetry.log_level", why);
        }
        let century = Duration::from_secs(100 * 365 * 86_400);
        for (key, duration) in [
            ("http.idle_timeout", self.http.idle_timeout),
            ("watermark.idempotency_window", self.watermark.idempotency_window),
            ("ids.token_ttl", self.ids.token_ttl),
            ("ids.lease_ttl", self.ids.lease_ttl),
            ("ids.unowned_lease_ttl", self.ids.unowned_lease_ttl),
            ("stages.idempotency_window", self.stages.idempotency_window),
            ("stages.rate_limit.window", self.stages.rate_limit.window),
            ("timers.min_delay", self.timers.min_delay),
            ("timers.secret_overlap", self.timers.secret_overlap),
            ("timers.attempts_kept", self.timers.attempts_kept),
            ("usage.grace_period", self.usage.grace_period),
            ("usage.future_tolerance", self.usage.future_tolerance),
            ("usage.quarantine_kept", self.usage.quarantine_kept),
            ("usage.reconciliation_kept", self.usage.reconciliation_kept),
            ("usage.backfill_lease", self.usage.backfill_lease),
            ("historical.after", self.historical.after),
        ] {
            if duration > century {
                return refuse(key, "must not be above a hundred years".into());
            }
        }
        if self.ids.default_batch_size < 1 {
            return refuse("ids.default_batch_size", "must be 1 at least".into());
        }
        if self.ids.max_batch_size < self.ids.default_batch_size {
            return refuse("ids.max_batch_size", "must not be below ids.default_batch_size".into());
        }
        if self.ids.max_batch_size > 1_000_000_000 {
            return refuse(
                "ids.max_batch_size",
                "must not be above 1,000,000,000: a crash would skip that many".into(),
            );
        }
        if !(0.0..=1.0).contains(&self.ids.prefetch_threshold) {
            return refuse(
                "ids.prefetch_threshold",
                format!("must lie between 0.0 and 1.0, is {}", self.ids.prefetch_threshold),
            );
        }
        for (key, duration) in [
            ("timers.callback_timeout", self.timers.callback_timeout),
            ("timers.near_window", self.timers.near_window),
            ("timers.sweep_interval", self.timers.sweep_interval),
        ] {
            if duration > Duration::from_secs(86_400) {
                return refuse(key, format!("must be 24h at most, is {duration:?}"));
            }
        }
        for (key, count) in [
            ("timers.concurrency", self.timers.concurrency),
            ("timers.concurrency_per_destination", self.timers.concurrency_per_destination),
        ] {
            if count == 0 {
                return refuse(key, "must be 1 at least: with 0 nothing would fire".into());
            }
        }
        if !(LEAST_RETENTION..=MOST_RETENTION).contains(&self.usage.retention_days) {
            let problem =
                format!("must lie between {LEAST_RETENTION} and {MOST_RETENTION}, is {}", self.usage.retention_days);
            return refuse("usage.retention_days", problem);
        }
        if let Some(url) = &self.historical.database_url
            && let Err(error) = PgConnectOptions::from_str(url.expose())
        {
            return refuse("historical.database_url", error.to_string());
        }
        let least = Duration::from_secs(7 * 86_400).max(self.usage.grace_period);
        if self.historical.after < least {
            return refuse("historical.after", "must not be below 7d, nor below usage.grace_period".into());
        }
        if !(1..=100).contains(&self.usage.readers) {
            return refuse("usage.readers", format!("must lie between 1 and 100, is {}", self.usage.readers));
        }
        if self.usage.backfill_rate == 0 {
            return refuse("usage.backfill_rate", "must be 1 at least".into());
        }
        if !(1..=64).contains(&self.usage.shards) {
            return refuse("usage.shards", format!("must lie between 1 and 64, is {}", self.usage.shards));
        }
        for (key, bound, least) in [
            ("usage.backlog_bytes", self.usage.backlog_bytes, 1 << 20),
            ("usage.backlog_per_source", self.usage.backlog_per_source, 1),
        ] {
            if bound < least {
                return refuse(key, format!("must be {least} at least"));
            }
        }
        for (key, limits) in
            [("usage.limits.tenant", &self.usage.limits.tenant), ("usage.limits.source", &self.usage.limits.source)]
        {
            if let Some((field, problem)) = limits.problem() {
                return refuse(&format!("{key}.{field}"), problem);
            }
        }
        let first = self.stages.first_id;
        if !(1..=i64::from(LAST_STAGE)).contains(&first) {
            return refuse("stages.first_id", format!("must lie between 1 and {LAST_STAGE}, is {first}"));
        }
        Ok(())
    }
}

/// Our variables alone, the familiar names under the ones that they stand for.
fn ours(environment: HashMap<String, String>) -> HashMap<String, String> {
    let familiar = FAMILIAR.iter().filter_map(|(name, key)| {
        let value = environment.get(*name).filter(|value| !value.is_empty())?;
        Some((format!("{PREFIX}{key}"), value.clone()))
    });
    let mut ours: HashMap<String, String> = familiar.collect();
    ours.extend(environment.into_iter().filter(|(name, _)| name.starts_with(PREFIX)));
    ours
}

/// A list, or text with commas as the environment has it.
fn list<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        Text(String),
        List(Vec<String>),
    }
    let names = match OneOrMany::deserialize(deserializer)? {
        OneOrMany::Text(text) => text.split(',').map(|name| name.trim().to_owned()).collect(),
        OneOrMany::List(list) => list,
    };
    names.iter().filter(|name| !name.is_empty()).map(|name| name.parse().map_err(de::Error::custom)).collect()
}

fn some_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    list(deserializer).map(Some)
}

/// The text of a file. What is no TOML is refused here, where the file has a name.
fn read(path: &Path) -> Result<String, Refused> {
    let refused = |problem: &dyn fmt::Display| Refused(format!("{}: {problem}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refused(&error))?;
    text.parse::<toml::Table>().map_err(|error| refused(&error))?;
    Ok(text)
}

/// Networks, and addresses as networks of one.
fn networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
    struct Network(IpNet);
    impl FromStr for Network {
        type Err = String;

        fn from_str(text: &str) -> Result<Self, String> {
            let address = || text.parse().map(|address: std::net::IpAddr| address.to_canonical().into());
            let network = text.parse().or_else(|_| address());
            network.map(Self).map_err(|_| format!("{text:?} is no address and no network such as 10.0.0.0/8"))
        }
    }
    Ok(list::<D, Network>(deserializer)?.into_iter().map(|network| network.0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(file: &str, environment: &[(&str, &str)]) -> Result<Config, Refused> {
        let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Config::from_parts(Some(file), environment)
    }

    #[test]
    fn the_manual_is_a_complete_configuration() {
        let config = load("", &[]).unwrap();
        assert_eq!(config.http.port, 8080);
        assert_eq!(config.watermark.idempotency_window, Duration::from_secs(86_400));
        assert_eq!(config.roles, Role::ALL);
    }

    #[test]
    fn the_environment_wins_over_the_file_and_our_names_over_familiar_ones() {
        let config = load(
            "[http]\nport = 1",
            &[("PORT", "2"), ("PG_HOST", "db"), ("NATS_URL", "nats://a"), ("TIDEMARK__ROLES", "http")],
        )
        .unwrap();
        assert_eq!((config.http.port, &*config.database.host), (2, "db"));
        assert_eq!(config.nats.url.expose(), "nats://a");
        assert_eq!(config.roles, [Role::Http]);
        assert_eq!(load("", &[("PORT", "2"), ("TIDEMARK__HTTP__PORT", "3")]).unwrap().http.port, 3);
    }

    #[test]
    fn a_secret_of_digits_stays_as_it_is_and_is_never_printed() {
        let digits = "00012345678901234567890123456789";
        let config = load("", &[("API_KEY", digits)]).unwrap();
        assert_eq!(config.auth.api_key.as_ref().unwrap().expose(), digits);
        assert!(!format!("{config:?}").contains(digits));
    }

    #[test]
    fn parts_of_the_program_may_have_levels_of_their_own() {
        load("[telemetry]\nlog_level = 'info, sqlx=warn,tidemark[http]=debug'", &[]).unwrap();
    }

    #[test]
    fn nonsense_is_refused_and_named() {
        for (file, environment, expected) in [
            ("[http]\nprot = 1", ("X", ""), "prot"),
            ("nonsense = 1", ("X", ""), "nonsense"),
            ("", ("TIDEMARK__HTTP__PROT", "1"), "prot"),
            ("", ("PORT", "eighty"), "http.port"),
            ("[jetstream]\nreplicas = 2", ("X", ""), "jetstream.replicas: must be 1 or 3, not 2"),
            ("[auth]\nadmin_token = 'short'", ("X", ""), "auth.admin_token: must have 32 characters at least, has 5"),
            ("", ("API_KEY", "short"), "auth.api_key"),
            ("roles = ['cook']", ("X", ""), "cook"),
            ("roles = []", ("X", ""), "roles"),
            ("[nats]\nprefix = 'a.b'", ("X", ""), "nats.prefix"),
            ("[nats]\nconcurrency = 0", ("X", ""), "nats.concurrency"),
            ("[nats]\ninbox_prefix = 'foo'", ("X", ""), "nats.inbox_prefix: must begin with _"),
            ("[usage]\nsubject = 'tm'", ("X", ""), "usage.subject: must not be nats.prefix"),
            ("[database]\nmax_connections = 4294967295", ("X", ""), "database.max_connections"),
            ("[watermark]\nidempotency_window = '500000 years'", ("X", ""), "watermark.idempotency_window"),
            ("[database]\nurl = 'a'\n[historical]\ndatabase_url = 'a'", ("X", ""), "historical.database_url"),
            ("[http]\nrequest_timeout = '1 fortnite'", ("X", ""), "http.request_timeout"),
            ("[ids]\nprefetch_threshold = 1.5", ("X", ""), "ids.prefetch_threshold"),
            ("[ids]\nmax_batch_size = 1", ("X", ""), "ids.max_batch_size"),
            ("[ids]\ntoken_ttl = '500 years'", ("X", ""), "ids.token_ttl"),
            ("[ids]\nlease_ttl = '10ms'", ("X", ""), "ids.lease_ttl"),
            ("[auth]\ntoken_secret = 'short'", ("X", ""), "auth.token_secret"),
            ("[timers]\nconcurrency = 0", ("X", ""), "timers.concurrency"),
            ("[timers]\nsweep_interval = '25h'", ("X", ""), "timers.sweep_interval"),
            ("[timers]\nmin_delay = 'soon'", ("X", ""), "timers.min_delay"),
            ("[usage]\nshards = 0", ("X", ""), "usage.shards"),
            ("[usage]\nanswer_within = '30s'", ("X", ""), "usage.answer_within"),
            ("[usage]\nbackfill_rate = 0", ("X", ""), "usage.backfill_rate"),
            ("[usage]\nreaders = 0", ("X", ""), "usage.readers"),
            ("[usage]\nretention_days = 6", ("X", ""), "usage.retention_days"),
            ("[usage.limits.source]\nmax_batch_size = 1001", ("X", ""), "usage.limits.source.max_batch_size"),
            ("[timers.tenants.'a.b']", ("X", ""), "timers.tenants"),
            ("", ("TIDEMARK__TIMERS__ALLOW_NETWORKS", "nowhere"), "timers.allow_networks"),
            ("[http]\ntrusted_proxies = ['10.0.0.0/33']", ("X", ""), "http.trusted_proxies: \"10.0.0.0/33\" is no"),
            ("[stages]\nfirst_id = 2147483648", ("X", ""), "stages.first_id: must lie between 1 and 2147483647"),
            ("[stages.rate_limit]\nwindow = '10ms'", ("X", ""), "stages.rate_limit.window"),
            ("[telemetry]\nlog_level = 'zzz'", ("X", ""), "telemetry.log_level: \"zzz\" is none of off, error"),
            ("[telemetry]\nlog_level = 'info,sqlx'", ("X", ""), "telemetry.log_level: \"sqlx\""),
            ("not toml", ("X", ""), "TOML"),
        ] {
            let refused = load(file, &[environment]).expect_err(file).to_string();
            assert!(refused.contains(expected), "{file} {environment:?}: {refused}");
        }
    }
}
