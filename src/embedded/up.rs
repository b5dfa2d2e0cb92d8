//! `tidemark up`: everything in one data folder, found again at the next start.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::signal::kill,
    unistd::Pid,
};
use rand::distr::{Alphanumeric, SampleString};
use serde::{Deserialize, Serialize};

use super::{Callers, Doing, Durability, EmbeddedError, NatsServer, Postgres, Result, User, free_port};
use crate::{
    access::{DEFAULT_TENANT, Grant},
    api::Name,
    config::{Config, Secret},
    jetstream::declarations,
    registry::keys,
    server::KnownKey,
};

/// The shape of the data folder. A folder of another shape is refused.
const FORMAT: &str = "2";

#[derive(Debug, Clone)]
pub struct UpOptions {
    pub data: PathBuf,
    pub http_port: u16,
    pub nats_port: u16,
    pub pg_port: u16,
    pub tenants: Vec<Name>,
}

/// The servers of one data folder while they run.
pub struct Up {
    pub nats: NatsServer,
    pub postgres: Postgres,
    data: PathBuf,
    http_port: u16,
    secrets: Secrets,
    callers: Callers,
    /// Held as long as the folder is in use.
    _lock: File,
}

/// What is made once and kept, so that a second `up` has the same.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Secrets {
    admin_token: String,
    pg_password: String,
    /// By user.
    nats_passwords: BTreeMap<String, String>,
    /// By tenant.
    api_keys: BTreeMap<String, String>,
}

impl Up {
    /// Starts both servers.
    pub async fn start(options: &UpOptions, config: &Config) -> Result<Self> {
        check_tenants(&options.tenants, &config.nats.inbox_prefix)?;
        let data = &options.data;
        let lock = open_folder(data)?;
        let http_port = free_port(options.http_port, "--http-port")?;
        let nats_port = free_port(options.nats_port, "--nats-port")?;
        let pg_port = free_port(options.pg_port, "--pg-port")?;
        let secrets = Secrets::load_or_make(&data.join("secrets.json"), &options.tenants)?;
        let user = |name: &str| User { name: name.to_owned(), password: secrets.nats_passwords[name].clone() };
        let callers = Callers {
            prefix: config.nats.prefix.clone(),
            inbox_prefix: config.nats.inbox_prefix.clone(),
            usage: config.usage.subject.clone(),
            streams: declarations(config).iter().map(|declaration| declaration.name().to_owned()).collect(),
            service: user(SERVICE_USER),
            operator: user(DEFAULT_TENANT),
            tenants: options.tenants.iter().map(|tenant| (tenant.clone(), user(tenant.as_str()))).collect(),
        };
        let (postgres, nats_folder, accounts) = (data.join("postgres"), data.join("nats"), callers.configuration());
        let (nats, postgres) = tokio::join!(
            NatsServer::start(&nats_folder, nats_port, &accounts),
            Postgres::start(&postgres, pg_port, &secrets.pg_password, Durability::Synced),
        );
        Ok(Self { nats: nats?, postgres: postgres?, data: data.clone(), http_port, secrets, callers, _lock: lock })
    }

    /// The configuration of a process that serves on these servers.
    pub fn configure(&self, config: &mut Config) {
        config.http.port = self.http_port;
        config.nats.url = Secret::new(self.callers.service.url(self.nats.port));
        config.nats.monitor_url = Some(self.nats.monitor_url());
        config.database.url = Some(Secret::new(self.postgres.url()));
        config.auth.admin_token = Some(Secret::new(self.admin_token()));
        // Whoever tries callbacks on one machine has his receiver there too.
        let loopback = LOOPBACK.map(|network| network.parse::<ipnet::IpNet>().expect("a network"));
        config.timers.allow_networks.extend(loopback);
    }

    /// All tenants, the default one first.
    pub fn tenants(&self) -> impl Iterator<Item = Name> {
        let default = DEFAULT_TENANT.parse().expect("a valid name");
        std::iter::once(default).chain(self.callers.tenants.iter().map(|(tenant, _)| tenant.clone()))
    }

    pub fn admin_token(&self) -> &str {
        &self.secrets.admin_token
    }

    /// The default tenant's key.
    pub fn api_key(&self) -> &str {
        &self.secrets.api_keys[DEFAULT_TENANT]
    }

    /// The keys that callers find in `DIR/env`.
    pub fn known_keys(&self) -> Vec<KnownKey> {
        let all = Grant::ALL.to_vec();
        let tenants_roles: Vec<Grant> = all.iter().copied().filter(|grant| *grant != Grant::Elevated).collect();
        let default: Name = DEFAULT_TENANT.parse().expect("a valid name");
        let key = |tenant: &Name, roles: Vec<Grant>| KnownKey {
            key: self.secrets.api_keys[tenant.as_str()].clone(),
            tenant: tenant.clone(),
            source: default.clone(),
            roles,
        };
        let mut keys = vec![key(&default, all)];
        keys.extend(self.callers.tenants.iter().map(|(tenant, _)| key(tenant, tenants_roles.clone())));
        keys
    }

    /// Writes `DIR/env` for callers and `DIR/service.env` for a second process of ours. What callbacks of a tenant are
    /// signed with only the running service knows.
    pub fn write_env(&self, webhook_secrets: &[(Name, String)]) -> Result<PathBuf> {
        let mut env = vec![
            ("TIDEMARK_URL".to_owned(), format!("http://127.0.0.1:{}", self.http_port)),
            ("NATS_URL".to_owned(), self.callers.operator.url(self.nats.port)),
            ("DATABASE_URL".to_owned(), self.postgres.url()),
            ("TIDEMARK_ADMIN_TOKEN".to_owned(), self.admin_token().to_owned()),
            ("TIDEMARK_API_KEY".to_owned(), self.api_key().to_owned()),
        ];
        for (tenant, user) in &self.callers.tenants {
            let suffix = suffix(tenant);
            env.push((format!("NATS_URL_{suffix}"), user.url(self.nats.port)));
            env.push((format!("TIDEMARK_API_KEY_{suffix}"), self.secrets.api_keys[tenant.as_str()].clone()));
        }
        for (tenant, secret) in webhook_secrets {
            let suffix = match tenant.as_str() {
                DEFAULT_TENANT => String::new(),
                _ => format!("_{}", suffix(tenant)),
            };
            env.push((format!("TIDEMARK_WEBHOOK_SECRET{suffix}"), secret.clone()));
        }
        let service = [
            ("NATS_URL".to_owned(), self.callers.service.url(self.nats.port)),
            ("DATABASE_URL".to_owned(), self.postgres.url()),
            ("TIDEMARK__NATS__MONITOR_URL".to_owned(), self.nats.monitor_url()),
            ("TIDEMARK__AUTH__ADMIN_TOKEN".to_owned(), self.admin_token().to_owned()),
            ("TIDEMARK__TIMERS__ALLOW_NETWORKS".to_owned(), LOOPBACK.join(",")),
        ];
        write_private(&self.data.join("service.env"), &exports(&service))?;
        let path = self.data.join("env");
        write_private(&path, &exports(&env))?;
        Ok(path)
    }

    /// What to show when everything runs: where, as whom, and three commands to begin with.
    pub fn welcome(&self, env: &Path) -> String {
        let tidemark = std::env::current_exe().map_or_else(|_| "tidemark".into(), |path| path.display().to_string());
        let source = format!(". {}", env.display());
        format!(
            r#"
Tidemark is up. Ctrl-C stops it; the data stays in {data}.

  HTTP         http://127.0.0.1:{http}   (documentation: http://127.0.0.1:{http}/docs)
  NATS         nats://127.0.0.1:{nats}
  PostgreSQL   postgres://127.0.0.1:{pg}/tidemark
  admin token  {token}
  API key      {key}

Paste these into another shell:

  {source} && curl -s -X POST "$TIDEMARK_URL/v1/config/increment" -H "Authorization: Bearer $TIDEMARK_ADMIN_TOKEN" -d '{{"key": "orders", "base": 1000}}'
  {source} && curl -s "$TIDEMARK_URL/v1/id/increment?key=orders&size=3" -H "X-API-Key: $TIDEMARK_API_KEY"
  {source} && {tidemark} call {prefix}.id.increment.orders
"#,
            data = self.data.display(),
            prefix = self.callers.prefix,
            http = self.http_port,
            nats = self.nats.port,
            pg = self.postgres.port,
            token = self.admin_token(),
            key = self.api_key(),
        )
    }

    /// Stops both servers in good order.
    pub async fn stop(self) {
        let stop = move || {
            let Self { mut nats, mut postgres, .. } = self;
            nats.stop();
            postgres.stop();
        };
        let _ = tokio::task::spawn_blocking(stop).await;
    }
}

/// What callbacks may reach besides public addresses.
const LOOPBACK: [&str; 2] = ["127.0.0.0/8", "::1/128"];

/// Has a dot, so that no tenant can have the same name.
const SERVICE_USER: &str = "tidemark.service";

impl Secrets {
    /// Reads what was made before and adds what is missing.
    fn load_or_make(path: &Path, tenants: &[Name]) -> Result<Self> {
        let mut secrets = match std::fs::read(path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| EmbeddedError::new(format!("{} is damaged: {error}", path.display())))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(EmbeddedError::new(format!("reading {}: {error}", path.display()))),
        };
        let random = || Alphanumeric.sample_string(&mut rand::rng(), 40);
        for secret in [&mut secrets.admin_token, &mut secrets.pg_password] {
            if secret.is_empty() {
                *secret = random();
            }
        }
        for tenant in tenants.iter().map(Name::as_str).chain([DEFAULT_TENANT]) {
            secrets.api_keys.entry(tenant.to_owned()).or_insert_with(|| keys::generate().1);
            secrets.nats_passwords.entry(tenant.to_owned()).or_insert_with(random);
        }
        secrets.nats_passwords.entry(SERVICE_USER.to_owned()).or_insert_with(random);
        let text = serde_json::to_string_pretty(&secrets).expect("text is JSON");
        write_private(path, &text)?;
        Ok(secrets)
    }
}

/// Opens a data folder, or makes it. The answer is its lock.
fn open_folder(data: &Path) -> Result<File> {
    let shown = data.display();
    std::fs::create_dir_all(data).doing(|| format!("making {shown}"))?;
    let lock = lock(data)?;
    let format = data.join("format");
    match std::fs::read_to_string(&format) {
        Ok(found) if found.trim() == FORMAT => Ok(lock),
        Ok(found) => Err(EmbeddedError::new(format!(
            "{shown} was made by another version of Tidemark (format {}, this one has {FORMAT}): choose another --data",
            found.trim()
        ))),
        Err(_) => {
            let strangers = std::fs::read_dir(data)
                .doing(|| format!("reading {shown}"))?
                .flatten()
                .any(|entry| entry.file_name() != "lock");
            if strangers {
                return Err(EmbeddedError::new(format!(
                    "{shown} is not empty and no data folder of Tidemark: choose another --data"
                )));
            }
            std::fs::write(&format, FORMAT).doing(|| format!("writing {}", format.display()))?;
            Ok(lock)
        }
    }
}

/// Takes the folder's lock. Our servers inherit it, so a folder whose `up` was killed stays locked until they have ended
/// too: two nats-servers on one store would ruin it. That is waited for; a living `up` is not.
fn lock(data: &Path) -> Result<File> {
    let path = data.join("lock");
    let what = || format!("locking {}", path.display());
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path).doing(what)?;
    let deadline = Instant::now() + Duration::from_secs(30);
    while file.try_lock().is_err() {
        let holder = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
        let lives = holder.is_some_and(|holder| kill(Pid::from_raw(holder), None).is_ok());
        if lives || Instant::now() > deadline {
            let data = data.display();
            return Err(EmbeddedError::new(format!(
                "{data} is in use by another `tidemark up`: stop it, or choose another --data"
            )));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    fcntl(&file, FcntlArg::F_SETFD(FdFlag::empty())).map_err(std::io::Error::from).doing(what)?;
    file.set_len(0).doing(what)?;
    write!(file, "{}", std::process::id()).doing(what)?;
    Ok(file)
}

/// A tenant's name as part of a variable's.
fn suffix(tenant: &Name) -> String {
    tenant.as_str().to_ascii_uppercase().replace('-', "_")
}

/// Two tenants whose variables would have the same name can't both be in one file, and nobody may hear our replies.
fn check_tenants(tenants: &[Name], inbox_prefix: &Name) -> Result<()> {
    for (index, tenant) in tenants.iter().enumerate() {
        if format!("_INBOX_{tenant}") == inbox_prefix.as_str() {
            return Err(EmbeddedError::new(format!(
                "TIDEMARK_TENANTS: {tenant} would hear our own replies on {inbox_prefix}; choose another nats.inbox_prefix"
            )));
        }
        if let Some(twin) = tenants[..index].iter().find(|other| suffix(other) == suffix(tenant)) {
            return Err(EmbeddedError::new(format!(
                "TIDEMARK_TENANTS: {twin} and {tenant} would share the variable TIDEMARK_API_KEY_{}",
                suffix(tenant)
            )));
        }
    }
    Ok(())
}

fn exports(variables: &[(String, String)]) -> String {
    // All values are letters, digits and the characters of addresses; the quotes are for the ones in URLs.
    variables.iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect()
}

/// Writes a file that only we may read.
pub fn write_private(path: &Path, text: &str) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let partial = path.with_extension("partial");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial).doing(what)?;
    file.write_all(text.as_bytes()).doing(what)?;
    std::fs::rename(&partial, path).doing(what)
}
