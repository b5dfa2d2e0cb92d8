use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::{Failure, Outcome, screen};
use crate::bench::{self, Effort, Report, Row};

#[derive(Debug, Args)]
pub struct Options {
    /// Only the rows whose name contains this.
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    /// How often each pair is measured. Fewer are quicker, and say less.
    #[arg(long, default_value_t = Effort::DEFAULT_ROUNDS, value_name = "N")]
    rounds: usize,
    /// Also write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a page of documentation.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Also write the curves as SVG.
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

pub async fn run(options: Options) -> Outcome {
    let names = bench::names(&options.only);
    if names.is_empty() {
        return Err(Failure(format!("--only {}: no row has that in its name", options.only)));
    }
    let bar = progress(names.len());
    let mut begun = 0;
    let report = bench::run(&options.only, Effort::of(options.rounds), |name| {
        bar.set_position(begun);
        bar.set_message(name);
        begun += 1;
    })
    .await;
    bar.finish_and_clear();
    show(&report.rows)?;
    write(&options, &report)?;
    Ok(if report.rows.iter().all(Row::is_ok) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// On stderr, if that is a terminal.
fn progress(rows: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {elapsed}: {msg}").expect("a valid template");
    let bar = ProgressBar::new(rows as u64).with_style(style);
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}

fn show(rows: &[Row]) -> Result<(), Failure> {
    screen::Table::of(["what", "measured", "goal", "", "from"], rows, |row| {
        let measured = &row.measured;
        let (figure, goal) = (measured.unit.show(measured.figure), measured.unit.show(measured.goal));
        let verdict = screen::state(if row.is_ok() { "met" } else { "MISSED" });
        vec![row.name.to_owned(), figure, goal, verdict, measured.detail.clone()]
    })
}

fn write(options: &Options, report: &Report) -> Result<(), Failure> {
    if let Some(file) = &options.json {
        save(file, &serde_json::to_string_pretty(&bench::json(&report.rows))?)?;
    }
    if let Some(file) = &options.markdown {
        save(file, &bench::markdown(&report.rows, &report.servers, options.rounds))?;
    }
    if let Some(folder) = &options.svg {
        fs::create_dir_all(folder)?;
        for row in &report.rows {
            if let Some(plot) = &row.measured.plot {
                save(&folder.join(bench::file_name(row)), &plot.svg())?;
            }
        }
    }
    Ok(())
}

fn save(file: &Path, text: &str) -> Result<(), Failure> {
    fs::write(file, text).map_err(|error| Failure(format!("{}: {error}", file.display())))
}
