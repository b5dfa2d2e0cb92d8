use std::process::ExitCode;

use clap::Parser;
use tidemark::cli::Cli;

#[tokio::main]
async fn main() -> ExitCode {
    match Cli::parse().run().await {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("tidemark: {failure}");
            ExitCode::FAILURE
        }
    }
}
