use std::process::ExitCode;

use clap::Subcommand;

use super::{Failure, Outcome, print};
use crate::{config::Config, database, jetstream};

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show how the live streams differ from their declarations. Exits with 1 if they do.
    Diff,
    /// Create what is missing and update what differs, as far as nothing is lost.
    Apply {
        /// Remake a stream that holds identity and has vanished or been remade. Ids may repeat.
        #[arg(long)]
        fresh: bool,
    },
}

pub async fn run(config: &Config, command: Command) -> Outcome {
    let nats = jetstream::connect(&config.nats).await?;
    jetstream::require_version(&nats)?;
    let context = async_nats::jetstream::new(nats);
    let declarations = jetstream::declarations(config);
    let (drifts, applied) = match command {
        Command::Diff => {
            let mut drifts = Vec::new();
            for declaration in &declarations {
                drifts.push(jetstream::diff(&context, declaration).await?);
            }
            (drifts, false)
        }
        Command::Apply { fresh } => {
            let pool = database::pool(&config.database)?;
            database::migrate(&pool, &database::MIGRATIONS).await?;
            (jetstream::apply_guarded(&pool, &context, &declarations, fresh).await?, true)
        }
    };
    let mut open = false;
    for drift in &drifts {
        let (text, still_open) = drift.describe(applied);
        print(text)?;
        open |= still_open;
    }
    match (open, applied) {
        (false, _) => Ok(ExitCode::SUCCESS),
        (true, false) => Ok(ExitCode::FAILURE),
        (true, true) => Err(Failure(
            "what would lose data was left as it is; if it is meant, change it with `nats stream edit`".into(),
        )),
    }
}
