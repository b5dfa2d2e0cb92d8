use std::{process::ExitCode, time::Duration};

use clap::Args;
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::{Instant, timeout};

use super::{Failure, Outcome, print, screen};
use crate::{config::Config, instance::Report, jetstream, nats};

/// Instances answer within milliseconds; nobody knows how many there are.
const FIRST: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_millis(500);
const LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct Options {
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// The part of a service's statistics that we look at.
#[derive(Deserialize)]
struct Statistics {
    endpoints: Vec<Endpoint>,
}

#[derive(Deserialize)]
struct Endpoint {
    data: Option<Report>,
}

pub async fn run(config: &Config, options: Options) -> Outcome {
    let mut reports = ask(config).await?;
    reports.sort_by_key(|report| (report.number, report.started_at));
    if options.json {
        print(serde_json::to_string_pretty(&reports)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if reports.is_empty() {
        return Err(Failure("no instance answers".into()));
    }
    screen::Table::of(["number", "instance", "roles", "version", "started", "ranges held"], reports, cells)?;
    Ok(ExitCode::SUCCESS)
}

fn cells(Report { instance, number, roles, version, started_at, ranges }: Report) -> Vec<String> {
    let number = number.map_or("-".into(), |number| number.to_string());
    let held: Vec<String> = ranges.iter().map(|range| format!("{} ({})", range.counter, range.numbers)).collect();
    vec![number, instance, roles.join(","), version, screen::moment(started_at), held.join(", ")]
}

/// One request that everybody answers.
async fn ask(config: &Config) -> Result<Vec<Report>, Failure> {
    let connect = async_nats::ConnectOptions::new();
    let nats = jetstream::connect_with(connect, &config.nats, "tidemark instances", "_INBOX").await?;
    let inbox = nats.new_inbox();
    let mut answers = nats.subscribe(inbox.clone()).await?;
    nats.publish_with_reply(nats::statistics_subject(&config.nats.prefix), inbox, Default::default()).await?;
    let (mut reports, mut patience, deadline) = (Vec::new(), FIRST, Instant::now() + LIMIT);
    while let Ok(Some(answer)) = timeout(patience, answers.next()).await {
        patience = SILENCE;
        // A service of the same name that is not ours says nothing that we understand.
        if let Ok(statistics) = serde_json::from_slice::<Statistics>(&answer.payload) {
            reports.extend(statistics.endpoints.into_iter().find_map(|endpoint| endpoint.data));
        }
        if Instant::now() > deadline {
            break;
        }
    }
    Ok(reports)
}
