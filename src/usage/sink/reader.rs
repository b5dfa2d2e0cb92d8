//! Messages into records.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{json, value::RawValue};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use uuid::Uuid;

use super::{ROOM, Shard, Sink, incoming::Incoming};
use crate::{
    api::{Context, Encoding, Name},
    error::{Code, Error, Result},
    usage::{
        identity::Origin,
        quarantine::{self, REPLAY_HEADER},
        record::{self, Record},
        rules,
        store::{self, Released},
        types::Type,
    },
};

/// Messages and bytes that the server sends ahead.
const MESSAGES_AHEAD: usize = 200;
const BYTES_AHEAD: usize = 8 << 20;

/// How long nothing may come before it is made sure that nothing was lost on the way.
const QUIET: Duration = Duration::from_secs(2);

/// How long a message that the server has sent may be on its way to us.
const ON_THE_WAY: Duration = Duration::from_millis(500);

/// By how much the server's clock may be ahead of what it says of its messages: a message has its time before it is on disk, and
/// is counted after that.
const MARGIN: TimeDelta = TimeDelta::seconds(5);

/// What the server says of a consumer.
#[derive(Deserialize)]
struct State {
    delivered: Delivered,
    num_pending: u64,
    ts: DateTime<Utc>,
}

#[derive(Deserialize)]
struct Delivered {
    consumer_seq: u64,
}

pub struct Reader<'a> {
    pub sink: &'a Sink,
    pub shard: Shard,
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
    /// Where it has waited.
    pub parked: Option<i64>,
    /// Given back when it is written.
    _room: Option<OwnedSemaphorePermit>,
}

impl Received {
    pub fn origin(&self) -> Origin<'_> {
        Origin { tenant: &self.tenant, source: &self.source }
    }

    /// The entry in quarantine that this record is all of.
    pub fn entry_of(&self, item: &Item) -> Option<Uuid> {
        let shares = |other: &&Item| other.replay_of == item.replay_of;
        item.replay_of.filter(|_| self.items.iter().filter(shares).nth(1).is_none())
    }
}

/// One record of a message, or a message that could not be read.
pub struct Item {
    /// Its place in the message, or in the request.
    pub index: usize,
    pub payload: Bytes,
    /// When it came first.
    pub came_at: DateTime<Utc>,
    /// The user that its sender was bound to.
    pub user: Option<String>,
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
        let (mut delivered, mut patience) = (0, QUIET);
        loop {
            let Ok(message) = timeout(patience, messages.next()).await else {
                // What was on the wire when a connection broke counts as delivered, and nobody sends it again.
                let state = self.state(&consumer.cached_info().name).await?;
                match (state.delivered.consumer_seq == delivered, patience) {
                    (true, _) => patience = QUIET,
                    // It may have been sent while we asked.
                    (false, QUIET) => {
                        patience = ON_THE_WAY;
                        continue;
                    }
                    (false, _) => return Err("messages were lost on the way".into()),
                }
                if state.num_pending == 0 && batches.send(self.nothing_until(last, state.ts - MARGIN)).await.is_err() {
                    return Ok(());
                }
                continue;
            };
            let message = message.ok_or("the stream's messages ended")??;
            let count = message.info()?.consumer_sequence;
            let message = Incoming::delivered(message)?;
            if count != delivered + 1 || message.sequence <= last {
                return Err(format!("message {} came out of order", message.sequence).into());
            }
            (last, delivered, patience) = (message.sequence, count, QUIET);
            let bytes = message.payload.len();
            let mut received = self.receive(message).await?;
            let cost = (bytes / 1024 + received.items.len()).clamp(1, ROOM) as u32;
            received._room = Some(self.room.clone().acquire_many_owned(cost).await?);
            if batches.send(received).await.is_err() {
                return Ok(());
            }
        }
    }

    /// How far the server has got with us, by its own clock, which is also that of the messages.
    async fn state(&self, consumer: &str) -> Result<State, async_nats::Error> {
        let subject = format!("CONSUMER.INFO.{}.{consumer}", self.sink.stream);
        Ok(self.sink.jetstream.request(subject, &json!({})).await?)
    }

    /// Nothing came until then: that too is worth writing down, for those who read the feed.
    fn nothing_until(&self, last: u64, at: DateTime<Utc>) -> Received {
        Received {
            sequence: last as i64,
            at,
            tenant: String::new(),
            source: String::new(),
            user: None,
            verdict: None,
            items: Vec::new(),
            parked: None,
            _room: None,
        }
    }

    /// Takes a message apart.
    pub async fn receive(&self, message: Incoming) -> Result<Received, async_nats::Error> {
        let Incoming { subject, labels, payload, sequence, at } = message;
        let mut tokens = subject.split('.').skip(self.shard.tokens_before_tenant());
        let mut token = || tokens.next().unwrap_or_default();
        let (tenant, source) = (token(), token());
        let origin = Origin { tenant, source };
        let refused = (labels.broken)
            .then(|| record::invalid("the message's headers can't be read"))
            .or_else(|| unsafe_origin(origin, labels.message_id.as_deref(), labels.user.as_deref()));
        let items = match labels.replays && refused.is_none() {
            true => self.replayed(origin, &payload, at).await?,
            false => {
                let encoding = Encoding::of(labels.content_type.as_deref());
                self.items(origin, labels.user.as_deref(), encoding, &payload, at, refused).await?
            }
        };
        Ok(Received {
            sequence: sequence as i64,
            at,
            // Whatever stands in a subject, the tables can keep what is left.
            tenant: record::cut(tenant),
            source: record::cut(source),
            user: labels.user.as_deref().map(record::cut),
            verdict: labels.verdict,
            items,
            parked: None,
            _room: None,
        })
    }

    /// A record that has waited, as it came.
    pub async fn unpark(&self, released: Released, position: i64) -> Result<Received, async_nats::Error> {
        let Released { tenant_id: tenant, source_id: source, came_at, user_id: user, .. } = released;
        let origin = Origin { tenant: &tenant, source: &source };
        let payload = Bytes::from(released.payload);
        let mut items = self.items(origin, user.as_deref(), Encoding::Json, &payload, came_at, None).await?;
        items.iter_mut().for_each(|item| item.replay_of = released.replay_of);
        Ok(Received {
            sequence: position,
            at: released.arrived_at,
            tenant,
            source,
            user,
            verdict: None,
            items,
            parked: Some(released.position),
            _room: None,
        })
    }

    /// A message that is not taken apart: we have failed at it before.
    pub fn set_aside(&self, message: Incoming, error: Error) -> Received {
        let Incoming { subject, payload, sequence, at, .. } = message;
        let mut tokens = subject.split('.').skip(self.shard.tokens_before_tenant()).map(record::cut);
        let (tenant, source) = (tokens.next().unwrap_or_default(), tokens.next().unwrap_or_default());
        let items = whole(&payload, at, error);
        Received {
            sequence: sequence as i64,
            at,
            tenant,
            source,
            user: None,
            verdict: None,
            items,
            parked: None,
            _room: None,
        }
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
        let json = match record::as_json(encoding, payload) {
            Ok(json) => json,
            Err(error) => return Ok(whole(payload, came_at, error)),
        };
        let raws = match record::split(&json) {
            Ok(raws) => raws,
            Err(error) => return Ok(whole(payload, came_at, error)),
        };
        let limits = self.sink.limits.of(origin.tenant, origin.source);
        let read = |raw: &RawValue| match &refused {
            Some(error) => Err(error.share()),
            None => record::read(raw.get(), origin, user, limits.max_record_bytes()),
        };
        let records: Vec<Result<Record>> = raws.iter().map(|raw| read(raw)).collect();
        let types = self.types_of(&records).await?;
        let examine = |raw: &RawValue, record: Result<Record>| {
            let record = match record {
                Ok(record) => record,
                Err(error) => return Read::Unreadable { idempotency_key: record::idempotency_key(raw.get()), error },
            };
            let of_type = match types.get(&record.usage_type) {
                Some(Ok(of_type)) => of_type.clone(),
                Some(Err(error)) => return Read::Unfit(record, error.share()),
                None => None,
            };
            let checked = rules::check(&record, raw.get(), origin.source, came_at, of_type.as_deref(), &limits);
            let checked =
                checked.and_then(|()| of_type.ok_or_else(|| Error::internal("a type that is not there was checked")));
            match checked {
                Ok(of_type) => Read::Sound(record, of_type),
                Err(error) => Read::Unfit(record, error),
            }
        };
        let item = |(index, (raw, record)): (usize, (&&RawValue, Result<Record>))| Item {
            index,
            payload: json.slice_ref(raw.get().as_bytes()),
            came_at,
            user: user.map(str::to_owned),
            replay_of: None,
            read: examine(raw, record),
        };
        Ok(raws.iter().zip(records).enumerate().map(item).collect())
    }

    /// The types of these records, each looked up once. One that is not known may have been registered a moment ago.
    async fn types_of(
        &self,
        records: &[Result<Record>],
    ) -> Result<HashMap<String, Result<Option<Arc<Type>>>>, async_nats::Error> {
        let types = &self.sink.types;
        let names: HashSet<&str> = records.iter().flatten().map(|record| record.usage_type.as_str()).collect();
        if names.iter().any(|name| matches!(types.known(name), Ok(None))) {
            types.catch_up().await?;
        }
        Ok(names.into_iter().map(|name| (name.to_owned(), types.known(name))).collect())
    }

    /// What is asked for from quarantine: entries of this tenant and source, as of the time that they first came.
    async fn replayed(
        &self,
        origin: Origin<'_>,
        payload: &Bytes,
        at: DateTime<Utc>,
    ) -> Result<Vec<Item>, async_nats::Error> {
        let mut asked: Vec<quarantine::Entry> = match serde_json::from_slice(payload) {
            Ok(asked) => asked,
            Err(_) => {
                let problem = format!("{REPLAY_HEADER}: a message with this header lists entries of quarantine");
                return Ok(whole(payload, at, record::invalid(problem)));
            }
        };
        asked.truncate(quarantine::MOST_ENTRIES);
        let ids: Vec<Uuid> = asked.iter().map(|entry| entry.id).collect();
        let waiting = store::waiting(&self.sink.database, origin, &ids, quarantine::MOST_BYTES).await?;
        let mut items = Vec::new();
        for waiting in waiting {
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

/// A message that is refused as it is.
fn whole(payload: &Bytes, came_at: DateTime<Utc>, error: Error) -> Vec<Item> {
    let read = Read::Unreadable { idempotency_key: None, error };
    vec![Item { index: 0, payload: payload.clone(), came_at, user: None, replay_of: None, read }]
}

/// Why nothing can be taken from there, whatever the message says. Message ids are the whole stream's, so one that is not
/// under its own tenant and source could swallow a stranger's.
fn unsafe_origin(origin: Origin<'_>, message_id: Option<&str>, user: Option<&str>) -> Option<Error> {
    let Origin { tenant, source } = origin;
    if tenant.parse::<Name>().is_err() || source.parse::<Name>().is_err() {
        return Some(record::invalid("tenant and source must be 1 to 255 letters, digits, '_' or '-'"));
    }
    if let Some(Err(error)) = user.map(|user| Context::check_text(Context::USER_HEADER, user)) {
        return Some(record::invalid(error.message));
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
        let code = |id: &str| unsafe_origin(origin, Some(id), None).map(|error| error.code);
        assert_eq!(
            (unsafe_origin(origin, None, Some("ann")).map(|error| error.code), code("acme.api.1")),
            (None, None)
        );
        for id in ["", "1", "acme.api", "acme.api.", "acme.apis.1", "acme.1", "acme2.api.1"] {
            assert_eq!(code(id), Some(Code::UnsafeMessageId), "{id}");
        }
        let strange = Origin { tenant: "ä", source: "api" };
        assert_eq!(unsafe_origin(strange, None, None).map(|error| error.code), Some(Code::ValidationError));
        assert_eq!(unsafe_origin(origin, None, Some("a\0b")).map(|error| error.code), Some(Code::ValidationError));
    }
}
