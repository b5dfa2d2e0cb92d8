use std::process::ExitCode;

use clap::Parser;
use tidemark::cli::{Cli, Failure, context_variables};

/// Requests are short and allocate a little each; the system's allocator is a tenth of their time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    run().unwrap_or_else(|failure| {
        eprintln!("tidemark: {failure}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode, Failure> {
    for (name, value) in context_variables(std::env::args_os())? {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var(name, value) };
    }
    tokio::runtime::Runtime::new()?.block_on(Cli::parse().run())
}
