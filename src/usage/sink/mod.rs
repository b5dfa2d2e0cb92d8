//! From the stream to the ledger, once.
//!
//! Each shard has a [`reader`] that turns messages into records and checks what can be checked in a record alone, and a
//! [`writer`] that decides on the rest and writes a batch in one transaction: rows, heads, tallies, quarantine, and the
//! shard's position in the stream. The position is the fence. Whoever finds it elsewhere than he left it is not the
//! writer any more, and nothing that he did counts; so nothing is acknowledged, redelivered or written twice, whatever
//! crashes. While one batch is written the next is read.

mod catalog;
mod hidden;
mod incoming;
mod judge;
mod parking;
mod reader;
mod writer;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use async_nats::jetstream;
use futures::FutureExt;
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    courtesy::Courtesy,
    feed,
    limits::LimitTable,
    store::{Written, begin_shard, released, shards, take_shard, written},
    types::Types,
    verdicts::Verdicts,
};
use crate::{
    api::Name,
    database::is_about_data,
    error::{Code, Error, chain},
    events::Events,
};
use incoming::Incoming;
use reader::{Reader, Received};
use writer::{Batch, WriteError, Writer};

/// What is read ahead of the writer in one shard, in kilobytes; a record costs one more.
const ROOM: usize = 16 * 1024;

/// Records of one transaction, unless one message has more.
const BATCH: usize = 1000;

/// How often written messages are purged, at most.
const PURGE: Duration = Duration::from_millis(250);

/// How long a shard that has a writer elsewhere is left alone.
const WAIT: Duration = Duration::from_millis(500);

/// A database that hangs must not hang the sink for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// A part of the stream that has one writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shard {
    Number(u16),
    /// What the stream could not rewrite: a subject with `*` as a name, which the server lets anybody publish to.
    Strays,
}

impl Shard {
    /// As the tables and the locks have it.
    fn number(self) -> i32 {
        match self {
            Shard::Number(number) => number.into(),
            Shard::Strays => -1,
        }
    }

    fn tokens_before_tenant(self) -> usize {
        match self {
            Shard::Number(_) => 2,
            Shard::Strays => 1,
        }
    }
}

/// What all shards share.
pub struct Sink {
    pub database: PgPool,
    /// Of its own: a message that breaks a connection breaks nobody else's.
    pub nats: async_nats::Client,
    pub jetstream: jetstream::Context,
    pub stream: String,
    /// The first token of the events' subjects.
    pub subject: Name,
    pub types: Arc<Types>,
    pub limits: LimitTable,
    pub verdicts: Arc<Verdicts>,
    pub events: Events,
    pub courtesy: Arc<Courtesy>,
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
    #[error("PostgreSQL did not answer within {0:?}")]
    Hangs(Duration),
    #[error("a defect of ours")]
    Panicked,
}

/// What a shard's writer does when it has ended in peace.
enum After {
    /// There is more to do.
    GoOn,
    /// Somebody else may be writing.
    Wait,
}

/// Where a shard could not go on, and how often.
#[derive(Default)]
struct Trouble {
    position: i64,
    failures: u32,
    panics: u32,
}

impl Trouble {
    /// From then on a single message is fetched and written by itself.
    const CAREFUL: u32 = 2;
    /// A message at which we have panicked so often is set aside.
    const HOPELESS: u32 = 3;

    /// Trouble is over when the position has moved.
    fn begin(&mut self, position: i64) {
        if self.position != position {
            self.end(position);
        }
    }

    fn end(&mut self, position: i64) {
        *self = Self { position, ..Self::default() };
    }

    fn note(&mut self, interrupted: &Interrupted) {
        match interrupted {
            // It may be the next message that breaks the connection, and all shards read on it.
            Interrupted::Stream(_) => self.failures = Self::CAREFUL.max(self.failures + 1),
            Interrupted::Hangs(_) => self.failures += 1,
            Interrupted::Panicked => {
                self.failures += 1;
                self.panics += 1;
            }
            // Nothing in a message causes these.
            Interrupted::Database(_) | Interrupted::Fenced => {}
        }
    }

    fn patience(&self) -> Duration {
        PATIENCE * (self.failures + 1).min(15)
    }
}

impl Sink {
    /// Writes all shards until told to stop, also those that there were once: what is in them was acknowledged.
    pub fn start(self: &Arc<Self>, configured: u16, tracker: &TaskTracker, stop: &CancellationToken) {
        let (sink, stop, more) = (self.clone(), stop.clone(), tracker.clone());
        tracker.spawn(async move {
            let known = loop {
                match shards(&sink.database).await {
                    Ok(known) => break known,
                    Err(error) => tracing::warn!(%error, "usage: the shards are not known yet"),
                }
                if stop.run_until_cancelled(sleep(WAIT)).await.is_none() {
                    return;
                }
            };
            let numbers = (0..configured).chain(known.into_iter().filter(|number| *number >= configured));
            for shard in numbers.map(Shard::Number).chain([Shard::Strays]) {
                let (sink, stop) = (sink.clone(), stop.clone());
                more.spawn(async move { sink.keep(shard, stop).await });
            }
        });
    }

    async fn keep(&self, shard: Shard, stop: CancellationToken) {
        let mut trouble = Trouble::default();
        loop {
            let writing = AssertUnwindSafe(self.write_shard(shard, &mut trouble, &stop)).catch_unwind();
            let Some(ended) = stop.run_until_cancelled(writing).await else { return };
            match ended.unwrap_or(Err(Interrupted::Panicked)) {
                Ok(After::GoOn) => continue,
                Ok(After::Wait) => {}
                Err(error @ Interrupted::Fenced) => tracing::info!(?shard, "usage: {error}"),
                Err(error) => {
                    trouble.note(&error);
                    tracing::warn!(?shard, error = chain(&error), "usage is not written right now; tried again");
                }
            }
            stop.run_until_cancelled(sleep(WAIT)).await;
        }
    }

    /// Becomes the shard's writer, if it has none, and writes until something goes wrong.
    async fn write_shard(
        &self,
        shard: Shard,
        trouble: &mut Trouble,
        stop: &CancellationToken,
    ) -> Result<After, Interrupted> {
        let mut connection = self.database.acquire().await?;
        let taken = patient(PATIENCE, take_shard(&mut connection, shard.number())).await;
        if taken.is_err() {
            // It may have the lock all the same.
            connection.close_on_drop();
        }
        if !taken? {
            return Ok(After::Wait);
        }
        // The lock lasts as long as the connection, so it goes to nobody else.
        let mut connection = connection.detach();
        let (created, from) = self.begin(shard, &mut connection).await?;
        trouble.begin(from);
        let writer = Writer::new(shard.number(), created, from);
        let reader = Reader { sink: self, shard, room: Arc::new(Semaphore::new(ROOM)) };
        let releasing = Reader { sink: self, shard, room: reader.room.clone() };
        if trouble.failures >= Trouble::CAREFUL {
            self.write_one(reader, writer, &mut connection, trouble).await?;
            return Ok(After::GoOn);
        }
        tracing::info!(?shard, position = from, "usage: writes this shard");
        let (batches, read) = mpsc::channel(1024);
        let written = watch::Sender::new(from);
        let created = writer.stream_created.clone();
        let purging = self.purge(shard, &created, written.subscribe());
        tokio::select! {
            ended = reader.read(from, batches) => ended.map_err(Interrupted::Stream)?,
            ended = self.write(releasing, writer, &mut connection, read, &written) => ended?,
            () = purging => {}
            () = self.keep_uncovering(), if shard == Shard::Strays => {}
            () = stop.cancelled() => {}
        }
        Ok(After::Wait)
    }

    /// In which life of the stream we are, and the last sequence that was written down in it.
    async fn begin(&self, shard: Shard, connection: &mut PgConnection) -> Result<(String, i64), Interrupted> {
        // In this order: whoever writes meanwhile is ahead of what we know of the ledger, never of the stream.
        let before = patient(PATIENCE, written(connection, shard.number())).await?;
        let (created, last) = self.stream_state().await.map_err(Interrupted::Stream)?;
        match before {
            Some(Written { stream_created, position }) if stream_created == created && position <= last => {
                Ok((created, position))
            }
            // A stream that is not that far was put back to an older state: what it has is read again, and the ledger knows
            // what it knows.
            before => {
                match patient(PATIENCE, begin_shard(connection, shard.number(), before.as_ref(), &created)).await? {
                    true => Ok((created, 0)),
                    false => Err(Interrupted::Fenced),
                }
            }
        }
    }

    /// The subjects of a shard, as the stream has rewritten them.
    fn subjects(&self, shard: Shard) -> String {
        match shard {
            Shard::Number(number) => format!("{}.{number}.>", self.subject),
            Shard::Strays => format!("{}.*.*", self.subject),
        }
    }

    /// When the stream was made, and its last sequence.
    async fn stream_state(&self) -> Result<(String, i64), async_nats::Error> {
        let stream = self.jetstream.get_stream(&self.stream).await?;
        let info = stream.cached_info();
        Ok((info.created.to_string(), info.state.last_sequence as i64))
    }

    /// Writes the next message by itself, where reading or writing many has failed.
    async fn write_one(
        &self,
        reader: Reader<'_>,
        writer: Writer,
        connection: &mut PgConnection,
        trouble: &mut Trouble,
    ) -> Result<(), Interrupted> {
        let subjects = self.subjects(reader.shard);
        let next = Incoming::fetched(&self.jetstream, &self.stream, &subjects, writer.position).await;
        let Some(message) = next.map_err(Interrupted::Stream)? else {
            // It was not in a message: the servers were away.
            trouble.end(writer.position);
            return Ok(());
        };
        let sequence = message.sequence;
        let received = match trouble.panics < Trouble::HOPELESS {
            true => reader.receive(message).await.map_err(Interrupted::Stream)?,
            false => reader.set_aside(message, Error::new(Code::Internal, "a defect of ours kept it from being read")),
        };
        tracing::warn!(shard = ?reader.shard, sequence, "usage: one message is written by itself");
        self.write_batch(writer, connection, Batch::new(vec![received]), trouble.patience()).await.map(drop)
    }

    async fn write(
        &self,
        reader: Reader<'_>,
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
            writer = self.write_batch(writer, connection, Batch::new(messages), PATIENCE).await?;
            written.send_replace(writer.position);
            while writer.may_release() {
                writer = self.release(&reader, writer, connection).await?;
                // Others have their turn.
                if !read.is_empty() {
                    break;
                }
            }
        }
    }

    /// Writes some of what has waited for a range that is open again.
    async fn release(
        &self,
        reader: &Reader<'_>,
        mut writer: Writer,
        connection: &mut PgConnection,
    ) -> Result<Writer, Interrupted> {
        let released = patient(PATIENCE, released(connection, writer.shard, BATCH as i64)).await?;
        if released.is_empty() {
            writer.waits_for = Some(writer.closed.clone());
            return Ok(writer);
        }
        let mut messages = Vec::with_capacity(released.len());
        for one in released {
            messages.push(reader.unpark(one, writer.position).await.map_err(Interrupted::Stream)?);
        }
        self.write_batch(writer, connection, Batch::new(messages), PATIENCE).await
    }

    /// Writes a batch. If the database won't have it, its messages are written one by one, and the one that it won't have
    /// goes to quarantine: a record must not stand in the way of others, whatever we have overlooked.
    async fn write_batch(
        &self,
        mut writer: Writer,
        connection: &mut PgConnection,
        mut batch: Batch,
        patience: Duration,
    ) -> Result<Writer, Interrupted> {
        self.courtesy.writes(batch.items().count());
        match writer.write_within(patience, connection, &mut batch).await {
            Ok(()) => self.tell(&batch).await,
            Err(Interrupted::Database(error)) if is_about_data(&error) => {
                tracing::error!(shard = writer.shard, %error, "usage: a batch was refused by the database");
                for message in batch.into_messages() {
                    let mut alone = Batch::new(vec![message]);
                    match writer.write_within(patience, connection, &mut alone).await {
                        Err(Interrupted::Database(error)) if is_about_data(&error) => {
                            alone.refuse(&error);
                            writer.write_within(patience, connection, &mut alone).await?;
                        }
                        other => other?,
                    }
                    self.tell(&alone).await;
                }
            }
            Err(error) => return Err(error),
        }
        Ok(writer)
    }

    /// After the commit: verdicts to those who wait for them, and what was refused to those who listen.
    async fn tell(&self, batch: &Batch) {
        // Of a message of which something waits, no verdict is given yet.
        for (message, verdict, waits) in batch.decided() {
            if let (Some(address), false) = (&message.verdict, waits) {
                self.verdicts.send(address, &verdict).await;
            }
            metrics::counter!("tidemark_usage_accepted_total").increment(verdict.accepted as u64);
            metrics::counter!("tidemark_usage_duplicates_total").increment(verdict.duplicates as u64);
            for rejection in &verdict.rejected {
                let code = rejection.reason.code.as_str();
                metrics::counter!("tidemark_usage_rejected_total", "code" => code).increment(1);
            }
        }
        for tenant in batch.fed() {
            feed::tell(&self.events, tenant).await;
        }
        for (origin, entry) in batch.refused() {
            // Nobody can listen where the name is none.
            if origin.tenant.parse::<Name>().is_err() || origin.source.parse::<Name>().is_err() {
                continue;
            }
            let subject = format!("{}-rejected.{}.{}", self.subject, origin.tenant, origin.source);
            if let Err(error) = self.nats.publish(subject, json!(entry).to_string().into()).await {
                tracing::debug!(%error, "a refusal was not told");
            }
        }
    }

    /// Drops from the stream what is in the ledger.
    async fn purge(&self, shard: Shard, created: &str, mut written: watch::Receiver<i64>) {
        loop {
            let up_to = *written.borrow_and_update();
            // A stream that was made anew meanwhile counts from the start, and has nothing that we have written.
            let same = self.stream_state().await.is_ok_and(|(now, last)| now == created && last >= up_to);
            if up_to > 0 && same {
                let request = json!({ "filter": self.subjects(shard), "seq": up_to + 1 });
                let purge = format!("STREAM.PURGE.{}", self.stream);
                let purged: Result<serde_json::Value, _> = self.jetstream.request(purge, &request).await;
                match purged {
                    Ok(answer) if answer["success"] == true => {}
                    Ok(answer) => tracing::warn!(?shard, %answer, "usage: what is written was not purged"),
                    // Later then.
                    Err(error) => tracing::debug!(?shard, %error, "usage: what is written was not purged"),
                }
            }
            sleep(PURGE).await;
            if written.changed().await.is_err() {
                return;
            }
        }
    }
}

async fn patient<T, E: Into<Interrupted>>(
    patience: Duration,
    asked: impl Future<Output = Result<T, E>>,
) -> Result<T, Interrupted> {
    timeout(patience, asked).await.map_err(|_| Interrupted::Hangs(patience))?.map_err(Into::into)
}

impl Writer {
    async fn write_within(
        &mut self,
        patience: Duration,
        connection: &mut PgConnection,
        batch: &mut Batch,
    ) -> Result<(), Interrupted> {
        patient(patience, self.write(connection, batch)).await
    }
}

impl From<WriteError> for Interrupted {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Fenced => Self::Fenced,
            WriteError::Database(error) => Self::Database(error),
        }
    }
}
