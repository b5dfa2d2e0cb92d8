//! Idempotent requests: the same request gets its first answer again.
//!
//! The record of an answer is created, never overwritten, before the answer leaves. Who finds a record answers with it;
//! whatever he took for himself is skipped.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use tokio::time::Instant;

use crate::{
    api::{Call, IdempotencyKey, Info, Name, Operation},
    error::{Code, Error, Result},
    hex,
    jetstream::{Bucket, Write},
};

/// How long an answer is offered for recording: a change of the leader takes that long.
const SETTLE: Duration = Duration::from_secs(5);

/// One request that may be repeated: where its record stands, and what was asked.
#[derive(Debug, Clone)]
pub struct Once {
    key: String,
    asked: String,
    window: Duration,
}

/// What was asked under the key, and what was answered.
#[derive(Debug, Serialize, Deserialize)]
struct Record<A> {
    asked: String,
    answer: A,
}

impl Once {
    /// What makes a call repeatable, if its caller named it.
    pub fn of<O>(call: &Call<O>, window: Duration) -> Result<Option<Self>>
    where
        O: Operation<Target = Name, Request: Serialize>,
    {
        let Some(key) = &call.context.idempotency_key else { return Ok(None) };
        Self::new(&O::INFO, &call.target, key, &call.request, window).map(Some)
    }

    /// The same key for another operation, or for another target, is another request.
    pub fn new(
        operation: &Info,
        target: &Name,
        key: &IdempotencyKey,
        request: &impl Serialize,
        window: Duration,
    ) -> Result<Self> {
        // The caller's key may have any characters and a key of the bucket may not, hence the hash.
        let mut hash = Sha256::new();
        for part in [operation.name().as_str(), target.as_str(), key.as_str()] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let bucket_key = format!("once.{}", hex::encode(&hash.finalize()));
        let asked = serde_json::to_string(request).map_err(Error::internal)?;
        Ok(Self { key: bucket_key, asked, window })
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Whether two requests under the same key ask the same.
    pub(super) fn asks_the_same(&self, other: &Self) -> bool {
        self.asked == other.asked
    }

    /// The answer that was given before, if there was one. Another request under the same key is a conflict.
    pub async fn find<A: DeserializeOwned>(&self, bucket: &Bucket) -> Result<Option<A>> {
        let Some(entry) = bucket.read(&self.key).await? else { return Ok(None) };
        self.read(&entry.value).map(Some)
    }

    pub(super) fn read<A: DeserializeOwned>(&self, record: &[u8]) -> Result<A> {
        let record: Record<serde_json::Value> = serde_json::from_slice(record).map_err(Error::internal)?;
        if record.asked != self.asked {
            return Err(other_parameters());
        }
        serde_json::from_value(record.answer).map_err(Error::internal)
    }

    /// The record to be created together with the answer.
    pub(super) fn record(&self, answer: &impl Serialize) -> Result<Write> {
        let record = Record { asked: self.asked.clone(), answer };
        let value = Bytes::from(serde_json::to_vec(&record).map_err(Error::internal)?);
        Ok(Write { expected: Some(0), ttl: Some(self.window), ..Write::to(self.key.clone(), value) })
    }

    /// Creates the record of an answer that is ours to give, or returns the one that was given first. Whoever wrote the
    /// record, it decides; until there is one, the same record is offered again.
    pub async fn settle<A: Serialize + DeserializeOwned>(&self, bucket: &Bucket, answer: A) -> Result<A> {
        let record = self.record(&answer)?;
        let deadline = Instant::now() + SETTLE;
        loop {
            let source = match bucket.write(std::slice::from_ref(&record)).await {
                Ok(_) => return Ok(answer),
                Err(error) => error,
            };
            match self.find(bucket).await {
                Ok(Some(given)) => return Ok(given),
                Err(error) if error.code != Code::Unavailable => return Err(error),
                _ if Instant::now() >= deadline => return Err(undecided().source(source)),
                _ => tokio::time::sleep(Duration::from_millis(rand::random_range(10..50))).await,
            }
        }
    }
}

/// Whoever asks again with the same key gets the truth.
fn undecided() -> Error {
    Error::unavailable("the answer could not be recorded; ask again with the same Idempotency-Key")
}

pub(super) fn other_parameters() -> Error {
    let problem = "this key was used for a request with other parameters";
    Error::field_as(Code::Conflict, IdempotencyKey::HEADER, problem)
}
