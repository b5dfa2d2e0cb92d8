//! What was measured, for people and for machines.

use std::{fmt::Write, fs, process::Command};

use chrono::Utc;
use serde_json::{Value, json};

use super::{Row, Unit};

/// `{"rows": […]}`, as other programs read it.
pub fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let measured = &row.measured;
        json!({
            "name": row.name,
            "goal": measured.goal,
            "figure": measured.figure,
            "unit": measured.unit.as_str(),
            "ok": row.is_ok(),
            "detail": measured.detail,
        })
    };
    json!({ "rows": rows.iter().map(row).collect::<Vec<_>>() })
}

/// A page for the documentation: nobody types a figure.
pub fn markdown(rows: &[Row], servers: &str, rounds: usize) -> String {
    let mut page = format!(
        "# Performance\n\nWritten by `make bench ARGS=\"--rounds {rounds}\"`, {}, with\n\
         Tidemark {}, {servers}, on {}.\nEverything runs on this one machine: both servers, Tidemark, and those who call it.\n\n\
         A ratio has both of its sides in this run, in turns. Absolute figures are this machine's.\n\n\
         | what | goal | measured | | |\n|---|---:|---:|---|---|\n",
        Utc::now().format("%F"),
        env!("CARGO_PKG_VERSION"),
        machine(),
    );
    for row in rows {
        let (unit, measured) = (row.measured.unit, &row.measured);
        let verdict = if row.is_ok() { "met" } else { "**missed**" };
        let bound = if unit.more_is_better() { "at least" } else { "at most" };
        let _ = writeln!(
            page,
            "| {} | {bound} {} | {} | {verdict} | {} |",
            row.name,
            unit.show(measured.goal),
            unit.show(measured.figure),
            measured.detail
        );
    }
    let plots: Vec<&Row> = rows.iter().filter(|row| row.measured.plot.is_some()).collect();
    if !plots.is_empty() {
        page.push_str("\n## Curves\n\n");
        for row in plots {
            let _ = writeln!(page, "![{}](plots/{})\n", row.name, file_name(row));
        }
    }
    page
}

/// Of the row's plot.
pub fn file_name(row: &Row) -> String {
    let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let words: String = row.name.chars().map(letter).collect();
    let words: Vec<&str> = words.split('-').filter(|word| !word.is_empty()).collect();
    format!("{}.svg", words.join("-"))
}

/// Processor, cores, memory, system.
fn machine() -> String {
    let line = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let value = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split(':').nth(1));
        value.map(|value| value.trim().to_owned())
    };
    let processor = line("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kilobytes = line("/proc/meminfo", "MemTotal").and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    let memory = kilobytes.map(|kilobytes| format!(", {:.0} GiB", kilobytes / 1024.0 / 1024.0)).unwrap_or_default();
    let system = Command::new("uname").args(["-s", "-r"]).output().ok();
    let system = system.map(|said| String::from_utf8_lossy(&said.stdout).trim().to_owned()).unwrap_or_default();
    format!("{processor}, {cores} cores{memory}, {system}")
}

impl Unit {
    pub fn as_str(self) -> &'static str {
        match self {
            Unit::Ratio => "ratio",
            Unit::PerSecond => "per_second",
            Unit::Milliseconds => "ms",
            Unit::Seconds => "s",
            Unit::Megabytes => "MB",
        }
    }

    pub fn more_is_better(self) -> bool {
        matches!(self, Unit::Ratio | Unit::PerSecond)
    }

    /// A figure as people read it.
    pub fn show(self, figure: f64) -> String {
        match self {
            Unit::Ratio => format!("{figure:.2}"),
            Unit::PerSecond => format!("{}/s", grouped(figure)),
            Unit::Milliseconds => format!("{figure:.1} ms"),
            Unit::Seconds => format!("{figure:.2} s"),
            Unit::Megabytes => format!("{figure:.0} MB"),
        }
    }
}

/// 1234567 as 1,234,567.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Measured;

    #[test]
    fn rows_are_told_to_people_and_to_machines() {
        let measured = Measured::new(Unit::PerSecond, 1_000_000.0, 1_234_567.0, "quick".into());
        let rows = [Row { name: "usage, page of 100, p95", measured }];
        let told = json(&rows);
        assert_eq!(told["rows"][0]["ok"], true);
        assert_eq!(told["rows"][0]["unit"], "per_second");
        let page = markdown(&rows, "nats-server 2", 10);
        assert!(
            page.contains("| usage, page of 100, p95 | at least 1,000,000/s | 1,234,567/s | met | quick |"),
            "{page}"
        );
        assert_eq!(file_name(&rows[0]), "usage-page-of-100-p95.svg");
    }
}
