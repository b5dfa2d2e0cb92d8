//! `tidemark backup` and `tidemark restore`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Args;

use super::{Outcome, print};
use crate::{
    backup::{self, Margins},
    config::Config,
};

#[derive(Debug, Args)]
pub struct BackupOptions {
    /// A folder that is empty, or is made
    folder: PathBuf,
}

#[derive(Debug, Args)]
pub struct RestoreOptions {
    /// What `tidemark backup` made
    folder: PathBuf,
    /// How many numbers each counter, pool and the stages pass over: more than were given by any of them since the backup
    #[arg(long, value_name = "NUMBERS")]
    margin: u32,
    /// How many worker ids of each snowflake key may have been leased for the first time since the backup
    #[arg(long, default_value_t = 64, value_name = "IDS")]
    workers: u32,
    /// How long a lease of a worker id may still be held; what the configuration allows if not given
    #[arg(long, value_parser = humantime::parse_duration, value_name = "DURATION")]
    longest_lease: Option<Duration>,
    /// Remove what the servers have. Without it, they must be empty.
    #[arg(long)]
    replace: bool,
}

fn say(text: String) {
    // Whether somebody reads it decides nothing.
    let _ = print(text);
}

pub async fn save(config: &Config, options: BackupOptions) -> Outcome {
    let manifest = backup::backup(config, &options.folder, &mut say).await?;
    print(format_args!("saved in {}, as of {}", options.folder.display(), manifest.begun_at))?;
    Ok(ExitCode::SUCCESS)
}

pub async fn restore(config: &Config, options: RestoreOptions) -> Outcome {
    let longest_lease = options.longest_lease.unwrap_or(config.ids.lease_ttl.max(config.ids.unowned_lease_ttl));
    let margins = Margins { numbers: options.margin, workers: options.workers, longest_lease };
    let manifest = backup::read(&options.folder)?;
    let jumped = backup::restore(config, &options.folder, margins, options.replace, &mut say).await?;
    let (margin, from) = (options.margin, manifest.begun_at);
    print(format_args!(
        "{} counters of ids and {} pools have passed over {margin} numbers",
        jumped.counters, jumped.pools
    ))?;
    print(format_args!(
        "the next stage is {}; props and acts of {} stages go on further up",
        jumped.next_stage, jumped.stages
    ))?;
    print(format_args!(
        "{} snowflake keys lend no worker id that may be in use for {}; who had one asks for another",
        jumped.snowflake_keys,
        humantime::format_duration(longest_lease)
    ))?;
    print(format_args!(
        "{} timers that were due since are paused: `tidemark timer list --status paused`, then resume or cancel each",
        jumped.paused_timers
    ))?;
    print(format_args!(
        "what was made after {from} is not there: keys, pools, stages, timers, usage, and API keys that were revoked are valid again"
    ))?;
    Ok(ExitCode::SUCCESS)
}
