//! Usage records from lines: an object per line, or a table.

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    Failure,
    lines::{Beside, Lines},
};
use crate::api::Members;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Format {
    Jsonl,
    Csv,
}

/// Records on stdin, each as its fields.
pub struct Records {
    lines: Lines,
    format: Format,
    /// The first line of a table.
    fields: Option<Vec<String>>,
    number: usize,
}

impl Records {
    pub fn of_stdin(format: Format, beside: Beside) -> Self {
        Self { lines: Lines::of_stdin(beside), format, fields: None, number: 0 }
    }

    /// The line in which the last one ends.
    pub fn number(&self) -> usize {
        self.number
    }

    pub fn next(&mut self) -> Result<Option<Map<String, Value>>, Failure> {
        loop {
            let Some(line) = self.lines.next()? else { return Ok(None) };
            self.number += 1;
            // Spreadsheets mark the beginning of a file.
            let line = if self.number == 1 { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line) } else { line };
            if line.trim_ascii().is_empty() {
                continue;
            }
            let (first, mut text) = (self.number, line.to_vec());
            let read = match (self.format, &self.fields) {
                (Format::Jsonl, _) => object(&text),
                (Format::Csv, fields) => {
                    // A cell in quotes may have several lines.
                    while has_open_quote(&text)
                        && let Some(more) = self.lines.next()?
                    {
                        self.number += 1;
                        text.push(b'\n');
                        text.extend(more);
                    }
                    match fields {
                        Some(fields) => cells(&text).and_then(|cells| row(fields, cells)),
                        None => match cells(&text).and_then(distinct) {
                            Ok(fields) => {
                                self.fields = Some(fields);
                                continue;
                            }
                            Err(problem) => Err(problem),
                        },
                    }
                }
            };
            return read.map(Some).map_err(|problem| Failure(format!("line {first}: {problem}")));
        }
    }
}

/// A quote inside of a cell is written twice.
fn has_open_quote(text: &[u8]) -> bool {
    text.iter().filter(|byte| **byte == b'"').count() % 2 == 1
}

/// The cells of one row.
fn cells(text: &[u8]) -> Result<Vec<String>, String> {
    if has_open_quote(text) {
        return Err("a quote is not closed".into());
    }
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).trim(csv::Trim::All).from_reader(text);
    let rows: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    match &rows[..] {
        [row] => Ok(row.iter().map(str::to_owned).collect()),
        _ => Err("lines must end with a line feed, and this one has a carriage return in it".into()),
    }
}

fn distinct(fields: Vec<String>) -> Result<Vec<String>, String> {
    match fields.iter().enumerate().find(|(index, field)| fields[..*index].contains(field)) {
        Some((_, twice)) => Err(format!("{twice:?} is there twice")),
        None => Ok(fields),
    }
}

/// A row of the table as an object. Empty cells are not given.
fn row(fields: &[String], cells: Vec<String>) -> Result<Map<String, Value>, String> {
    if cells.len() != fields.len() {
        return Err(format!("{} cells, but the first line has {}", cells.len(), fields.len()));
    }
    let (mut object, mut metadata) = (Map::new(), BTreeMap::new());
    for (field, cell) in fields.iter().zip(cells).filter(|(_, cell)| !cell.is_empty()) {
        match field.strip_prefix("metadata.") {
            Some(member) => drop(metadata.insert(member.to_owned(), cell)),
            None => drop(object.insert(field.clone(), cell.into())),
        }
    }
    if !metadata.is_empty() {
        object.insert("metadata".to_owned(), json!(metadata));
    }
    Ok(object)
}

/// A line of JSON. The value stays as it is written: a number has more digits than a double can hold.
fn object(line: &[u8]) -> Result<Map<String, Value>, String> {
    let Members(members) = serde_json::from_slice::<Members<&RawValue>>(line).map_err(|error| error.to_string())?;
    let mut object = Map::new();
    for (name, raw) in members {
        let is_number = raw.get().starts_with(|first: char| first == '-' || first.is_ascii_digit());
        let value = match name == "value" && is_number {
            true => raw.get().into(),
            false => serde_json::from_str(raw.get()).map_err(|error| error.to_string())?,
        };
        if object.contains_key(&name) {
            return Err(format!("{name:?} is there twice"));
        }
        object.insert(name, value);
    }
    Ok(object)
}
