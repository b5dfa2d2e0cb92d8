use std::process::ExitCode;

use clap::Parser;
use tidemark::cli::NoidTool;

fn main() -> ExitCode {
    match NoidTool::parse().run() {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("noid-tool: {failure}");
            ExitCode::FAILURE
        }
    }
}
