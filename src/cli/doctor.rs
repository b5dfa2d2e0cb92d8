use std::process::ExitCode;

use super::{Outcome, print};
use crate::{config::Config, doctor};

pub async fn run(config: &Config) -> Outcome {
    let mut healthy = true;
    for finding in doctor::examine(config).await {
        print(&finding)?;
        healthy &= finding.is_ok();
    }
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
