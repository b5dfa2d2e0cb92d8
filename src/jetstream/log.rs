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

/// Entries of one page, and how large they may be together.
const MOST_ENTRIES: usize = 1000;
const MOST_BYTES: usize = 1 << 20;

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

/// Entries in their order, without a gap.
#[derive(Debug)]
pub struct Page {
    after: u64,
    pub entries: Vec<Entry>,
    /// As far as the server that answered knows.
    pub is_last: bool,
}

impl Page {
    /// The server sends entries without waiting for anybody, so that some may be lost on the way; whoever took the others for
    /// all would give again what these gave.
    fn add(&mut self, entry: Entry) -> Result<(), String> {
        let expected = self.entries.last().map_or(self.after, |last| last.sequence) + 1;
        if entry.sequence != expected {
            return Err(format!("entry {} came where {expected} was expected", entry.sequence));
        }
        self.entries.push(entry);
        Ok(())
    }
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
    /// refused. An empty page is the leader's word.
    pub async fn read_after(&self, sequence: u64) -> Result<Page> {
        let page = timeout(PATIENCE, self.read_page(sequence)).await;
        let mut page = page.map_err(|_| self.unreadable("no answer"))?.map_err(|error| self.unreadable(error))?;
        if page.entries.is_empty() {
            page.entries.extend(self.at(sequence + 1).await?);
            page.is_last = page.entries.is_empty();
        }
        Ok(page)
    }

    /// The client library has no reads of many messages (ADR-31).
    async fn read_page(&self, after: u64) -> Result<Page, async_nats::Error> {
        let request = json!({ "batch": MOST_ENTRIES, "max_bytes": MOST_BYTES, "seq": after + 1 }).to_string();
        let inbox = self.client.new_inbox();
        let mut replies = self.client.subscribe(inbox.clone()).await?;
        self.client.publish_with_reply(format!("$JS.API.DIRECT.GET.{}", self.stream), inbox, request.into()).await?;
        let mut page = Page { after, entries: Vec::new(), is_last: true };
        while let Some(reply) = replies.next().await {
            match reply.status {
                None => {
                    let message = StreamMessage::try_from(reply)?;
                    page.is_last = message.headers.get(PENDING).is_some_and(|pending| pending.as_str() == "0");
                    page.add(entry(message))?;
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

    /// The last entry, as the leader has it.
    pub async fn last(&self) -> Result<Option<Entry>> {
        self.found(self.stream().await?.get_last_raw_message_by_subject(&self.subject).await)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_with_a_gap_is_refused() {
        let entry = |sequence| Entry { sequence, at: Utc::now(), payload: Bytes::new() };
        let page = |after| Page { after, entries: Vec::new(), is_last: false };
        let mut whole = page(7);
        assert!(whole.add(entry(8)).is_ok() && whole.add(entry(9)).is_ok());
        assert!(whole.add(entry(11)).is_err(), "one was lost");
        assert!(whole.add(entry(9)).is_err(), "one came twice");
        assert!(page(7).add(entry(9)).is_err(), "the first was lost");
        assert!(page(0).add(entry(1)).is_ok());
    }
}
