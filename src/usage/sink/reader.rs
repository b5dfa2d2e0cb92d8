//! Messages into records.

use std::{sync::Arc, time::Duration};

use async_nats::{
    Message, header,
    jetstream::consumer::{AckPolicy, DeliverPolicy, pull},
};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::StreamExt;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use uuid::Uuid;

use super::{READ_AHEAD, Sink};
use crate::{
    api::{Context, Encoding, Name},
    client::CONTENT_TYPE,
    error::{Code, Error, Result},
    usage::{
        identity::Origin,
        quarantine,
        record::{self, Record},
        rules, store,
        types::Type,
        verdicts,
    },
};

/// Messages and bytes that the server sends ahead.
const MESSAGES_AHEAD: usize = 200;
const BYTES_AHEAD: usize = 8 << 20;

pub struct Reader<'a> {
    pub sink: &'a Sink,
    pub shard: i32,
    pub room: Arc<Semaphore>,
}

/// A message, read.
pub struct Received {
    pub sequence: i64,
    /// When the stream had it.
    pub at: DateTime<Utc>,
    pub tenant: String,
    pub source: String,
    pub user: Option<String>,
    /// Where its verdict goes.
    pub verdict: Option<String>,
    pub items: Vec<Item>,
    /// Given back when it is written.
    _room: OwnedSemaphorePermit,
}

impl Received {
    pub fn origin(&self) -> Origin<'_> {
        Origin { tenant: &self.tenant, source: &self.source }
    }
}

/// One record of a message, or a message that could not be read.
pub struct Item {
    /// Its place in the message, or in the request.
    pub index: usize,
    pub payload: Bytes,
    /// When it came first.
    pub came_at: DateTime<Utc>,
    /// The entry in quarantine that it comes from.
    pub replay_of: Option<Uuid>,
    pub read: Read,
}

/// What can be told from a record alone.
pub enum Read {
    Sound(Record, Arc<Type>),
    /// Could be read, and may be a repeat of one that was sound once.
    Unfit(Record, Error),
    Unreadable {
        idempotency_key: Option<String>,
        error: Error,
    },
}

impl Read {
    pub fn record(&self) -> Option<&Record> {
        match self {
            Read::Sound(record, _) | Read::Unfit(record, _) => Some(record),
            Read::Unreadable { .. } => None,
        }
    }

    pub fn idempotency_key(&self) -> Option<&str> {
        match self {
            Read::Unreadable { idempotency_key, .. } => idempotency_key.as_deref(),
            Read::Sound(record, _) | Read::Unfit(record, _) => Some(&record.idempotency_key),
        }
    }
}

impl Reader<'_> {
    /// Reads the shard from after a position, in order and without a gap, as long as the server lets us.
    pub async fn read(self, position: i64, batches: mpsc::Sender<Received>) -> Result<(), async_nats::Error> {
        let mut last = position as u64;
        let stream = self.sink.jetstream.get_stream(&self.sink.stream).await?;
        let consumer = stream
            .create_consumer(pull::Config {
                deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: last + 1 },
                filter_subject: self.sink.subjects(self.shard),
                ack_policy: AckPolicy::None,
                inactive_threshold: Duration::from_secs(30),
                memory_storage: true,
                num_replicas: 1,
                ..Default::default()
            })
            .await?;
        let messages = consumer.stream().max_messages_per_batch(MESSAGES_AHEAD).max_bytes_per_batch(BYTES_AHEAD);
        let mut messages =
            messages.expires(Duration::from_secs(30)).heartbeat(Duration::from_secs(5)).messages().await?;
        let mut delivered = 0;
        while let Some(message) = messages.next().await {
            let message = message?;
            let info = message.info()?;
            let (sequence, count) = (info.stream_sequence, info.consumer_sequence);
            if count != delivered + 1 || sequence <= last {
                return Err(format!("message {sequence} came out of order").into());
            }
            (last, delivered) = (sequence, count);
            let published = info.published.unix_timestamp_nanos();
            let at = DateTime::from_timestamp_nanos(published.try_into().unwrap_or_default());
            let received = self.receive(message.message, sequence, at).await?;
            if batches.send(received).await.is_err() {
                return Ok(());
            }
        }
        Err("the stream's messages ended".into())
    }

    async fn receive(&self, message: Message, sequence: u64, at: DateTime<Utc>) -> Result<Received, async_nats::Error> {
        let mut tokens = message.subject.split('.').skip(2);
        let mut token = || tokens.next().unwrap_or_default().to_owned();
        let (tenant, source) = (token(), token());
        let header = |name: &str| message.headers.as_ref().and_then(|headers| headers.get(name)).map(|v| v.as_str());
        let user = header(Context::USER_HEADER).map(str::to_owned);
        let origin = Origin { tenant: &tenant, source: &source };
        let items = match header(quarantine::REPLAY_HEADER) {
            Some(_) => self.replayed(origin, &message.payload).await?,
            None => {
                let encoding = Encoding::of(header(CONTENT_TYPE));
                let refused = unsafe_origin(origin, header(header::NATS_MESSAGE_ID.as_ref()));
                self.items(origin, user.as_deref(), encoding, &message.payload, at, refused).await?
            }
        };
        let permits = items.len().clamp(1, READ_AHEAD) as u32;
        let room = self.room.clone().acquire_many_owned(permits).await?;
        let verdict = header(verdicts::HEADER).map(str::to_owned);
        Ok(Received { sequence: sequence as i64, at, verdict, items, user, _room: room, tenant, source })
    }

    /// The records of a message, each for itself. A reason for which none of them can be taken is each one's.
    async fn items(
        &self,
        origin: Origin<'_>,
        user: Option<&str>,
        encoding: Encoding,
        payload: &Bytes,
        came_at: DateTime<Utc>,
        refused: Option<Error>,
    ) -> Result<Vec<Item>, async_nats::Error> {
        let unreadable = |error| {
            let read = Read::Unreadable { idempotency_key: None, error };
            vec![Item { index: 0, payload: payload.clone(), came_at, replay_of: None, read }]
        };
        let json = match record::as_json(encoding, payload) {
            Ok(json) => json,
            Err(error) => return Ok(unreadable(error)),
        };
        let records = match record::split(&json) {
            Ok(records) => records,
            Err(error) => return Ok(unreadable(error)),
        };
        let mut items = Vec::with_capacity(records.len());
        for (index, raw) in records.into_iter().enumerate() {
            let read = match &refused {
                Some(error) => {
                    Read::Unreadable { idempotency_key: record::text_member(raw, KEY), error: error.share() }
                }
                None => self.examine(origin, user, raw, came_at).await?,
            };
            let payload = json.slice_ref(raw.get().as_bytes());
            items.push(Item { index, payload, came_at, replay_of: None, read });
        }
        Ok(items)
    }

    async fn examine(
        &self,
        origin: Origin<'_>,
        user: Option<&str>,
        raw: &RawValue,
        came_at: DateTime<Utc>,
    ) -> Result<Read, async_nats::Error> {
        let limits = self.sink.limits.of(origin.tenant, origin.source);
        let record = match record::read(raw, origin, user, limits.max_record_bytes()) {
            Ok(record) => record,
            Err(error) => {
                return Ok(Read::Unreadable { idempotency_key: record::text_member(raw, KEY), error });
            }
        };
        let of_type = self.sink.types.find(&record.usage_type).await?;
        Ok(match rules::check(&record, raw, origin.source, came_at, of_type.as_deref(), &limits) {
            Ok(()) => Read::Sound(record, of_type.expect("checked")),
            Err(error) => Read::Unfit(record, error),
        })
    }

    /// What is asked for from quarantine: entries of this tenant and source, as of the time that they first came.
    async fn replayed(&self, origin: Origin<'_>, payload: &[u8]) -> Result<Vec<Item>, async_nats::Error> {
        let asked: Vec<quarantine::Entry> = serde_json::from_slice(payload).unwrap_or_default();
        let ids: Vec<Uuid> = asked.iter().map(|entry| entry.id).collect();
        let waiting = store::waiting(&self.sink.database, origin.tenant, &ids).await?;
        let mut items = Vec::new();
        for waiting in waiting.into_iter().filter(|waiting| waiting.source_id == origin.source) {
            let index = asked.iter().find(|entry| entry.id == waiting.id).map_or(0, |entry| entry.index);
            let (user, came_at) = (waiting.user_id.as_deref(), waiting.received_at);
            let payload = Bytes::from(waiting.payload);
            let encoding = if record::split(&payload).is_ok() { Encoding::Json } else { Encoding::MessagePack };
            let found = self.items(origin, user, encoding, &payload, came_at, None).await?;
            items.extend(found.into_iter().map(|item| Item { index, replay_of: Some(waiting.id), ..item }));
        }
        Ok(items)
    }
}

const KEY: &str = "idempotency_key";

/// Message ids are the whole stream's, so one that is not under its own tenant and source could swallow a stranger's.
fn unsafe_origin(origin: Origin<'_>, message_id: Option<&str>) -> Option<Error> {
    let Origin { tenant, source } = origin;
    if tenant.parse::<Name>().is_err() || source.parse::<Name>().is_err() {
        let message = "tenant and source must be 1 to 255 letters, digits, '_' or '-'";
        return Some(Error::new(Code::ValidationError, message));
    }
    let safe = |id: &str| {
        let rest = id.strip_prefix(tenant)?.strip_prefix('.')?.strip_prefix(source)?.strip_prefix('.')?;
        (!rest.is_empty()).then_some(())
    };
    match message_id {
        Some(id) if safe(id).is_none() => Some(Error::new(
            Code::UnsafeMessageId,
            format!("Nats-Msg-Id: must read {tenant}.{source}.<unique>: ids are the whole stream's"),
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_id_stays_under_its_own_source() {
        let origin = Origin { tenant: "acme", source: "api" };
        let code = |id: &str| unsafe_origin(origin, Some(id)).map(|error| error.code);
        assert_eq!((unsafe_origin(origin, None).map(|error| error.code), code("acme.api.1")), (None, None));
        for id in ["", "1", "acme.api", "acme.api.", "acme.apis.1", "acme.1", "acme2.api.1"] {
            assert_eq!(code(id), Some(Code::UnsafeMessageId), "{id}");
        }
        let strange = Origin { tenant: "ä", source: "api" };
        assert_eq!(unsafe_origin(strange, None).map(|error| error.code), Some(Code::ValidationError));
    }
}
