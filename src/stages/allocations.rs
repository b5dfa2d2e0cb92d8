//! The log of stages: an entry has the stages of all requests that were served together, and goes on where the one before
//! it ends. Whoever appends has read all that came before, so no request gets a second stage.

use std::sync::Arc;

use async_nats::jetstream;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    api::Name,
    error::{Error, Result},
    jetstream::{Log, LogEntry, Undecided, until_decided},
};

/// Cheap to clone.
#[derive(Clone)]
pub struct Allocations {
    log: Log,
    instance: Arc<str>,
}

/// What is known of a stage.
#[derive(Debug, Clone)]
pub struct Allocation {
    pub request: Uuid,
    pub at: DateTime<Utc>,
}

/// Consecutive stages, of requests that were served together.
#[derive(Debug, Serialize, Deserialize)]
pub struct Run {
    pub first: i32,
    pub requests: Vec<Uuid>,
    /// So many numbers after them are passed over: no stages.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Run {
    /// The number that comes after it.
    pub fn end(&self) -> i64 {
        i64::from(self.first) + self.requests.len() as i64 + i64::from(self.skipped)
    }

    /// Each request with its stage.
    pub fn each(&self) -> impl Iterator<Item = (Uuid, i32)> {
        self.requests.iter().copied().zip(self.first..=i32::MAX)
    }
}

/// A run, and where it stands.
#[derive(Debug)]
pub struct Given {
    pub sequence: u64,
    pub at: DateTime<Utc>,
    pub run: Run,
    nonce: Uuid,
}

/// What an entry says.
#[derive(Serialize, Deserialize)]
struct Stored<R> {
    by: Arc<str>,
    /// Tells whether an entry is our own whose acknowledgement was lost.
    nonce: Uuid,
    #[serde(flatten)]
    run: R,
}

impl Given {
    fn read(LogEntry { sequence, at, payload }: LogEntry) -> Result<Self> {
        let broken = |error| Error::internal(format!("entry {sequence} of the stages is broken: {error}"));
        let Stored { nonce, mut run, .. } = serde_json::from_slice::<Stored<Run>>(&payload).map_err(broken)?;
        // Many are kept, most of them short.
        run.requests.shrink_to_fit();
        Ok(Self { sequence, at, run, nonce })
    }
}

impl Allocations {
    pub fn new(jetstream: jetstream::Context, prefix: &Name, instance: Arc<str>) -> Self {
        let (stream, subject) = (format!("{prefix}_STAGES"), format!("{prefix}_stages.allocated"));
        Self { log: Log::new(jetstream, stream, subject), instance }
    }

    /// Writes a run if it is still true that an entry is the last one. Returns where it stands; none: the other is not the
    /// last any more.
    pub async fn append(&self, after: u64, run: &Run, deadline: Instant) -> Result<Option<u64>, Undecided> {
        let nonce = Uuid::new_v4();
        let stored = Stored { by: self.instance.clone(), nonce, run };
        let payload = Bytes::from(serde_json::to_vec(&stored).expect("text and numbers are JSON"));
        let write = || self.log.append(after, payload.clone());
        // Nothing is ever written over, so ours stands there or nowhere. Where nothing does, one is under way to the replicas.
        let find = async || {
            let there = self.log.at(after + 1).await?.ok_or_else(|| Error::unavailable("it is not known yet"))?;
            let there = Given::read(there)?;
            Ok((there.nonce == nonce).then_some(there.sequence))
        };
        until_decided(deadline, write, find).await
    }

    /// Some of what was given after an entry, and whether there is no more.
    pub async fn read_after(&self, sequence: u64) -> Result<(Vec<Given>, bool)> {
        let page = self.log.read_after(sequence).await?;
        Ok((page.entries.into_iter().map(Given::read).collect::<Result<_>>()?, page.is_last))
    }

    /// The last entry that does not lie beyond something, where all lie beyond it that come after one that does.
    pub async fn last_until(&self, is_beyond: impl Fn(&Given) -> bool) -> Result<Option<Given>> {
        let Some(last) = self.log.last().await?.map(Given::read).transpose()? else { return Ok(None) };
        if !is_beyond(&last) {
            return Ok(Some(last));
        }
        let (mut found, mut before, mut beyond) = (None, 0, last.sequence);
        while before + 1 < beyond {
            let middle = before + (beyond - before) / 2;
            let missing = || Error::internal(format!("entry {middle} of the stages is missing"));
            let given = Given::read(self.log.at(middle).await?.ok_or_else(missing)?)?;
            if is_beyond(&given) {
                beyond = middle;
            } else {
                (found, before) = (Some(given), middle);
            }
        }
        Ok(found)
    }

    /// What is known of a stage, if there is one with this id.
    pub async fn find(&self, stage: i32) -> Result<Option<Allocation>> {
        let Some(Given { at, run, .. }) = self.last_until(|given| given.run.first > stage).await? else {
            return Ok(None);
        };
        let request = run.requests.get((stage - run.first) as usize);
        Ok(request.map(|request| Allocation { request: *request, at }))
    }
}
