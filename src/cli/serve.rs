use std::process::ExitCode;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::{Outcome, init_logs};
use crate::{config::Config, roles::Role, server::Server};

#[derive(Debug, Args)]
pub struct Options {
    /// What this process does; the configuration's roles if not given.
    #[arg(long, value_delimiter = ',')]
    roles: Vec<Role>,
    /// Go on with empty counters although the old ones are gone. Ids may repeat.
    #[arg(long)]
    fresh: bool,
}

pub async fn run(mut config: Config, options: Options) -> Outcome {
    if !options.roles.is_empty() {
        config.roles = options.roles;
    }
    init_logs(&config)?;
    let stop = on_signal()?;
    let mut server = Server::bind(config).await?;
    server.fresh = options.fresh;
    server.run(stop).await?;
    Ok(ExitCode::SUCCESS)
}

/// Cancelled by SIGTERM or Ctrl-C. A second one ends the process at once.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let token = stop.clone();
    tokio::spawn(async move {
        let mut next = async || tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} };
        next().await;
        token.cancel();
        next().await;
        std::process::exit(130);
    });
    Ok(stop)
}
