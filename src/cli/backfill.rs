//! `tidemark usage backfill`: a range of the ledger replaced by what comes on stdin, however much it is.

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tokio::time::sleep;
use uuid::Uuid;

use super::{
    Failure,
    lines::Beside,
    print, print_row,
    records::{Format, Records},
    show,
};
use crate::{
    api::{
        Json, Name,
        usage::{
            Backfill, BackfillAnswer, BackfillEvents, BackfillId, BackfillMode, BackfillPreview, BackfillRequest,
            MOST_EVENTS, TimeRange,
        },
    },
    client::Client,
    error::{Code, Error},
};

/// Records of one request.
const PART: usize = 1000;

/// How often it is asked how far it is.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub struct BackfillOptions {
    /// The unit's name
    #[arg(long = "type", value_name = "UNIT")]
    usage_type: String,
    /// The first time of the range
    #[arg(long)]
    from: DateTime<Utc>,
    /// The end of the range, not included
    #[arg(long)]
    to: DateTime<Utc>,
    /// Why, for those who ask later
    #[arg(long)]
    reason: String,
    /// Keep live records out of the range meanwhile: requests are refused, published records wait
    #[arg(long)]
    blocking: bool,
    /// Show what would change, and change nothing (up to 10,000 records)
    #[arg(long)]
    dry_run: bool,
    /// However far back; more than 90 days need it. For the operator
    #[arg(long)]
    elevated: bool,
    /// Replace the range by nothing, if nothing comes
    #[arg(long)]
    allow_empty: bool,
    /// What the records come from, where they don't say
    #[arg(long, env = "TIDEMARK_SOURCE", default_value = "default")]
    source: Name,
    /// An object per line, or a table whose first line names the fields
    #[arg(long, value_enum, default_value = "jsonl")]
    format: Format,
}

impl BackfillOptions {
    fn request(&self, events: Vec<Json>) -> BackfillRequest {
        BackfillRequest {
            usage_type: self.usage_type.clone(),
            time_range: TimeRange { from: self.from, to: self.to },
            replacement_events: events,
            mode: if self.blocking { BackfillMode::Blocking } else { BackfillMode::NonBlocking },
            reason: self.reason.clone(),
            dry_run: self.dry_run,
            staged: !self.dry_run,
        }
    }
}

pub async fn run(client: &Client, tenant: &Name, options: BackfillOptions, json: bool) -> Result<(), Failure> {
    // There is a bar for what was sent already.
    let mut lines = Records::of_stdin(options.format, Beside::AnotherBar);
    if options.dry_run {
        let mut events = Vec::new();
        while let Some(record) = lines.next()? {
            events.push(Json::from(&Value::Object(record)));
            if events.len() > MOST_EVENTS {
                return Err(Failure(format!("a dry run takes {MOST_EVENTS} records at most")));
            }
        }
        let answer = submit(client, tenant, &options, events).await?;
        let BackfillAnswer::Preview(preview) = answer else {
            return Err(Failure("it was no dry run".into()));
        };
        return show(json, &preview, || print_preview(&preview));
    }
    let answer = submit(client, tenant, &options, Vec::new()).await?;
    let BackfillAnswer::Operation(begun) = answer else {
        return Err(Failure("it was a dry run".into()));
    };
    let id = begun.id;
    let sent = match send_all(client, tenant, &options.source, id, &mut lines).await {
        // A pipe that failed has nothing in it either.
        Ok(0) if !options.allow_empty => {
            Err(Failure("no records came; --allow-empty replaces the range by nothing".into()))
        }
        sent => sent,
    };
    if let Err(failure) = sent {
        // Nothing has changed, and the range is free again.
        client.cancel_backfill(tenant, &BackfillId { id }).await.ok();
        return Err(failure);
    }
    let done = finish(client, tenant, id).await?;
    show(json, &done, || print_backfill(&done))?;
    match done.error {
        Some(error) => Err(Failure(format!("{}: {}", error.code, error.message))),
        None => Ok(()),
    }
}

async fn submit(
    client: &Client,
    tenant: &Name,
    options: &BackfillOptions,
    events: Vec<Json>,
) -> Result<BackfillAnswer, Error> {
    let request = options.request(events);
    match options.elevated {
        false => client.submit_backfill(tenant, &options.source, &request).await,
        true => client.submit_elevated_backfill(tenant, &options.source, &request).await,
    }
}

/// Sends what there is: so many records.
async fn send_all(
    client: &Client,
    tenant: &Name,
    source: &Name,
    id: Uuid,
    lines: &mut Records,
) -> Result<u64, Failure> {
    let bar = ProgressBar::new_spinner().with_message("records sent");
    bar.set_style(ProgressStyle::with_template("{spinner} {human_pos} {msg}, {per_sec}").expect("a valid template"));
    let mut part = Vec::with_capacity(PART);
    loop {
        let next = lines.next()?;
        let is_last = next.is_none();
        part.extend(next.map(|record| Json::from(&Value::Object(record))));
        if part.len() == PART || is_last && !part.is_empty() {
            let first = lines.number() + 1 - part.len();
            bar.inc(part.len() as u64);
            send(client, tenant, source, BackfillEvents { id, records: std::mem::take(&mut part) }, first).await?;
        }
        if is_last {
            bar.finish_and_clear();
            return Ok(bar.position());
        }
    }
}

/// Sends records until they are taken. Sent twice they count once.
async fn send(
    client: &Client,
    tenant: &Name,
    source: &Name,
    events: BackfillEvents,
    first_line: usize,
) -> Result<(), Failure> {
    let received = loop {
        match client.send_backfill_events(tenant, source, &events).await {
            Err(error) if matches!(error.code, Code::RateLimited | Code::Unavailable) => {
                let hint = error.details.as_ref().and_then(|details| details["retry_after_ms"].as_u64());
                sleep(Duration::from_millis(hint.unwrap_or(500))).await;
            }
            other => break other?,
        }
    };
    match received.rejected.first() {
        None => Ok(()),
        Some(rejection) => Err(Failure(format!(
            "about line {}: {} (nothing was changed)",
            first_line + rejection.index,
            rejection.reason.message
        ))),
    }
}

/// Carries it out, and waits until it is done.
async fn finish(client: &Client, tenant: &Name, id: Uuid) -> Result<Backfill, Failure> {
    let mut backfill = match client.commit_backfill(tenant, &BackfillId { id }).await {
        // It tells why itself.
        Err(error) if error.details.as_ref().is_some_and(|details| details["backfill_id"].is_string()) => {
            client.get_backfill(tenant, &BackfillId { id }).await?
        }
        other => other?,
    };
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("{msg} {wide_bar} {human_pos}/{human_len}").expect("a valid template"));
    while backfill.is_deferred() {
        if let Some(progress) = &backfill.progress {
            bar.set_length(progress.total.unsigned_abs());
            bar.set_position(progress.done.unsigned_abs());
            bar.set_message(progress.phase.clone());
        }
        sleep(LOOK).await;
        backfill = client.get_backfill(tenant, &BackfillId { id }).await?;
    }
    bar.finish_and_clear();
    Ok(backfill)
}

pub fn print_backfill(backfill: &Backfill) -> Result<(), Failure> {
    print_row("id", &backfill.id)?;
    print_row("status", &format!("{:?}", backfill.status).to_lowercase())?;
    print_row("type", &backfill.usage_type)?;
    print_row("range", &format_args!("{} to {}", backfill.range_start, backfill.range_end))?;
    print_row("archived", &backfill.events_archived.unwrap_or_default())?;
    print_row("added", &backfill.events_added.unwrap_or_default())?;
    print_row("by", &backfill.operator_id)?;
    print_row("reason", &backfill.reason)?;
    if let Some(progress) = &backfill.progress {
        print_row("progress", &format_args!("{} {} of {}", progress.phase, progress.done, progress.total))?;
    }
    if let (Some(at), Some(by)) = (backfill.reverted_at, &backfill.reverted_by) {
        let reason = backfill.revert_reason.as_deref().unwrap_or_default();
        print_row("reverted", &format_args!("{at} by {by}: {reason}"))?;
    }
    match &backfill.error {
        Some(error) => print_row("error", &format_args!("{}: {}", error.code, error.message)),
        None => Ok(()),
    }
}

fn print_preview(preview: &BackfillPreview) -> Result<(), Failure> {
    print_row("archived", &preview.events_archived)?;
    print_row("added", &preview.events_added)?;
    print_row("invoiced", &preview.affects_invoiced_period)?;
    preview.resources.iter().try_for_each(|one| {
        print(format_args!(
            "{}\t{}\t{} events, {} -> {} events, {}",
            one.source_id, one.resource_id, one.events_archived, one.value_archived, one.events_added, one.value_added
        ))
    })
}
