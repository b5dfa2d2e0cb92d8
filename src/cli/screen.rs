//! What people see on a terminal and scripts read from a pipe: the same rows, aligned and coloured there, separated by tabs here.

use chrono::{DateTime, TimeDelta, Utc};
use console::{Term, measure_text_width, style};

use super::{Failure, print};

/// Whether a person looks at what we print.
fn is_terminal() -> bool {
    Term::stdout().is_term()
}

/// Rows under names, which only people get to see.
pub struct Table {
    names: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(names: impl Into<Vec<&'static str>>) -> Self {
        Self { names: names.into(), rows: Vec::new() }
    }

    /// Prints a table with a row for each.
    pub fn of<T>(
        names: impl Into<Vec<&'static str>>,
        all: impl IntoIterator<Item = T>,
        cells: impl Fn(T) -> Vec<String>,
    ) -> Result<(), Failure> {
        let mut table = Self::new(names);
        all.into_iter().for_each(|one| table.add(cells(one)));
        table.print()
    }

    pub fn add(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub fn print(self) -> Result<(), Failure> {
        if !is_terminal() {
            return self.rows.iter().try_for_each(|row| print(row.join("\t")));
        }
        if !self.rows.is_empty() {
            let names = self.names.iter().map(|name| style(name).dim().to_string()).collect();
            return self.aligned(names).iter().try_for_each(print);
        }
        Ok(())
    }

    fn aligned(&self, names: Vec<String>) -> Vec<String> {
        let rows: Vec<&Vec<String>> = std::iter::once(&names).chain(&self.rows).collect();
        let columns = rows.iter().map(|row| row.len()).max().unwrap_or_default();
        let width = |column: usize| rows.iter().filter_map(|row| Some(measure_text_width(row.get(column)?))).max();
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
        let line = |row: &&Vec<String>| {
            let padded = row.iter().zip(&widths).map(|(cell, width)| {
                let room = width - measure_text_width(cell);
                format!("{cell}{}", " ".repeat(room))
            });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        rows.iter().map(line).collect()
    }
}

/// A moment; for people also how far away it is.
pub fn moment(at: DateTime<Utc>) -> String {
    match is_terminal() {
        true => format!("{} ({})", at.format("%F %T"), distance(at - Utc::now())),
        false => at.to_string(),
    }
}

/// `in 5 min`, `3 h ago`.
fn distance(away: TimeDelta) -> String {
    let seconds = away.num_seconds().abs();
    let length = match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    };
    match seconds {
        0 => "now".to_owned(),
        _ if away < TimeDelta::zero() => format!("{length} ago"),
        _ => format!("in {length}"),
    }
}

/// A word that says how things stand, in the colour of that.
pub fn state(word: &str) -> String {
    let plain = style(word);
    match word {
        "completed" | "met" => plain.green(),
        "failed" | "MISSED" => plain.red(),
        "pending" | "executing" | "paused" => plain.yellow(),
        _ => plain,
    }
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_for_people() {
        for (seconds, expected) in
            [(0, "now"), (90, "in 90 s"), (-300, "5 min ago"), (3 * 3600, "in 3 h"), (-5 * 86_400, "5 days ago")]
        {
            assert_eq!(distance(TimeDelta::seconds(seconds)), expected);
        }
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["id", "state"]);
        table.add(vec!["1".into(), "open".into()]);
        table.add(vec!["1000".into(), "\u{1b}[31mclosed\u{1b}[0m".into()]);
        let lines = table.aligned(vec!["id".into(), "state".into()]);
        assert_eq!(lines, ["id    state", "1     open", "1000  \u{1b}[31mclosed\u{1b}[0m"]);
    }
}
