//! `tidemark usage report`: sums for people, derived from the records.

use std::{collections::BTreeMap, fs, path::PathBuf};

use chrono::{DateTime, TimeDelta, Utc};
use clap::{Args, ValueEnum};
use rust_decimal::{Decimal, prelude::ToPrimitive};
use serde::{Serialize, Serializer};

use super::{Failure, print, print_json, screen::Table};
use crate::{
    api::{
        Name,
        usage::{LedgerRecord, MOST_OF_A_PAGE, MetricKind, RecordQuery},
    },
    client::Client,
};

#[derive(Debug, Args)]
pub struct ReportOptions {
    /// The first time; 30 days ago if not given
    #[arg(long)]
    from: Option<DateTime<Utc>>,
    /// The end, not included; now if not given
    #[arg(long)]
    to: Option<DateTime<Utc>>,
    /// Only this unit
    #[arg(long = "type", value_name = "UNIT")]
    usage_type: Option<String>,
    /// Only this resource
    #[arg(long)]
    resource: Option<String>,
    /// What sums are for
    #[arg(long, value_enum, value_delimiter = ',', default_value = "unit,resource,day")]
    by: Vec<By>,
    /// How it is shown
    #[arg(long, value_enum, default_value = "table", conflicts_with = "json")]
    output: Output,
    /// Also draw it into this file, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    Unit,
    Source,
    Resource,
    User,
    Day,
}

impl By {
    fn name(self) -> &'static str {
        match self {
            By::Unit => "unit",
            By::Source => "source",
            By::Resource => "resource",
            By::User => "user",
            By::Day => "day",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Csv,
    /// Bars
    Plot,
}

/// What people read: derived, as it says.
#[derive(Debug, Serialize)]
struct Report {
    derived: bool,
    tenant_id: String,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    /// In the order that was asked for.
    group: Vec<String>,
    metric_kind: MetricKind,
    records: u64,
    /// The sum of a gauge's values, or by how much counters have grown.
    #[serde(serialize_with = "as_text")]
    total: Decimal,
}

/// Exactly.
fn as_text<S: Serializer>(number: &Decimal, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(number)
}

pub async fn run(client: &Client, tenant: &Name, options: ReportOptions, json: bool) -> Result<(), Failure> {
    let to = options.to.unwrap_or_else(Utc::now);
    let from = options.from.unwrap_or(to - TimeDelta::days(30));
    let mut query = RecordQuery {
        usage_type: options.usage_type.clone(),
        resource_id: options.resource.clone(),
        from: Some(from),
        to: Some(to),
        page_size: Some(MOST_OF_A_PAGE),
        ..RecordQuery::default()
    };
    let mut sums = Sums::default();
    loop {
        let page = client.query_records(tenant, &query).await?;
        page.records.iter().try_for_each(|record| sums.add(record, &options.by))?;
        query.cursor = page.next_cursor;
        if query.cursor.is_none() {
            break;
        }
    }
    let report = Report { derived: true, tenant_id: tenant.to_string(), from, to, rows: sums.rows() };
    if let Some(path) = &options.svg {
        fs::write(path, svg(&report)).map_err(|error| Failure(format!("{}: {error}", path.display())))?;
    }
    if json {
        return print_json(&report);
    }
    let note = format!(
        "derived from the raw records of {tenant}, {} to {}: gauges are summed, counters by how much they have \
         grown from their first reading in it",
        from.to_rfc3339(),
        to.to_rfc3339()
    );
    match options.output {
        Output::Csv => {
            eprintln!("{note}");
            print_csv(&report, &options.by)
        }
        Output::Table => {
            print(note)?;
            let names: Vec<&str> = options.by.iter().map(|by| by.name()).chain(["records", "total"]).collect();
            Table::of(names, &report.rows, |row| {
                let sums = [format!("{} records", row.records), row.total.to_string()];
                row.group.iter().cloned().chain(sums).collect()
            })
        }
        Output::Plot => {
            print(note)?;
            plot(&report)
        }
    }
}

type Group = (Vec<String>, &'static str);

#[derive(Default)]
struct Sums {
    rows: BTreeMap<Group, (MetricKind, u64, Decimal)>,
    /// The last reading of each counter.
    last: BTreeMap<(String, String, String), Decimal>,
}

impl Sums {
    fn add(&mut self, record: &LedgerRecord, by: &[By]) -> Result<(), Failure> {
        let value: Decimal = record.value.parse().map_err(|error| Failure(format!("{}: {error}", record.id)))?;
        let amount = match record.metric_kind {
            MetricKind::Gauge => value,
            MetricKind::Counter => {
                let series = (record.usage_type.clone(), record.source_id.clone(), record.resource_id.clone());
                value - self.last.insert(series, value).unwrap_or(value)
            }
        };
        let part = |by: &By| match by {
            By::Unit => record.usage_type.clone(),
            By::Source => record.source_id.clone(),
            By::Resource => record.resource_id.clone(),
            By::User => record.user_id.clone().unwrap_or_default(),
            By::Day => record.event_timestamp.format("%Y-%m-%d").to_string(),
        };
        let group = (by.iter().map(part).collect(), record.metric_kind.as_str());
        let row = self.rows.entry(group).or_insert((record.metric_kind, 0, Decimal::ZERO));
        row.1 += 1;
        row.2 = row.2.checked_add(amount).ok_or_else(|| Failure("a sum has more digits than can be kept".into()))?;
        Ok(())
    }

    fn rows(self) -> Vec<Row> {
        let row = |((group, _), (metric_kind, records, total)): (Group, (MetricKind, u64, Decimal))| Row {
            group,
            metric_kind,
            records,
            total: total.normalize(),
        };
        self.rows.into_iter().map(row).collect()
    }
}

fn print_csv(report: &Report, by: &[By]) -> Result<(), Failure> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let head = by.iter().map(|by| by.name()).chain(["metric_kind", "records", "total"]);
    writer.write_record(head).map_err(|error| Failure(error.to_string()))?;
    for row in &report.rows {
        let cells = [row.metric_kind.as_str().to_owned(), row.records.to_string(), row.total.to_string()];
        writer.write_record(row.group.iter().cloned().chain(cells)).map_err(|error| Failure(error.to_string()))?;
    }
    let bytes = writer.into_inner().map_err(|error| Failure(error.to_string()))?;
    print(String::from_utf8_lossy(&bytes).trim_end())
}

/// The longest bar.
const WIDTH: f64 = 50.0;

/// The part of the largest.
fn shares(report: &Report) -> impl Iterator<Item = (&Row, f64)> {
    let number = |row: &Row| row.total.to_f64().unwrap_or_default().max(0.0);
    let most = report.rows.iter().map(number).fold(0.0, f64::max);
    report.rows.iter().map(move |row| (row, if most > 0.0 { number(row) / most } else { 0.0 }))
}

fn plot(report: &Report) -> Result<(), Failure> {
    let label = |row: &Row| row.group.join(" ");
    let widest = report.rows.iter().map(|row| label(row).chars().count()).max().unwrap_or_default();
    shares(report).try_for_each(|(row, share)| {
        let bar = "█".repeat((share * WIDTH).round() as usize);
        print(format_args!("{:<widest$}  {bar} {}", label(row), row.total))
    })
}

fn svg(report: &Report) -> String {
    const LINE: usize = 22;
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let bars: String = shares(report)
        .enumerate()
        .map(|(index, (row, share))| {
            let (top, label) = (40 + index * LINE, escape(&row.group.join(" ")));
            let width = share * 500.0;
            format!(
                "<text x=\"295\" y=\"{}\" text-anchor=\"end\">{label}</text>\
                 <rect x=\"300\" y=\"{top}\" width=\"{width:.1}\" height=\"16\" fill=\"#3b6ea5\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{}</text>\n",
                top + 13,
                306.0 + width,
                top + 13,
                row.total
            )
        })
        .collect();
    let height = 50 + report.rows.len() * LINE;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"960\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<text x=\"10\" y=\"20\">Usage of {}, {} to {}, derived from raw records</text>\n{bars}</svg>\n",
        escape(&report.tenant_id),
        report.from.to_rfc3339(),
        report.to.to_rfc3339()
    )
}
