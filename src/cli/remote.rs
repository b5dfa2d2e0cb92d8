//! Commands that ask a running deployment, over NATS.

use std::process::ExitCode;

use async_nats::ConnectOptions;
use clap::{Args, Subcommand};

use super::{Failure, Outcome};
use crate::{
    client::{Client, Heard, Refusals},
    config::Config,
    jetstream,
};

#[derive(Debug, Args)]
pub struct Connection {
    /// Where replies arrive. A tenant's user may only listen on _INBOX_<tenant>.
    #[arg(long, global = true, env = "NATS_INBOX_PREFIX", default_value = "_INBOX")]
    inbox_prefix: String,
}

/// Verbs of one kind of thing in a running deployment.
#[derive(Debug, Args)]
pub struct Verbs<V: Subcommand> {
    #[command(subcommand)]
    verb: V,
    /// As JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

impl<V: Subcommand> Verbs<V> {
    /// Everything that a verb asks is one conversation, and a refusal by NATS ends it.
    pub async fn run(
        self,
        config: &Config,
        converse: impl AsyncFnOnce(&Client, V, bool) -> Result<(), Failure>,
    ) -> Outcome {
        let mut remote = Remote::connect(config, &self.connection).await?;
        let client = remote.client.clone();
        remote.answer(converse(&client, self.verb, self.json)).await?;
        Ok(ExitCode::SUCCESS)
    }
}

pub struct Remote {
    pub client: Client,
    refused: Heard,
}

impl Remote {
    pub async fn connect(config: &Config, connection: &Connection) -> Result<Self, Failure> {
        let refusals = Refusals::default();
        let options = refusals.told_by(ConnectOptions::new());
        let nats = jetstream::connect_with(options, &config.nats, "tidemark command", &connection.inbox_prefix).await?;
        let client = Client::new(nats, config.nats.prefix.clone());
        Ok(Self { refused: refusals.heard(), client: client.hearing(refusals) })
    }

    /// Waits for an answer, or for the server to say no: also to listening, which nothing else would tell.
    pub async fn answer<T, E: Into<Failure>>(
        &mut self,
        asked: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            refusal = self.refused.next() => Err(Failure(refusal.to_string())),
            answer = asked => answer.map_err(Into::into),
        }
    }
}
