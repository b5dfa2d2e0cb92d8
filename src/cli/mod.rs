//! The command line.

mod backfill;
mod backup;
mod bench;
mod call;
mod context;
mod docs;
mod doctor;
mod id;
mod instances;
mod lines;
mod noid;
mod noid_tool;
mod records;
mod remote;
mod report;
mod screen;
mod serve;
mod stage;
mod streams;
mod timer;
mod up;
mod usage;

use std::{fmt, io::Write, path::PathBuf, process::ExitCode};

use clap::{Args, CommandFactory, Parser, Subcommand};

pub use context::variables as context_variables;
pub use noid_tool::NoidTool;

use crate::{config::Config, database, error::chain, http, telemetry};

/// Identifiers, stage numbers, timers and a usage ledger for other services.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Common {
    /// The configuration; ./tidemark.toml if it exists, else the defaults. The environment wins over it.
    #[arg(long, global = true, env = "TIDEMARK_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Another deployment: a file of variables as `up` writes it, by its path or by its name in ~/.config/tidemark
    /// (NAME.env).
    #[arg(long, global = true, env = "TIDEMARK_CONTEXT", value_name = "NAME")]
    context: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start everything here: nats-server and PostgreSQL as children, and all roles.
    Up(up::Options),
    /// Serve, on a nats-server and a PostgreSQL that run already.
    Serve(serve::Options),
    /// Bring the database up to date.
    Migrate,
    /// Compare or apply the declared streams and buckets.
    #[command(subcommand)]
    Streams(streams::Command),
    /// Look at NATS, PostgreSQL and the streams, and say what is wrong.
    Doctor,
    /// Save both stores into a folder, while everything runs.
    Backup(backup::BackupOptions),
    /// Put a backup into servers that nobody serves on, so that no id is given again.
    Restore(backup::RestoreOptions),
    /// List who is alive: number, roles, version, start, ranges held.
    Instances(instances::Options),
    /// Print the OpenAPI document.
    Openapi,
    /// Bring the tables of operations in the documentation up to date.
    #[command(hide = true)]
    Docs(docs::Options),
    /// Measure the speed that we promise, on servers started for it. Fails if a goal is missed.
    Bench(bench::Options),
    /// Take ids, and look after the keys that they come from.
    Id(remote::Verbs<id::Verb>),
    /// Make and tend noid pools, and mint from them.
    Noid(remote::Verbs<noid::Verb>),
    /// Allocate stages, and look after the props and acts inside them.
    Stage(remote::Verbs<stage::Verb>),
    /// Set timers, look after them, and watch them fire.
    Timer(timer::TimerOptions),
    /// Send usage records, watch them, and look after what was refused.
    Usage(usage::UsageOptions),
    /// Send one request over NATS and print the reply.
    Call(call::Options),
    /// Print what a shell needs to complete our commands.
    Completions { shell: clap_complete::Shell },
}

/// One sentence for whoever started us.
pub struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(chain(&error))
    }
}

type Outcome = Result<ExitCode, Failure>;

/// Prints a line.
fn print(line: impl fmt::Display) -> Result<(), Failure> {
    print_to_reader(line).map(drop)
}

/// The same, and tells whether there is still a reader. One who has seen enough (`| head`) is no error.
fn print_to_reader(line: impl fmt::Display) -> Result<bool, Failure> {
    match writeln!(std::io::stdout(), "{line}") {
        Ok(()) => Ok(true),
        Err(error) if lines::is_closed_pipe(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    print(serde_json::to_string(value)?)
}

/// Prints an answer as JSON, or as people read it.
fn show<T: serde::Serialize>(
    json: bool,
    answer: &T,
    print: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    if json { print_json(answer) } else { print() }
}

/// Prints a name and a value, below each other's.
fn print_row(name: &str, value: &dyn fmt::Display) -> Result<(), Failure> {
    print(format_args!("{name:<12}{value}"))
}

impl Cli {
    pub async fn run(self) -> Outcome {
        let config = Config::load(self.common.config.as_deref())?;
        match self.command {
            Command::Up(options) => up::run(config, options).await,
            Command::Serve(options) => serve::run(config, options).await,
            Command::Migrate => migrate(&config).await,
            Command::Streams(command) => streams::run(&config, command).await,
            Command::Doctor => doctor::run(&config).await,
            Command::Backup(options) => backup::save(&config, options).await,
            Command::Restore(options) => backup::restore(&config, options).await,
            Command::Instances(options) => instances::run(&config, options).await,
            Command::Openapi => {
                print(serde_json::to_string_pretty(&http::openapi_document())?)?;
                Ok(ExitCode::SUCCESS)
            }
            Command::Docs(options) => docs::run(&options),
            Command::Bench(options) => bench::run(options).await,
            Command::Id(options) => options.run(&config, id::converse).await,
            Command::Noid(options) => options.run(&config, noid::converse).await,
            Command::Stage(options) => options.run(&config, stage::converse).await,
            Command::Usage(options) => usage::run(&config, options).await,
            Command::Timer(options) => options.run(&config).await,
            Command::Call(options) => call::run(&config, options).await,
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "tidemark", &mut script);
                print(String::from_utf8_lossy(&script).trim_end())?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

async fn migrate(config: &Config) -> Outcome {
    let pool = database::pool(&config.database)?;
    database::migrate(&pool, &database::MIGRATIONS).await?;
    print("the database is up to date")?;
    if let Some(historical) = config.historical.database() {
        database::migrate(&database::pool(&historical)?, &database::HISTORICAL_MIGRATIONS).await?;
        print("the historical database is up to date")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn init_logs(config: &Config) -> Result<(), Failure> {
    telemetry::init_logs(&config.telemetry).map_err(|problem| Failure(format!("configuration: {problem}")))
}
