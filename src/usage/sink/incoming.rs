//! A message as it stands in the stream, and the two ways to get it.

use async_nats::{HeaderMap, jetstream};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::json;

use crate::{
    api::Context,
    client::CONTENT_TYPE,
    usage::{quarantine, verdicts},
};

pub struct Incoming {
    pub subject: String,
    pub labels: Labels,
    pub payload: Bytes,
    pub sequence: u64,
    pub at: DateTime<Utc>,
}

/// What its headers say. HTTP has taught people that letter case does not matter.
#[derive(Debug, Default, PartialEq)]
pub struct Labels {
    pub content_type: Option<String>,
    pub message_id: Option<String>,
    pub user: Option<String>,
    pub verdict: Option<String>,
    pub replays: bool,
    /// Something stands there that is no header.
    pub broken: bool,
}

impl Labels {
    pub fn of(headers: Option<&HeaderMap>) -> Self {
        let mut labels = Self::default();
        for (name, values) in headers.into_iter().flat_map(HeaderMap::iter) {
            if let Some(value) = values.first() {
                labels.take(name.as_ref(), value.as_str());
            }
        }
        labels
    }

    /// From a block of headers that may be anything.
    fn of_block(block: &[u8]) -> Self {
        let mut labels = Self::default();
        for line in block.split(|byte| *byte == b'\n').skip(1) {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            match std::str::from_utf8(line).ok().and_then(|line| line.split_once(':')) {
                Some((name, value)) => labels.take(name.trim(), value.trim()),
                None => labels.broken |= !line.is_empty(),
            }
        }
        labels
    }

    fn take(&mut self, name: &str, value: &str) {
        for (known, label) in [
            (CONTENT_TYPE, &mut self.content_type),
            (MESSAGE_ID, &mut self.message_id),
            (Context::USER_HEADER, &mut self.user),
            (verdicts::HEADER, &mut self.verdict),
        ] {
            if name.eq_ignore_ascii_case(known) {
                *label = Some(value.to_owned());
            }
        }
        self.replays |= name.eq_ignore_ascii_case(quarantine::REPLAY_HEADER);
    }
}

const MESSAGE_ID: &str = "Nats-Msg-Id";

impl Incoming {
    /// As a consumer delivers it.
    pub fn delivered(message: jetstream::Message) -> Result<Self, async_nats::Error> {
        let info = message.info()?;
        let (sequence, published) = (info.stream_sequence, info.published.unix_timestamp_nanos());
        let at = DateTime::from_timestamp_nanos(published.try_into().unwrap_or_default());
        let labels = Labels::of(message.headers.as_ref());
        let jetstream::Message { message, .. } = message;
        Ok(Self { subject: message.subject.to_string(), labels, payload: message.payload, sequence, at })
    }

    /// The next one from a position on, asked for by itself. It comes inside JSON, so that even one whose headers the
    /// client library would break its connection over can be had.
    pub async fn fetched(
        jetstream: &jetstream::Context,
        stream: &str,
        subjects: &str,
        position: i64,
    ) -> Result<Option<Self>, async_nats::Error> {
        #[derive(Deserialize)]
        struct Answer {
            message: Option<Stored>,
        }
        #[derive(Deserialize)]
        struct Stored {
            subject: String,
            seq: u64,
            time: DateTime<Utc>,
            #[serde(default)]
            hdrs: String,
            #[serde(default)]
            data: String,
        }
        let request = json!({ "seq": position + 1, "next_by_subj": subjects });
        let answer: Answer = jetstream.request(format!("STREAM.MSG.GET.{stream}"), &request).await?;
        let Some(Stored { subject, seq, time, hdrs, data }) = answer.message else { return Ok(None) };
        let labels = Labels::of_block(&BASE64_STANDARD.decode(hdrs)?);
        let payload = BASE64_STANDARD.decode(data)?.into();
        Ok(Some(Self { subject, labels, payload, sequence: seq, at: time }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_whatever_their_case_and_whatever_stands_between_them() {
        let block = b"NATS/1.0\r\ncontent-TYPE: application/msgpack\r\nNats-Msg-Id:a.b.c\r\nX: y\r\n\r\n";
        let labels = Labels::of_block(block);
        assert_eq!(labels.content_type.as_deref(), Some("application/msgpack"));
        assert_eq!((labels.message_id.as_deref(), labels.broken, labels.replays), (Some("a.b.c"), false, false));
        assert!(Labels::of_block(b"NATS/1.0\r\nno colon\r\n\r\n").broken);
        assert!(Labels::of_block(b"NATS/1.0\r\nX: \xff\r\n\r\n").broken);
        assert_eq!(Labels::of_block(b""), Labels::default());
        let mut headers = HeaderMap::new();
        headers.insert("tidemark-replay", "true");
        assert!(Labels::of(Some(&headers)).replays);
    }
}
