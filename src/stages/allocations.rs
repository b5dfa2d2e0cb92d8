//! The stream of stages: a message is a stage, its sequence number the stage's id, its message id the request that it is for.

use std::sync::Arc;

use async_nats::{HeaderMap, header, jetstream};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    api::Name,
    error::{Error, Result},
    jetstream::{Message, stored},
};

/// Cheap to clone.
#[derive(Clone)]
pub struct Allocations {
    jetstream: jetstream::Context,
    stream: String,
    subject: String,
    instance: Arc<str>,
}

/// What is known of a stage.
#[derive(Debug, Clone)]
pub struct Allocation {
    pub request_id: String,
    pub at: DateTime<Utc>,
    pub nonce: Uuid,
}

/// What stands in the stream. The nonce tells whether a message that is there already is our own.
#[derive(Serialize, Deserialize)]
struct Stored {
    by: Arc<str>,
    nonce: Uuid,
    /// A number that was passed over: no stage.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    skipped: bool,
}

impl Allocations {
    pub fn new(jetstream: jetstream::Context, prefix: &Name, instance: Arc<str>) -> Self {
        let (stream, subject) = (format!("{prefix}_STAGES"), format!("{prefix}_stages.allocated"));
        Self { jetstream, stream, subject, instance }
    }

    pub fn client(&self) -> async_nats::Client {
        self.jetstream.client()
    }

    /// The message that allocates a stage for a request.
    pub fn message(&self, request: Uuid, nonce: Uuid) -> Message {
        let stored = Stored { by: self.instance.clone(), nonce, skipped: false };
        let payload = serde_json::to_vec(&stored).expect("text and a UUID are JSON");
        Message::with_id(self.subject.clone(), &request.to_string(), payload)
    }

    /// A message that takes a number away.
    pub fn filler(&self) -> Message {
        let stored = Stored { by: self.instance.clone(), nonce: Uuid::nil(), skipped: true };
        let payload = serde_json::to_vec(&stored).expect("text and a UUID are JSON").into();
        Message { subject: self.subject.clone(), headers: HeaderMap::new(), payload }
    }

    /// The first and the last number that were given.
    pub async fn bounds(&self) -> Result<(i64, i64)> {
        let unreadable = |error: async_nats::Error| Error::unavailable("the stages can't be read").source(error);
        let stream = self.jetstream.get_stream(&self.stream).await.map_err(|error| unreadable(error.into()))?;
        let state = &stream.cached_info().state;
        Ok((state.first_sequence as i64, state.last_sequence as i64))
    }

    /// What is known of a stage, if there is one with this id.
    pub async fn find(&self, stage: i32) -> Result<Option<Allocation>> {
        let unreadable = |error: async_nats::Error| Error::unavailable("the stages can't be read").source(error);
        let stream = self.jetstream.get_stream_no_info(&self.stream).await.map_err(|error| unreadable(error.into()))?;
        let read = stored::if_any(stream.get_raw_message(stage as u64).await);
        let Some(message) = read.map_err(|error| unreadable(error.into()))? else { return Ok(None) };
        let Stored { nonce, skipped, .. } = serde_json::from_slice(&message.payload).map_err(Error::internal)?;
        if skipped {
            return Ok(None);
        }
        Ok(Some(Allocation {
            request_id: message.headers.get(header::NATS_MESSAGE_ID).map(ToString::to_string).unwrap_or_default(),
            at: stored::time(message.time),
            nonce,
        }))
    }
}
