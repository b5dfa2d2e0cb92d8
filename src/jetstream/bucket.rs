//! A bucket: reads that are never stale, and compare-and-set, alone or several in one atomic batch.

use std::time::Duration;

use async_nats::{
    Client, HeaderMap, header,
    jetstream::{self, consumer::pull},
};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt};
use tokio::time::timeout;

use super::{
    batch::publish_batch,
    publish::{CasError, Message, publish_once},
    stored,
};
use crate::error::{Error, Result};

/// How long the history of one key may take.
const HISTORY: Duration = Duration::from_secs(10);

/// Cheap to clone.
#[derive(Clone)]
pub struct Bucket {
    client: Client,
    jetstream: jetstream::Context,
    name: String,
}

/// A key's value and the revision to change it at.
#[derive(Debug, Clone)]
pub struct Entry {
    pub value: Bytes,
    pub revision: u64,
}

/// A value to be written if the key is still at the expected revision; 0 means that there is none. Without one it has no
/// condition of its own.
#[derive(Debug, Clone)]
pub struct Write {
    pub key: String,
    pub value: Bytes,
    pub expected: Option<u64>,
    /// Whole seconds after which the key vanishes.
    pub ttl: Option<Duration>,
}

impl Write {
    /// One without a condition, for ever.
    pub fn to(key: String, value: Bytes) -> Self {
        Self { key, value, expected: None, ttl: None }
    }
}

impl Bucket {
    pub fn new(jetstream: jetstream::Context, name: String) -> Self {
        Self { client: jetstream.client(), jetstream, name }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn jetstream(&self) -> &jetstream::Context {
        &self.jetstream
    }

    fn subject(&self, key: &str) -> String {
        format!("$KV.{}.{key}", self.name)
    }

    /// Reads a key from the stream's leader: a direct read may come from a replica that lags behind.
    pub async fn read(&self, key: &str) -> Result<Option<Entry>> {
        let read = self.stream().await?.get_last_raw_message_by_subject(&self.subject(key)).await;
        let message = stored::if_any(read).map_err(|error| self.unreadable(error))?;
        Ok(message.map(|message| Entry { value: message.payload, revision: message.sequence }))
    }

    /// The values that a key had, with the time of each, in their order. Keys that expire leave nothing.
    pub async fn history(&self, key: &str) -> Result<Vec<(DateTime<Utc>, Bytes)>> {
        let unfinished = || self.unreadable("its history was not read to the end");
        timeout(HISTORY, self.read_history(key)).await.unwrap_or_else(|_| Err(unfinished()))?.ok_or_else(unfinished)
    }

    /// None if it ends before its end.
    async fn read_history(&self, key: &str) -> Result<Option<Vec<(DateTime<Utc>, Bytes)>>> {
        let config = pull::OrderedConfig { filter_subject: self.subject(key), ..Default::default() };
        let consumer = self.stream().await?.create_consumer(config).await.map_err(|error| self.unreadable(error))?;
        let mut values = Vec::new();
        if consumer.cached_info().num_pending == 0 {
            return Ok(Some(values));
        }
        let mut messages = consumer.messages().await.map_err(|error| self.unreadable(error))?;
        while let Some(message) = messages.next().await {
            let message = message.map_err(|error| self.unreadable(error))?;
            let info = message.info().map_err(|error| self.unreadable(error))?;
            let last = info.pending == 0;
            values.push((stored::time(info.published), message.payload.clone()));
            if last {
                return Ok(Some(values));
            }
        }
        Ok(None)
    }

    /// The first value from a revision on of a key that matches a pattern, as the leader has it.
    pub async fn next(&self, pattern: &str, from: u64) -> Result<Option<(String, Entry)>> {
        let read = self.stream().await?.get_first_raw_message_by_subject(self.subject(pattern), from).await;
        let message = stored::if_any(read).map_err(|error| self.unreadable(error))?;
        Ok(message.map(|message| {
            let key = message.subject[self.subject("").len()..].to_owned();
            (key, Entry { value: message.payload, revision: message.sequence })
        }))
    }

    /// The keys that match a pattern, such as `noid.*`, as the leader has them.
    pub async fn keys(&self, pattern: &str) -> Result<Vec<String>> {
        let found = self.stream().await?.info_with_subjects(self.subject(pattern)).await;
        let subjects = found.map_err(|error| self.unreadable(error))?;
        let start = self.subject("").len();
        let key = |(subject, _): (String, usize)| subject[start..].to_owned();
        subjects.map_ok(key).try_collect().await.map_err(|error| self.unreadable(error))
    }

    async fn stream(&self) -> Result<jetstream::stream::Stream<()>> {
        let stream = self.jetstream.get_stream_no_info(format!("KV_{}", self.name)).await;
        stream.map_err(|error| self.unreadable(error))
    }

    fn unreadable(&self, error: impl Into<async_nats::Error>) -> Error {
        Error::unavailable(format!("the bucket {} can't be read", self.name)).source(error.into())
    }

    /// Writes all or none. Returns the revision of the last one.
    pub async fn write(&self, writes: &[Write]) -> Result<u64, CasError> {
        let message = |write: &Write| Message {
            subject: self.subject(&write.key),
            headers: headers(write),
            payload: write.value.clone(),
        };
        let ack = match writes {
            [write] => publish_once(&self.client, message(write)).await?,
            writes => publish_batch(&self.client, &writes.iter().map(message).collect::<Vec<_>>()).await?,
        };
        Ok(ack.sequence)
    }
}

fn headers(write: &Write) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(expected) = write.expected {
        headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, expected.to_string());
    }
    if let Some(ttl) = write.ttl {
        headers.insert(header::NATS_MESSAGE_TTL, format!("{}s", ttl.as_secs()));
    }
    headers
}
