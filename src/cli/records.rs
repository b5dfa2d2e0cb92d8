//! Usage records from lines: an object per line, or a table.

use std::{collections::BTreeMap, io};

use clap::ValueEnum;
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    Failure,
    lines::{Beside, Lines},
};

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
    pub fn of_stdin(format: Format) -> Self {
        Self { lines: Lines::of_stdin(Beside::Nothing), format, fields: None, number: 0 }
    }

    /// The line of the last one.
    pub fn number(&self) -> usize {
        self.number
    }

    pub fn next(&mut self) -> Result<Option<Map<String, Value>>, Failure> {
        loop {
            let Some(line) = self.lines.next()? else { return Ok(None) };
            self.number += 1;
            if line.trim_ascii().is_empty() {
                continue;
            }
            let read = match (self.format, &self.fields) {
                (Format::Jsonl, _) => object(line).map_err(|error| error.to_string()),
                (Format::Csv, Some(fields)) => row(fields, line),
                (Format::Csv, None) => match cells(line) {
                    Ok(fields) => {
                        self.fields = Some(fields);
                        continue;
                    }
                    Err(error) => Err(error.to_string()),
                },
            };
            let number = self.number;
            return read.map(Some).map_err(|problem| Failure(format!("line {number}: {problem}")));
        }
    }
}

/// The cells of a line.
fn cells(line: &[u8]) -> Result<Vec<String>, csv::Error> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).trim(csv::Trim::All).from_reader(line);
    match reader.records().next() {
        Some(record) => Ok(record?.iter().map(str::to_owned).collect()),
        None => Err(io::Error::other("no cells").into()),
    }
}

/// A row of the table as an object. Empty cells are not given.
fn row(fields: &[String], line: &[u8]) -> Result<Map<String, Value>, String> {
    let cells = cells(line).map_err(|error| error.to_string())?;
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
fn object(line: &[u8]) -> serde_json::Result<Map<String, Value>> {
    let members: BTreeMap<String, &RawValue> = serde_json::from_slice(line)?;
    let member = |(name, raw): (String, &RawValue)| {
        let is_number = raw.get().starts_with(|first: char| first == '-' || first.is_ascii_digit());
        let value = match name == "value" && is_number {
            true => raw.get().into(),
            false => serde_json::from_str(raw.get())?,
        };
        Ok((name, value))
    };
    members.into_iter().map(member).collect()
}
