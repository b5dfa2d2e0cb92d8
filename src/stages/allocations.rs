//! The stream of stages: a message is a stage, its sequence number the stage's id, its message id the request that it is for.
//!
//! Callers that wait at the same time share one atomic batch, and so one synced write. The server stores a batch or refuses
//! it whole; when it refuses, because one of the requests is a repeat, or when nobody knows what became of it, every request
//! is published by itself until it is decided. Nothing is burnt by that: a request that is stored already is found again.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_nats::{
    header,
    jetstream::{self, stream::RawMessageErrorKind},
};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::{
    api::{Name, stages::LAST_STAGE},
    error::{Code, Error, Result},
    jetstream::{
        Ack, DUPLICATE_IN_PROCESS, Message, PublishError, TOO_MANY_MESSAGES, publish, publish_batch, publish_once,
    },
};

/// Requests that share one batch. The server takes 1,000 messages.
const GROUP: usize = 1000;

/// Requests that may wait before callers have to.
const QUEUE: usize = 4096;

/// Cheap to clone.
#[derive(Clone)]
pub struct Allocations {
    jetstream: jetstream::Context,
    stream: String,
    subject: String,
    instance: Arc<str>,
    deadline: Duration,
}

/// Takes requests for stages, and answers each when it is on disk.
pub struct Allocator(mpsc::Sender<Waiting>);

/// What a request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Given {
    pub stage: i32,
    /// The request was answered before, or somebody else's twin of it is answered now.
    pub repeated: bool,
}

/// What is known of a stage.
#[derive(Debug, Clone)]
pub struct Allocation {
    pub request_id: String,
    pub at: DateTime<Utc>,
    nonce: Uuid,
}

struct Waiting {
    request: Uuid,
    reply: oneshot::Sender<Result<Given>>,
}

/// What stands in the stream. The nonce tells whether a message that is there already is our own.
#[derive(Serialize, Deserialize)]
struct Stored {
    by: Arc<str>,
    nonce: Uuid,
}

/// One request and all who wait for it.
struct Asked {
    request: Uuid,
    nonce: Uuid,
    message: Message,
    waiting: Vec<oneshot::Sender<Result<Given>>>,
}

impl Allocations {
    pub fn new(jetstream: jetstream::Context, prefix: &Name, instance: Arc<str>, deadline: Duration) -> Self {
        let (stream, subject) = (format!("{prefix}_STAGES"), format!("{prefix}_stages.allocated"));
        Self { jetstream, stream, subject, instance, deadline }
    }

    /// What is known of a stage, if there is one with this id.
    pub async fn find(&self, stage: i32) -> Result<Option<Allocation>> {
        let unreadable = |error: async_nats::Error| Error::unavailable("the stages can't be read").source(error);
        let stream = self.jetstream.get_stream_no_info(&self.stream).await.map_err(|error| unreadable(error.into()))?;
        let message = match stream.get_raw_message(stage as u64).await {
            Ok(message) => message,
            Err(error) if matches!(error.kind(), RawMessageErrorKind::NoMessageFound) => return Ok(None),
            Err(error) => return Err(unreadable(error.into())),
        };
        let stored: Stored = serde_json::from_slice(&message.payload).map_err(Error::internal)?;
        Ok(Some(Allocation {
            request_id: message.headers.get(header::NATS_MESSAGE_ID).map(ToString::to_string).unwrap_or_default(),
            at: DateTime::from_timestamp_nanos(message.time.unix_timestamp_nanos() as i64),
            nonce: stored.nonce,
        }))
    }

    /// Starts to take requests.
    pub fn start(self) -> Allocator {
        let (sender, mut waiting) = mpsc::channel(QUEUE);
        tokio::spawn(async move {
            let mut group = Vec::new();
            while waiting.recv_many(&mut group, GROUP).await > 0 {
                let asked = self.merge(group.drain(..));
                metrics::histogram!("tidemark_stage_group_size").record(asked.len() as f64);
                if let Err(undecided) = self.together(asked).await {
                    let this = self.clone();
                    // What takes its time must not hold up others.
                    tokio::spawn(async move { this.one_by_one(undecided).await });
                }
            }
        });
        Allocator(sender)
    }

    /// A batch may have each message id once.
    fn merge(&self, group: impl Iterator<Item = Waiting>) -> Vec<Asked> {
        let mut all: Vec<Asked> = Vec::new();
        let mut places = HashMap::new();
        for Waiting { request, reply } in group {
            let place = *places.entry(request).or_insert(all.len());
            match all.get_mut(place) {
                Some(twin) => twin.waiting.push(reply),
                None => all.push(self.ask(request, reply)),
            }
        }
        all
    }

    fn ask(&self, request: Uuid, reply: oneshot::Sender<Result<Given>>) -> Asked {
        let nonce = Uuid::new_v4();
        let stored = Stored { by: self.instance.clone(), nonce };
        let payload = serde_json::to_vec(&stored).map(Bytes::from).unwrap_or_default();
        let message = Message::with_id(self.subject.clone(), &request.to_string(), payload);
        Asked { request, nonce, message, waiting: vec![reply] }
    }

    /// One attempt with one write for all. Gives back what is not decided by it.
    async fn together(&self, asked: Vec<Asked>) -> Result<(), Vec<Asked>> {
        let client = self.jetstream.client();
        let stored = match &asked[..] {
            [one] => publish_once(&client, one.message.clone()).await,
            many => {
                let messages: Vec<Message> = many.iter().map(|asked| asked.message.clone()).collect();
                publish_batch(&client, &messages).await
            }
        };
        match stored {
            Ok(Ack { sequence, duplicate }) => {
                let first = sequence + 1 - asked.len() as u64;
                asked.into_iter().zip(first..).for_each(|(asked, sequence)| asked.succeed(sequence, duplicate));
                Ok(())
            }
            Err(error) => {
                tracing::debug!(%error, requests = asked.len(), "stages are asked for one by one");
                Err(asked)
            }
        }
    }

    async fn one_by_one(&self, asked: Vec<Asked>) {
        join_all(asked.into_iter().map(async |asked| match self.settle(&asked).await {
            Ok((sequence, repeated)) => asked.succeed(sequence, repeated),
            Err(error) => asked.fail(&error),
        }))
        .await;
    }

    /// The sequence of a request's message, and whether it was there before we came.
    async fn settle(&self, asked: &Asked) -> Result<(u64, bool)> {
        let client = self.jetstream.client();
        let Ack { sequence, duplicate } = publish(&client, &asked.message, self.deadline).await.map_err(undecided)?;
        // What we found there may be our own, of an attempt whose answer was lost.
        let is_ours =
            async || Ok::<_, Error>(self.find(stage(sequence)?).await?.is_some_and(|found| found.nonce == asked.nonce));
        Ok((sequence, duplicate && !is_ours().await?))
    }
}

impl Allocator {
    /// The stage of a request: a new one, or the one that it got before.
    pub async fn allocate(&self, request: Uuid) -> Result<Given> {
        let (reply, answer) = oneshot::channel();
        let stopped = || Error::unavailable("the request was not answered; ask again with the same request id");
        self.0.send(Waiting { request, reply }).await.map_err(|_| stopped())?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }
}

impl Asked {
    /// Only the first who waits made the stage.
    fn succeed(self, sequence: u64, repeated: bool) {
        for (place, waiting) in self.waiting.into_iter().enumerate() {
            let given = stage(sequence).map(|stage| Given { stage, repeated: repeated || place > 0 });
            // A caller that went away wants no answer.
            let _ = waiting.send(given);
        }
    }

    fn fail(self, error: &Error) {
        tracing::warn!(request_id = %self.request, %error, "no stage was given");
        for waiting in self.waiting {
            let _ = waiting.send(Err(error.share()));
        }
    }
}

/// The server stops at the last one; this holds even if its stream was tampered with.
fn stage(sequence: u64) -> Result<i32> {
    i32::try_from(sequence).map_err(|_| exhausted())
}

fn exhausted() -> Error {
    Error::new(Code::Exhausted, format!("no stage ids are left: the last one, {LAST_STAGE}, was given"))
}

/// What a caller is told whose request could not be decided in time.
fn undecided(error: PublishError) -> Error {
    match error {
        PublishError::Refused { code: TOO_MANY_MESSAGES, .. } => exhausted(),
        // It may be stored, or be on its way: the same request id finds out.
        PublishError::Unknown(_) | PublishError::Refused { code: DUPLICATE_IN_PROCESS, .. } => {
            let text = "Another request with the same X-Request-ID is being processed. Please retry shortly.";
            Error::new(Code::Conflict, text).source(error)
        }
        error => Error::unavailable("stage ids can't be given right now").source(error),
    }
}
