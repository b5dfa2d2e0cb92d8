//! `tidemark usage`: the usage ledger of a running deployment.

use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use futures::{StreamExt, stream::select};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{
    Failure, Outcome,
    backfill::{self, BackfillOptions},
    lines::Beside,
    print_row, print_to_reader,
    records::{Format, Records},
    remote::Verbs,
    report::{self, ReportOptions},
    screen, show,
};
use crate::{
    api::{
        Name, NoParameters,
        usage::{
            BackfillId, BackfillReversion, MetadataRequest, Minute, QuarantineFilter, Quarantined, Replay, UsageRecord,
        },
    },
    client::{Client, Delivered},
    config::Config,
};

/// Records of one request.
const BATCH: usize = 500;

#[derive(Debug, Args)]
pub struct UsageOptions {
    #[command(flatten)]
    verbs: Verbs<Verb>,
    /// Whose usage.
    #[arg(long, global = true, env = "TIDEMARK_TENANT", default_value = "default")]
    tenant: Name,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Send usage records: one from arguments, or many from stdin. Waits for the verdict; fails if any was refused.
    Emit(Box<EmitOptions>),
    /// Show records as they are published, and what was refused.
    Tail {
        /// Only what was refused
        #[arg(long)]
        rejected: bool,
        /// End after so many
        #[arg(long)]
        count: Option<usize>,
    },
    /// List the units that records can be of.
    Units,
    /// List what was refused, newest first.
    Quarantine {
        /// Only with this reason, such as type_not_found
        #[arg(long)]
        code: Option<String>,
        /// At most so many
        #[arg(long, default_value_t = 50)]
        limit: i64,
    },
    /// Send refused records again, once the cause is mended.
    Replay {
        #[arg(required = true)]
        ids: Vec<Uuid>,
    },
    /// Replace what the ledger has of one type in a range of time by the records on stdin, all of it or nothing.
    Backfill(Box<BackfillOptions>),
    /// Show a backfill: who, what, why, how far.
    BackfillStatus { id: Uuid },
    /// Take a backfill back.
    BackfillRevert {
        id: Uuid,
        /// However far back; more than 90 days need it. For the operator
        #[arg(long)]
        elevated: bool,
        /// Why, for those who ask later
        #[arg(long)]
        reason: String,
    },
    /// Add up what was used, by unit, resource and day. The ledger keeps records; sums are derived from them.
    Report(Box<ReportOptions>),
    /// Show what the ledger has, and what came in the last hour.
    Status,
}

#[derive(Debug, Args)]
pub struct EmitOptions {
    /// What the records come from
    #[arg(long, env = "TIDEMARK_SOURCE", default_value = "default")]
    source: Name,
    /// The unit's name
    #[arg(long = "type", value_name = "UNIT", requires_all = ["resource", "value"])]
    usage_type: Option<String>,
    /// What was used
    #[arg(long, requires = "usage_type")]
    resource: Option<String>,
    /// How much, kept exactly
    #[arg(long, requires = "usage_type", allow_hyphen_values = true)]
    value: Option<String>,
    /// When it was used; now if not given
    #[arg(long, requires = "usage_type")]
    at: Option<DateTime<Utc>>,
    /// Names the record, so that sending it again counts once
    #[arg(long, requires = "usage_type")]
    key: Option<String>,
    #[arg(long, requires = "usage_type")]
    user: Option<String>,
    /// Records on stdin, without --type: an object per line, or a table whose first line names the fields. Fields
    /// `metadata.<name>` are members of the metadata.
    #[arg(long, value_enum, default_value = "jsonl", conflicts_with = "usage_type")]
    format: Format,
    /// Give records on stdin that have no key or no time a new key and the present time. Sent again, they count again.
    #[arg(long, conflicts_with = "usage_type")]
    fill: bool,
}

pub async fn run(config: &Config, options: UsageOptions) -> Outcome {
    let (tenant, subject) = (options.tenant, &config.usage.subject);
    let converse = async |client: &Client, verb, json| converse(client, &tenant, subject, verb, json).await;
    options.verbs.run(config, converse).await
}

async fn converse(client: &Client, tenant: &Name, subject: &Name, verb: Verb, json: bool) -> Result<(), Failure> {
    match verb {
        Verb::Emit(options) => emit(client, tenant, *options, json).await,
        Verb::Tail { rejected, count } => {
            tail(client, tenant, subject, rejected, count.unwrap_or(usize::MAX), json).await
        }
        Verb::Units => {
            let units = client.list_units(tenant, &NoParameters {}).await?;
            show(json, &units, || {
                screen::Table::of(["unit", "kind", "base unit", "sources"], &units.units, |unit| {
                    let kind = unit.metric_kind.as_str().to_owned();
                    vec![unit.name.clone(), kind, unit.base_unit.clone(), unit.allowed_sources.join(",")]
                })
            })
        }
        Verb::Quarantine { code, limit } => {
            let filter = QuarantineFilter { code, limit: Some(limit), ..QuarantineFilter::default() };
            let found = client.list_quarantine(tenant, &filter).await?;
            show(json, &found, || screen::Table::of(["id", "source", "code", "key", "why"], &found.records, refused))
        }
        Verb::Replay { ids } => {
            let replayed = client.replay_quarantine(tenant, &Replay { ids }).await?;
            let rejected = replayed.rejected.len();
            show(json, &replayed, || {
                print_row("accepted", &replayed.accepted)?;
                print_row("duplicates", &replayed.duplicates)?;
                print_row("buffered", &replayed.buffered)?;
                print_row("rejected", &rejected)
            })?;
            match replayed.rejected.first() {
                Some(first) => {
                    Err(Failure(format!("{rejected} were refused again, such as: {}", first.reason.message)))
                }
                None => Ok(()),
            }
        }
        Verb::Backfill(options) => backfill::run(client, tenant, *options, json).await,
        Verb::BackfillStatus { id } => {
            let backfill = client.get_backfill(tenant, &BackfillId { id }).await?;
            show(json, &backfill, || backfill::print_backfill(&backfill))
        }
        Verb::BackfillRevert { id, elevated, reason } => {
            let reversion = BackfillReversion { id, reason };
            let backfill = match elevated {
                false => client.revert_backfill(tenant, &reversion).await?,
                true => client.revert_elevated_backfill(tenant, &reversion).await?,
            };
            show(json, &backfill, || backfill::print_backfill(&backfill))
        }
        Verb::Report(options) => report::run(client, tenant, *options, json).await,
        Verb::Status => {
            let metadata = client.usage_metadata(tenant, &MetadataRequest::default()).await?;
            show(json, &metadata, || {
                let time = |time: Option<DateTime<Utc>>| time.map(screen::moment).unwrap_or_default();
                print_row("records", &metadata.total_records)?;
                print_row("earliest", &time(metadata.earliest_event))?;
                print_row("latest", &time(metadata.latest_event))?;
                print_row("backlog", &format_args!("{} messages", metadata.storage_health.backlog_messages))?;
                screen::Table::of(["minute", "source", "what came of it"], &metadata.reconciliation, |minute| {
                    let Minute { emitted, accepted, duplicates, rejected, .. } = minute;
                    let sum = format!(
                        "{emitted} emitted = {accepted} accepted + {duplicates} duplicates + {rejected} rejected"
                    );
                    vec![screen::moment(minute.minute), minute.source_id.clone(), sum]
                })
            })
        }
    }
}

fn refused(entry: &Quarantined) -> Vec<String> {
    let key = entry.idempotency_key.clone().unwrap_or_default();
    vec![
        entry.id.to_string(),
        entry.source_id.clone(),
        entry.reason.code.to_string(),
        key,
        entry.reason.message.to_string(),
    ]
}

/// What was sent, all together.
#[derive(Default, serde::Serialize)]
struct Sent {
    accepted: usize,
    duplicates: usize,
    buffered: usize,
    rejected: usize,
}

impl Sent {
    fn add(&mut self, delivered: Delivered) {
        self.accepted += delivered.accepted;
        self.duplicates += delivered.duplicates;
        self.buffered += delivered.buffered;
        self.rejected += delivered.refused.len();
        for (record, reason) in delivered.refused {
            eprintln!("refused {}: {}: {}", record.idempotency_key, reason.code, reason.message);
        }
    }
}

async fn emit(client: &Client, tenant: &Name, options: EmitOptions, json: bool) -> Result<(), Failure> {
    let target = (tenant.clone(), options.source);
    let (mut sent, mut failure) = (Sent::default(), None);
    match options.usage_type {
        Some(usage_type) => {
            let (resource, value) = (options.resource.unwrap_or_default(), options.value.unwrap_or_default());
            let mut record = UsageRecord::new(usage_type, resource, value);
            record.event_timestamp = options.at.unwrap_or(record.event_timestamp);
            record.idempotency_key = options.key.unwrap_or(record.idempotency_key);
            record.user_id = options.user;
            sent.add(client.deliver(&target, vec![record]).await);
        }
        None => {
            let mut lines = Records::of_stdin(options.format, Beside::Nothing);
            let mut is_last = false;
            while !is_last {
                let records;
                (records, failure) = next_batch(&mut lines, options.fill);
                is_last = records.len() < BATCH;
                sent.add(client.deliver(&target, records).await);
            }
        }
    }
    show(json, &sent, || {
        print_row("accepted", &sent.accepted)?;
        print_row("duplicates", &sent.duplicates)?;
        print_row("buffered", &sent.buffered)?;
        print_row("rejected", &sent.rejected)
    })?;
    match (failure, sent.rejected) {
        (Some(Failure(problem)), _) => {
            let before = sent.accepted + sent.duplicates + sent.buffered + sent.rejected;
            let advice = format!("{before} records before it were sent; with the same keys they may be sent again");
            Err(Failure(format!("{problem} ({advice})")))
        }
        (None, 0) => Ok(()),
        (None, count) => Err(Failure(format!("{count} records were refused"))),
    }
}

/// The next records, fewer at the end or where one can't be read.
fn next_batch(lines: &mut Records, fill: bool) -> (Vec<UsageRecord>, Option<Failure>) {
    let mut records = Vec::with_capacity(BATCH);
    while records.len() < BATCH {
        match lines.next() {
            Ok(None) => break,
            Ok(Some(object)) => match complete(object, fill) {
                Ok(record) => records.push(record),
                Err(problem) => return (records, Some(Failure(format!("line {}: {problem}", lines.number())))),
            },
            Err(failure) => return (records, Some(failure)),
        }
    }
    (records, None)
}

fn complete(mut object: Map<String, Value>, fill: bool) -> Result<UsageRecord, String> {
    if fill {
        object.entry("idempotency_key").or_insert_with(|| Uuid::now_v7().to_string().into());
        object.entry("event_timestamp").or_insert_with(|| json!(Utc::now()));
    }
    let known = ["usage_type", "resource_id", "value", "event_timestamp", "idempotency_key", "metric_kind", "user_id"];
    let known = known.iter().chain(&["resource_type", "lineage", "metadata"]);
    if let Some(unknown) = object.keys().find(|field| !known.clone().any(|known| known == field)) {
        return Err(format!("unknown field {unknown:?}"));
    }
    if let Some(missing) = ["idempotency_key", "event_timestamp"].iter().find(|field| !object.contains_key(**field)) {
        return Err(format!("{missing} is missing (--fill makes one)"));
    }
    serde_path_to_error::deserialize(Value::Object(object)).map_err(|error| error.to_string())
}

/// Prints what is published and refused, until there was enough or nobody reads it any more.
async fn tail(
    client: &Client,
    tenant: &Name,
    subject: &Name,
    rejected: bool,
    count: usize,
    json: bool,
) -> Result<(), Failure> {
    let refused = client.listen(format!("{subject}-rejected.{tenant}.*")).await?;
    let mut messages = match rejected {
        true => refused.left_stream(),
        false => select(refused, client.listen(format!("{subject}.{tenant}.*")).await?).right_stream(),
    }
    .take(count);
    while let Some(message) = messages.next().await {
        let is_refusal = message.subject.starts_with(&format!("{subject}-rejected."));
        let source = message.subject.rsplit('.').next().unwrap_or_default();
        let body: Value = serde_json::from_slice(&message.payload).unwrap_or_default();
        let records = match body {
            Value::Array(records) => records,
            Value::Object(ref members) => match members.get("records") {
                Some(Value::Array(records)) => records.clone(),
                _ => vec![body],
            },
            _ => vec![json!({ "bytes": message.payload.len() })],
        };
        for record in records {
            let line = match json {
                true => json!({ "source_id": source, "refused": is_refusal, "record": record }).to_string(),
                false if is_refusal => {
                    let text = |member: &str| record["reason"][member].as_str().unwrap_or_default().to_owned();
                    format!("refused\t{source}\t{}\t{}", text("code"), text("message"))
                }
                false => {
                    let text = |member: &str| match &record[member] {
                        Value::String(text) => text.clone(),
                        other => other.to_string(),
                    };
                    let (at, unit) = (text("event_timestamp"), text("usage_type"));
                    format!("{at}\t{source}\t{unit}\t{}\t{}", text("resource_id"), text("value"))
                }
            };
            if !print_to_reader(line)? {
                return Ok(());
            }
        }
    }
    Ok(())
}
