//! From the stream to the ledger, once.
//!
//! Each shard has a [`reader`] that turns messages into records and checks what can be checked in a record alone, and a
//! [`writer`] that decides on the rest and writes a batch in one transaction: rows, heads, tallies, quarantine, and the
//! shard's position in the stream. The position is the fence. Whoever finds it elsewhere than he left it is not the
//! writer any more, and nothing that he did counts; so nothing is acknowledged, redelivered or written twice, whatever
//! crashes. While one batch is written the next is read.

mod judge;
mod reader;
mod writer;

use std::{sync::Arc, time::Duration};

use async_nats::jetstream;
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    limits::LimitTable,
    store::{position, take_shard},
    types::Types,
    verdicts::Verdicts,
};
use crate::{api::Name, error::chain};
use reader::{Reader, Received};
use writer::{Batch, WriteError, Writer};

/// Records that are read ahead of the writer, in one shard.
const READ_AHEAD: usize = 4000;

/// Records of one transaction; it may be a message more.
const BATCH: usize = 1000;

/// How often written messages are purged, at most.
const PURGE: Duration = Duration::from_millis(250);

/// How long a shard that has a writer elsewhere is left alone.
const WAIT: Duration = Duration::from_millis(500);

/// A database that hangs must not hang the sink for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// What all shards share.
pub struct Sink {
    pub database: PgPool,
    pub nats: async_nats::Client,
    pub jetstream: jetstream::Context,
    pub stream: String,
    /// The first token of the events' subjects.
    pub subject: Name,
    pub types: Arc<Types>,
    pub limits: LimitTable,
    pub verdicts: Arc<Verdicts>,
}

/// Why a shard begins again.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    #[error("PostgreSQL: {0}")]
    Database(#[from] sqlx::Error),
    #[error("NATS: {0}")]
    Stream(async_nats::Error),
    #[error("another writer has moved on")]
    Fenced,
    #[error("PostgreSQL did not answer within {PATIENCE:?}")]
    Hangs,
}

impl Sink {
    /// Writes all shards until told to stop. Shards that were more once are looked after until they are empty.
    pub fn start(self: &Arc<Self>, shards: u16, tracker: &TaskTracker, stop: &CancellationToken) {
        for shard in 0..i32::from(shards) {
            let (sink, stop) = (self.clone(), stop.clone());
            tracker.spawn(async move { sink.keep(shard, stop).await });
        }
    }

    async fn keep(&self, shard: i32, stop: CancellationToken) {
        while let Some(ended) = stop.run_until_cancelled(self.write_shard(shard, &stop)).await {
            match ended {
                Ok(()) => {}
                Err(error @ Interrupted::Fenced) => tracing::info!(shard, "usage: {error}"),
                Err(error) => {
                    tracing::warn!(shard, error = chain(&error), "usage is not written right now; tried again")
                }
            }
            stop.run_until_cancelled(sleep(WAIT)).await;
        }
    }

    /// Becomes the shard's writer, if it has none, and writes until something goes wrong.
    async fn write_shard(&self, shard: i32, stop: &CancellationToken) -> Result<(), Interrupted> {
        // A connection of its own: the lock lasts as long as it does.
        let mut connection = self.database.acquire().await?.detach();
        if !patient(take_shard(&mut connection, shard)).await? {
            return Ok(());
        }
        let created = self.stream_created().await.map_err(Interrupted::Stream)?;
        let from = patient(position(&mut connection, shard, &created)).await?;
        tracing::info!(shard, position = from, "usage: writes this shard");
        let (batches, read) = mpsc::channel(1024);
        let room = Arc::new(Semaphore::new(READ_AHEAD));
        let reader = Reader { sink: self, shard, room };
        let writer = Writer { shard, stream_created: created, position: from };
        let written = watch::Sender::new(from);
        tokio::select! {
            ended = reader.read(from, batches) => ended.map_err(Interrupted::Stream),
            ended = self.write(writer, &mut connection, read, &written) => ended,
            () = self.purge(shard, written.subscribe()) => Ok(()),
            () = stop.cancelled() => Ok(()),
        }
    }

    /// The subjects of a shard, as the stream has rewritten them.
    fn subjects(&self, shard: i32) -> String {
        format!("{}.{shard}.>", self.subject)
    }

    async fn stream_created(&self) -> Result<String, async_nats::Error> {
        let stream = self.jetstream.get_stream(&self.stream).await?;
        Ok(stream.cached_info().created.to_string())
    }

    async fn write(
        &self,
        mut writer: Writer,
        connection: &mut PgConnection,
        mut read: mpsc::Receiver<Received>,
        written: &watch::Sender<i64>,
    ) -> Result<(), Interrupted> {
        let mut next = None;
        loop {
            let Some(first) = (match next.take() {
                Some(message) => Some(message),
                None => read.recv().await,
            }) else {
                return Ok(());
            };
            // What has come while the last batch was written is the next one: nobody waits for company.
            let mut messages: Vec<Received> = vec![first];
            let mut records = messages[0].items.len();
            while records < BATCH {
                let Ok(message) = read.try_recv() else { break };
                if records + message.items.len() > BATCH {
                    next = Some(message);
                    break;
                }
                records += message.items.len();
                messages.push(message);
            }
            let batch = Batch::new(messages);
            writer = self.write_batch(writer, connection, batch).await?;
            written.send_replace(writer.position);
        }
    }

    /// Writes a batch. If the database won't have it, its messages are written one by one, and the one that it won't have
    /// goes to quarantine: a record must not stand in the way of others, whatever we have overlooked.
    async fn write_batch(
        &self,
        mut writer: Writer,
        connection: &mut PgConnection,
        mut batch: Batch,
    ) -> Result<Writer, Interrupted> {
        match timeout(PATIENCE, writer.write(connection, &mut batch)).await.map_err(|_| Interrupted::Hangs)? {
            Ok(()) => self.tell(&batch).await,
            Err(WriteError::Fenced) => return Err(Interrupted::Fenced),
            Err(WriteError::Database(error)) if crate::database::is_passing(&error) => return Err(error.into()),
            Err(WriteError::Database(error)) => {
                tracing::error!(shard = writer.shard, %error, "usage: a batch was refused by the database");
                for message in batch.into_messages() {
                    let mut alone = Batch::new(vec![message]);
                    let tried = timeout(PATIENCE, writer.write(connection, &mut alone)).await;
                    match tried.map_err(|_| Interrupted::Hangs)? {
                        Err(WriteError::Database(error)) if !crate::database::is_passing(&error) => {
                            alone.refuse(&error);
                            let tried = timeout(PATIENCE, writer.write(connection, &mut alone)).await;
                            tried.map_err(|_| Interrupted::Hangs)??;
                        }
                        other => other?,
                    }
                    self.tell(&alone).await;
                }
            }
        }
        Ok(writer)
    }

    /// After the commit: verdicts to those who wait for them, and what was refused to those who listen.
    async fn tell(&self, batch: &Batch) {
        for (message, verdict) in batch.decided() {
            if let Some(address) = &message.verdict {
                self.verdicts.send(address, &verdict).await;
            }
            metrics::counter!("tidemark_usage_accepted_total").increment(verdict.accepted as u64);
            metrics::counter!("tidemark_usage_duplicates_total").increment(verdict.duplicates as u64);
            for rejection in &verdict.rejected {
                let code = rejection.reason.code.as_str();
                metrics::counter!("tidemark_usage_rejected_total", "code" => code).increment(1);
            }
        }
        for (origin, entry) in batch.refused() {
            let subject = format!("{}-rejected.{}.{}", self.subject, origin.tenant, origin.source);
            let told = self.nats.publish(subject, json!(entry).to_string().into()).await;
            if let Err(error) = told {
                tracing::debug!(%error, "a refusal was not told");
            }
        }
    }

    /// Drops from the stream what is in the ledger.
    async fn purge(&self, shard: i32, mut written: watch::Receiver<i64>) {
        loop {
            let up_to = *written.borrow_and_update();
            if up_to > 0 {
                let request = json!({ "filter": self.subjects(shard), "seq": up_to + 1 });
                let purge = format!("STREAM.PURGE.{}", self.stream);
                let purged: Result<serde_json::Value, _> = self.jetstream.request(purge, &request).await;
                match purged {
                    Ok(answer) if answer["success"] == true => {}
                    Ok(answer) => tracing::warn!(shard, %answer, "usage: what is written was not purged"),
                    // Later then.
                    Err(error) => tracing::debug!(shard, %error, "usage: what is written was not purged"),
                }
            }
            sleep(PURGE).await;
            if written.changed().await.is_err() {
                return;
            }
        }
    }
}

async fn patient<T>(asked: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, Interrupted> {
    timeout(PATIENCE, asked).await.map_err(|_| Interrupted::Hangs)?.map_err(Into::into)
}

impl From<WriteError> for Interrupted {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Fenced => Self::Fenced,
            WriteError::Database(error) => Self::Database(error),
        }
    }
}
