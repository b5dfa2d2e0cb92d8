//! A log per caller of when he asked lately, in which at most so many entries stand: an exact limit in any window of time.
//!
//! The log is a stream, so all instances share it, and the server itself refuses the entry that is one too many. An entry
//! leaves when it is older than the window. The server takes up to 260 ms longer for that, so whoever is refused looks at
//! the oldest entry, which he needs for telling when to come back anyway, and removes it if its time is over.

use std::time::Duration;

use async_nats::{HeaderMap, jetstream};
use bytes::Bytes;
use chrono::TimeDelta;

use crate::{
    clock::Clock,
    error::{Error, Result},
    jetstream::{Message, publish_once, stored},
};

/// How often room is looked for.
const TURNS: usize = 20;

pub struct SlidingLog {
    pub jetstream: jetstream::Context,
    pub stream: String,
    /// What stands before the caller in a subject of the stream.
    pub subject: String,
    pub window: Duration,
    pub clock: Clock,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Admitted,
    /// There is room again after this time.
    Refused(Duration),
}

impl SlidingLog {
    /// Makes an entry for a caller, if there is room. Costs one round trip, unless there is none.
    pub async fn admit(&self, caller: &str) -> Result<Admission> {
        let subject = format!("{}.{caller}", self.subject);
        let entry = Message { subject: subject.clone(), headers: HeaderMap::new(), payload: Bytes::new() };
        // Each turn but the last removes an old entry, or finds that somebody else did.
        for _ in 0..TURNS {
            match publish_once(&self.jetstream.client(), entry.clone()).await {
                Ok(_) => return Ok(Admission::Admitted),
                Err(error) if error.is_full() => {
                    if let Some(wait) = self.until_room(&subject).await? {
                        return Ok(Admission::Refused(wait));
                    }
                }
                Err(error) => return Err(unavailable(error.into())),
            }
        }
        Err(unavailable("old entries are not removed".into()))
    }

    /// How long until the oldest entry leaves. None if it has left.
    async fn until_room(&self, subject: &str) -> Result<Option<Duration>> {
        let stream =
            self.jetstream.get_stream_no_info(&self.stream).await.map_err(|error| unavailable(error.into()))?;
        let read = stored::if_any(stream.get_first_raw_message_by_subject(subject, 1).await);
        let Some(oldest) = read.map_err(|error| unavailable(error.into()))? else { return Ok(None) };
        // Clocks may differ: no entry is younger than new.
        let age = (self.clock.now() - stored::time(oldest.time)).max(TimeDelta::zero()).to_std().unwrap_or_default();
        match self.window.checked_sub(age) {
            Some(left) if !left.is_zero() => Ok(Some(left.max(Duration::from_millis(1)))),
            _ => {
                // If somebody else was first it is gone, which is all that we want.
                if let Err(error) = stream.delete_message(oldest.sequence).await {
                    tracing::debug!(%error, "an old entry was not removed");
                }
                Ok(None)
            }
        }
    }
}

fn unavailable(error: async_nats::Error) -> Error {
    Error::unavailable("the rate limit can't be looked at").source(error)
}
