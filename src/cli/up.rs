use std::{path::PathBuf, process::ExitCode};

use clap::Args;

use super::{Outcome, init_logs, print, serve::on_signal};
use crate::{
    access::DEFAULT_TENANT,
    api::{Name, NoParameters},
    client::Client,
    config::{self, Config, LogFormat},
    embedded::{Up, UpOptions},
    error::{Error, Result, chain},
    jetstream,
    server::Server,
};

#[derive(Debug, Args)]
pub struct Options {
    /// The folder for everything that is kept.
    #[arg(long, default_value = "data", value_name = "DIR")]
    data: PathBuf,
    /// Where HTTP listens; 0 for any free port.
    #[arg(long, default_value_t = 8080)]
    http_port: u16,
    /// Where NATS listens; 0 for any free port.
    #[arg(long, default_value_t = 4222)]
    nats_port: u16,
    /// Where PostgreSQL listens; 0 for any free port.
    #[arg(long, default_value_t = 15432)]
    pg_port: u16,
    /// Tenants to make keys and NATS users for, besides the default one.
    #[arg(long, env = "TIDEMARK_TENANTS", value_delimiter = ',', value_name = "NAMES")]
    tenants: Vec<String>,
    /// Go on with empty counters although the old ones are gone. Ids may repeat.
    #[arg(long)]
    fresh: bool,
}

pub async fn run(mut config: Config, options: Options) -> Outcome {
    // Whoever runs this sits in front of it.
    config.telemetry.log_format = LogFormat::Pretty;
    init_logs(&config)?;
    let stop = on_signal()?;
    std::fs::create_dir_all(&options.data)?;
    let options_up = UpOptions {
        data: options.data.canonicalize()?,
        http_port: options.http_port,
        nats_port: options.nats_port,
        pg_port: options.pg_port,
        tenants: tenants(&options.tenants)?,
    };
    let up = tokio::select! {
        up = Up::start(&options_up, &config) => up?,
        // The servers that were started stop with the future that owns them.
        () = stop.cancelled() => return Ok(ExitCode::SUCCESS),
    };
    up.configure(&mut config);
    let outcome = serve(config, &up, options.fresh, stop).await;
    up.stop().await;
    outcome
}

async fn serve(config: Config, up: &Up, fresh: bool, stop: tokio_util::sync::CancellationToken) -> Outcome {
    let nats = config.nats.clone();
    let mut server = Server::bind(config).await?;
    server.fresh = fresh;
    server.known_keys = up.known_keys();
    let mut is_ready = server.is_ready();
    let welcome = async {
        if is_ready.wait_for(|ready| *ready).await.is_ok() {
            let secrets = webhook_secrets(&nats, up).await.unwrap_or_else(|error| {
                eprintln!("tidemark: {}", chain(&error));
                Vec::new()
            });
            match up.write_env(&secrets) {
                Ok(env) => drop(print(up.welcome(&env))),
                Err(error) => eprintln!("tidemark: {error}"),
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        outcome = server.run(stop) => outcome?,
        () = welcome => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn webhook_secrets(nats: &config::Nats, up: &Up) -> Result<Vec<(Name, String)>> {
    let away = |error| Error::unavailable("NATS is not reachable").source(error);
    let client = Client::new(jetstream::connect(nats).await.map_err(away)?, nats.prefix.clone());
    let mut secrets = Vec::new();
    for tenant in up.tenants() {
        let secret = client.webhook_secret(&tenant, &NoParameters {}).await?.secret;
        secrets.push((tenant, secret));
    }
    Ok(secrets)
}

/// The default tenant is always there, and may be named all the same.
fn tenants(names: &[String]) -> Result<Vec<Name>> {
    let mut tenants: Vec<Name> = Vec::new();
    for name in names.iter().map(|name| name.trim()).filter(|name| !name.is_empty() && *name != DEFAULT_TENANT) {
        let tenant: Name = name.parse().map_err(|error| Error::field("TIDEMARK_TENANTS", error))?;
        if !tenants.contains(&tenant) {
            tenants.push(tenant);
        }
    }
    Ok(tenants)
}
