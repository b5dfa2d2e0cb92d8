use std::process::ExitCode;

use clap::Parser;
use tidemark::cli::Cli;

/// Requests are short and allocate a little each; the system's allocator is a tenth of their time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
