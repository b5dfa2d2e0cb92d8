//! `tidemark backup` and `tidemark restore`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Args;

use super::{Outcome, print};
use crate::{
    backup::{self, Margins, Restore},
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
    /// How many ids each key, each pool and the stages pass over: more than any of them gave since the backup
    #[arg(long, value_name = "IDS", value_parser = clap::value_parser!(u32).range(1..))]
    margin: u32,
    /// How many leases of worker ids of a snowflake key may have been taken since the backup
    #[arg(long, default_value_t = 64, value_name = "IDS")]
    workers: u32,
    /// How long a lease of a worker id may still be held; what the configuration allows if not given
    #[arg(long, value_parser = humantime::parse_duration, value_name = "DURATION")]
    longest_lease: Option<Duration>,
    /// Pause every timer, not only those that were due since: one that is due later may have been fired by hand or canceled
    #[arg(long)]
    pause_timers: bool,
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
    let wanted = Restore { margins, pause_timers: options.pause_timers, replace: options.replace };
    let (margins, jumped) = backup::restore(config, &options.folder, wanted, &mut say).await?;
    let (margin, from) = (margins.numbers, manifest.begun_at);
    let (counters, pools, stages) = (&jumped.counters, &jumped.pools, &jumped.stages);
    print(format_args!("{} keys and {} pools have passed over {margin} ids", counters.keys, pools.keys))?;
    for (what, passed) in [("the key", counters), ("the pool", pools), ("what is in stage", stages)] {
        for broken in &passed.broken {
            print(format_args!("{what} {broken} is broken, as it was in the backup, and gives nothing"))?;
        }
    }
    print(format_args!(
        "the next stage is {}; props and acts of {} stages go on further up",
        jumped.next_stage, stages.keys
    ))?;
    print(format_args!(
        "{} snowflake keys lend no worker id that may be in use for {}; who had one asks for another",
        jumped.snowflake_keys,
        humantime::format_duration(longest_lease)
    ))?;
    print(format_args!(
        "{} timers that may have fired since are paused: `tidemark timer list --status paused`, then resume or cancel each",
        jumped.paused_timers
    ))?;
    print(format_args!(
        "what was made after {from} is not there: keys, pools, stages, timers, usage, and API keys that were revoked are valid again"
    ))?;
    Ok(ExitCode::SUCCESS)
}
