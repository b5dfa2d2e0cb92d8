//! Publishing into streams, with an outcome that says what is known: stored, not stored, or unknown.
//!
//! The client library's own publish hides two things that we need: the second conflict code of replicated streams, and
//! the difference between "not stored" and "nobody knows". So this speaks the protocol itself, which is one request.

use std::time::Duration;

use async_nats::{Client, HeaderMap, client::RequestErrorKind, jetstream, subject::ToSubject};
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::Instant;

use super::request::request_within;

/// How long one attempt waits for its ack.
pub(super) const ATTEMPT: Duration = Duration::from_secs(2);

const WRONG_LAST_SEQUENCE: u64 = 10071;
/// The same on replicated streams, while the leader still has another write of the subject in hand.
const WRONG_LAST_SEQUENCE_IN_FLIGHT: u64 = 10164;
/// The first copy of this message id is still being replicated: ask again.
const DUPLICATE_IN_PROCESS: u64 = 10158;
/// Any reason for which the store takes no more.
const STORE_FAILED: u64 = 10077;

/// A message for a stream.
#[derive(Debug, Clone)]
pub struct Message {
    pub subject: String,
    pub headers: HeaderMap,
    pub payload: Bytes,
}

/// The server's word that the message is stored.
#[derive(Debug, Clone)]
pub struct Ack {
    pub sequence: u64,
}

/// What it looks like. The library's own type tries one shape after the other.
#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "seq")]
    sequence: Option<u64>,
    error: Option<jetstream::Error>,
}

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The server answered no.
    #[error("{description} ({code})")]
    Refused { code: u64, description: String },
    /// It reached no stream.
    #[error("no stream takes the message right now")]
    NotStored,
    /// It may be stored, or may still be.
    #[error("no acknowledgement: {0}")]
    Unknown(String),
}

impl PublishError {
    /// Whether the stream, or the subject in it, has as many messages as it may have.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Refused { code: STORE_FAILED, description } if description.contains("maximum messages"))
    }
}

/// Why a compare-and-set did not answer with a revision.
#[derive(Debug, thiserror::Error)]
pub enum CasError {
    #[error("somebody else was first")]
    Conflict,
    /// A write of the same subject is on its way to the replicas. It may be an earlier copy of this one.
    #[error("another write is under way")]
    UnderWay,
    #[error(transparent)]
    NotStored(PublishError),
    #[error(transparent)]
    Unknown(PublishError),
}

impl From<PublishError> for CasError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Refused { code: WRONG_LAST_SEQUENCE, .. } => Self::Conflict,
            PublishError::Refused { code: WRONG_LAST_SEQUENCE_IN_FLIGHT, .. } => Self::UnderWay,
            PublishError::Refused { .. } | PublishError::NotStored => Self::NotStored(error),
            PublishError::Unknown(_) => Self::Unknown(error),
        }
    }
}

/// Publishes one message in one attempt: what a lost answer means is for the caller to find out.
pub async fn publish_once(client: &Client, message: Message) -> Result<Ack, PublishError> {
    acknowledged(&ask(client, message.subject, message.headers, message.payload).await?)
}

/// Publishes one message that has a message id, again and again until it is stored or the time is over: across timeouts,
/// lost connections and changes of the leader. The id makes the repeats harmless.
pub async fn publish(client: &Client, message: &Message, limit: Duration) -> Result<Ack, PublishError> {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_millis(50);
    let mut in_doubt = None;
    loop {
        let error = match publish_once(client, message.clone()).await {
            Ok(ack) => return Ok(ack),
            Err(PublishError::Refused { code: DUPLICATE_IN_PROCESS, description }) => {
                PublishError::Unknown(description)
            }
            Err(error @ PublishError::Refused { .. }) => return Err(error),
            Err(error) => error,
        };
        // What may once have been stored may be stored, whatever comes later.
        let error = match error {
            PublishError::Unknown(problem) => PublishError::Unknown(in_doubt.insert(problem).clone()),
            error => in_doubt.clone().map_or(error, PublishError::Unknown),
        };
        let jittered = pause.mul_f64(rand::random_range(0.5..1.0));
        if Instant::now() + jittered >= deadline {
            return Err(error);
        }
        tokio::time::sleep(jittered).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

/// Sends one message and waits for the stream's answer.
pub(super) async fn ask(
    client: &Client,
    subject: impl ToSubject,
    headers: HeaderMap,
    payload: Bytes,
) -> Result<async_nats::Message, PublishError> {
    request_within(ATTEMPT, client, subject, headers, payload).await.map_err(|error| match error.kind() {
        RequestErrorKind::NoResponders => PublishError::NotStored,
        RequestErrorKind::InvalidSubject | RequestErrorKind::MaxPayloadExceeded => {
            PublishError::Refused { code: 0, description: error.to_string() }
        }
        RequestErrorKind::TimedOut | RequestErrorKind::Other => PublishError::Unknown(error.to_string()),
    })
}

/// What the stream's answer says.
pub(super) fn acknowledged(message: &async_nats::Message) -> Result<Ack, PublishError> {
    match serde_json::from_slice(&message.payload) {
        Ok(Answer { error: Some(error), .. }) => {
            Err(PublishError::Refused { code: error.error_code().0, description: error.to_string() })
        }
        Ok(Answer { sequence: Some(sequence), .. }) => Ok(Ack { sequence }),
        Ok(_) => Err(PublishError::Unknown("the answer has neither a sequence nor an error".to_owned())),
        Err(error) => Err(PublishError::Unknown(format!("the answer is no acknowledgement: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_decided_is_a_conflict() {
        let refused = |code| CasError::from(PublishError::Refused { code, description: String::new() });
        assert!(matches!(refused(10071), CasError::Conflict));
        assert!(matches!(refused(10164), CasError::UnderWay));
        assert!(matches!(refused(10077), CasError::NotStored(_)));
        assert!(matches!(PublishError::NotStored.into(), CasError::NotStored(_)));
        assert!(matches!(PublishError::Unknown(String::new()).into(), CasError::Unknown(_)));
    }
}
