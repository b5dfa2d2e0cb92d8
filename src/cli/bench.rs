use std::process::ExitCode;

use clap::Args;

use super::{Failure, Outcome, print};
use crate::bench;

#[derive(Debug, Args)]
pub struct Options {
    /// Only the rows whose name contains this.
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
}

pub async fn run(options: Options) -> Outcome {
    print(format_args!("{:<34} {:>12} {:>12}  {:<6}", "what", "figure", "goal", ""))?;
    let rows = bench::run(&options.only, |row| drop(print(row))).await;
    if rows.is_empty() {
        return Err(Failure(format!("--only {}: no row has that in its name", options.only)));
    }
    Ok(if rows.iter().all(bench::Row::is_ok) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
