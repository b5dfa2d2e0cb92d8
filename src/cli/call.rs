use std::process::ExitCode;

use async_nats::{ConnectOptions, Event, HeaderMap};
use clap::Args;
use tokio::sync::mpsc;

use super::{Failure, Outcome, print};
use crate::{client::Client, config::Config, jetstream};

#[derive(Debug, Args)]
pub struct Options {
    /// Such as tm.id.increment.orders
    subject: String,
    /// The request as JSON; nothing means every default.
    #[arg(default_value = "")]
    body: String,
    /// A header, such as "Idempotency-Key: order-17". May be given several times.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// Where replies arrive. A tenant's user may only listen on _INBOX_<tenant>.
    #[arg(long, env = "NATS_INBOX_PREFIX", default_value = "_INBOX")]
    inbox_prefix: String,
}

pub async fn run(config: &Config, options: Options) -> Outcome {
    let mut headers = HeaderMap::new();
    for header in &options.headers {
        let (name, value) =
            header.split_once(':').ok_or_else(|| Failure(format!("--header {header:?}: must read NAME: VALUE")))?;
        headers.insert(name.trim(), value.trim());
    }
    // The server says no to a subject on the side, where the request itself would only time out.
    let (refusals, mut refused) = mpsc::unbounded_channel();
    let connect = ConnectOptions::new().event_callback(move |event| {
        if let Event::ServerError(error) = event {
            let _ = refusals.send(error.to_string());
        }
        std::future::ready(())
    });
    let nats = jetstream::connect_with(connect, &config.nats, "tidemark call", &options.inbox_prefix).await?;
    let client = Client::new(nats, config.nats.prefix.clone());
    let answer = tokio::select! {
        answer = client.request(options.subject, headers, options.body.into()) => answer,
        Some(refusal) = refused.recv() => return Err(Failure(format!("NATS refused: {refusal}"))),
    };
    match answer {
        Ok(reply) => {
            print(String::from_utf8_lossy(&reply))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(Failure(format!("{} {}: {error}", error.code.status(), error.code))),
    }
}
