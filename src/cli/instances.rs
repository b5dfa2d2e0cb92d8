use std::{process::ExitCode, time::Duration};

use chrono::Utc;
use clap::Args;
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::{Instant, timeout};

use super::{Failure, Outcome, print};
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
    print(format_args!(
        "{:>6}  {:<24} {:<16} {:<8} {:>10}  ranges held",
        "number", "instance", "roles", "version", "uptime"
    ))?;
    for Report { instance, number, roles, version, started_at, ranges } in reports {
        let number = number.map_or("-".into(), |number| number.to_string());
        let uptime = (Utc::now() - started_at).num_seconds().max(0);
        let uptime = format!("{}:{:02}:{:02}", uptime / 3600, uptime / 60 % 60, uptime % 60);
        let held: Vec<String> = ranges.iter().map(|range| format!("{} ({})", range.counter, range.numbers)).collect();
        let (roles, held) = (roles.join(","), held.join(", "));
        print(format_args!("{number:>6}  {instance:<24} {roles:<16} {version:<8} {uptime:>10}  {held}"))?;
    }
    Ok(ExitCode::SUCCESS)
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
