//! A stream of one subject that is a log: whoever has read all of it may append to it. What was read never changes, and
//! nothing comes between it and what is appended.

use std::time::Duration;

use async_nats::{
    Client, HeaderMap, header,
    jetstream::{self, message::StreamMessage, stream::RawMessageError},
};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::StreamExt;
use serde_json::json;
use tokio::time::timeout;

use super::{
    publish::{CasError, Message, publish_once},
    stored,
};
use crate::error::{Error, Result};

/// How long a page may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Entries of one page.
const MOST_ENTRIES: usize = 1000;

/// Cheap to clone.
#[derive(Clone)]
pub struct Log {
    client: Client,
    jetstream: jetstream::Context,
    stream: String,
    subject: String,
}

#[derive(Debug, Clone)]
pub struct Entry {
    pub sequence: u64,
    pub at: DateTime<Utc>,
    pub payload: Bytes,
}

/// Entries in their order.
#[derive(Debug)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// As far as the server that answered knows.
    pub is_last: bool,
}

impl Log {
    pub fn new(jetstream: jetstream::Context, stream: String, subject: String) -> Self {
        Self { client: jetstream.client(), jetstream, stream, subject }
    }

    /// Appends an entry if none has come after the one that is named. Returns its sequence number.
    pub async fn append(&self, after: u64, payload: Bytes) -> Result<u64, CasError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::NATS_EXPECTED_LAST_SEQUENCE, after.to_string());
        let message = Message { subject: self.subject.clone(), headers, payload };
        Ok(publish_once(&self.client, message).await?.sequence)
    }

    /// What comes after an entry, many at once. A replica that lags behind may answer: whoever appends to what it has is
    /// refused.
    pub async fn read_after(&self, sequence: u64) -> Result<Page> {
        let request = json!({ "batch": MOST_ENTRIES, "seq": sequence + 1 });
        let page = timeout(PATIENCE, self.read_page(request.to_string())).await;
        page.map_err(|_| self.unreadable("no answer"))?.map_err(|error| self.unreadable(error))
    }

    /// The client library has no reads of many messages (ADR-31).
    async fn read_page(&self, request: String) -> Result<Page, async_nats::Error> {
        let inbox = self.client.new_inbox();
        let mut replies = self.client.subscribe(inbox.clone()).await?;
        self.client.publish_with_reply(format!("$JS.API.DIRECT.GET.{}", self.stream), inbox, request.into()).await?;
        let mut page = Page { entries: Vec::new(), is_last: true };
        while let Some(reply) = replies.next().await {
            match reply.status {
                None => {
                    let message = StreamMessage::try_from(reply)?;
                    page.is_last = message.headers.get(PENDING).is_some_and(|pending| pending.as_str() == "0");
                    page.entries.push(entry(message));
                }
                Some(status) if [END_OF_BATCH, NOTHING_THERE].contains(&status.into()) => return Ok(page),
                Some(status) => return Err(format!("{status} {}", reply.description.unwrap_or_default()).into()),
            }
        }
        Err("the connection was closed".into())
    }

    /// An entry, as the leader has it.
    pub async fn at(&self, sequence: u64) -> Result<Option<Entry>> {
        self.found(self.stream().await?.get_raw_message(sequence).await)
    }

    /// How many entries there are, as the leader knows. It is the sequence number of the last one, too.
    pub async fn len(&self) -> Result<u64> {
        let last = self.stream().await?.get_last_raw_message_by_subject(&self.subject).await;
        Ok(self.found(last)?.map_or(0, |last| last.sequence))
    }

    fn found(&self, read: Result<StreamMessage, RawMessageError>) -> Result<Option<Entry>> {
        Ok(stored::if_any(read).map_err(|error| self.unreadable(error))?.map(entry))
    }

    async fn stream(&self) -> Result<jetstream::stream::Stream<()>> {
        self.jetstream.get_stream_no_info(&self.stream).await.map_err(|error| self.unreadable(error))
    }

    fn unreadable(&self, error: impl Into<async_nats::Error>) -> Error {
        Error::unavailable(format!("the stream {} can't be read", self.stream)).source(error.into())
    }
}

/// How many come after a message.
const PENDING: &str = "Nats-Num-Pending";

const END_OF_BATCH: u16 = 204;
const NOTHING_THERE: u16 = 404;

fn entry(message: StreamMessage) -> Entry {
    Entry { sequence: message.sequence, at: stored::time(message.time), payload: message.payload }
}
