//! Atomic batches (ADR-50): several messages of one stream, stored all or none, with one sync. The client library has
//! no publisher for them yet.

use async_nats::{Client, HeaderMap, header};
use bytes::Bytes;
use tokio::time::timeout;
use uuid::Uuid;

use super::publish::{ATTEMPT, Ack, Message, PublishError, acknowledged, ask};

/// What the server takes in one batch.
const MOST_MESSAGES: usize = 1000;

/// Publishes the messages as one batch: all are stored or none. The ack has the sequence of the last one; the others come
/// directly before. One attempt; an error says what is known of the whole batch.
///
/// # Panics
/// On an empty batch, or one with more than the server's 1,000 messages.
pub async fn publish_batch(client: &Client, messages: &[Message]) -> Result<Ack, PublishError> {
    assert!(messages.len() <= MOST_MESSAGES, "a batch has at most {MOST_MESSAGES} messages, not {}", messages.len());
    let (first, others) = messages.split_first().expect("a batch has at least one message");
    let (id, mut size) = (Uuid::new_v4().simple().to_string(), 0);
    let mut headers = |headers: &HeaderMap| {
        size += 1;
        let mut headers = headers.clone();
        headers.insert(header::NATS_BATCH_ID, id.as_str());
        headers.insert(header::NATS_BATCH_SEQUENCE, size.to_string());
        headers
    };
    // The first one is a request: its empty answer says that the batch is open. Before the commit nothing is stored.
    let (subject, payload) = (first.subject.clone(), first.payload.clone());
    let opened = ask(client, subject.clone(), headers(&first.headers), payload).await.map_err(not_stored)?;
    if !opened.payload.is_empty() {
        return Err(acknowledged(&opened).err().unwrap_or(PublishError::NotStored));
    }
    for message in others {
        let (subject, payload) = (message.subject.clone(), message.payload.clone());
        let sent = client.publish_with_headers(subject, headers(&message.headers), payload);
        if !matches!(timeout(ATTEMPT, sent).await, Ok(Ok(()))) {
            return Err(PublishError::NotStored);
        }
    }
    // The end of the batch, which is no message of its own.
    let mut end = headers(&HeaderMap::new());
    end.insert(header::NATS_BATCH_COMMIT, "eob");
    acknowledged(&ask(client, subject, end, Bytes::new()).await?)
}

fn not_stored(error: PublishError) -> PublishError {
    match error {
        PublishError::Unknown(_) => PublishError::NotStored,
        error => error,
    }
}
