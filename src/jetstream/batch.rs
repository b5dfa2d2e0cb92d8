//! Atomic batches (ADR-50): several messages of one stream, stored all or none, with one sync. The client library has
//! no publisher for them yet.

use async_nats::{Client, header};
use tokio::time::timeout;

use super::publish::{ATTEMPT, Ack, Message, PublishError, acknowledged, ask};

/// Publishes the messages as one batch. The ack has the sequence of the last of them; the others come directly before.
/// One attempt. An error says what is known of the whole batch.
///
/// # Panics
/// On an empty batch, or one with more than the server's 1,000 messages.
pub async fn publish_batch(client: &Client, messages: &[Message]) -> Result<Ack, PublishError> {
    assert!(messages.len() <= 1000, "a batch has at most 1,000 messages, not {}", messages.len());
    let (last, before) = messages.split_last().expect("a batch has at least one message");
    let id = uuid::Uuid::new_v4().simple().to_string();
    let headers = |message: &Message, sequence: usize| {
        let mut headers = message.headers.clone();
        headers.insert(header::NATS_BATCH_ID, id.as_str());
        headers.insert(header::NATS_BATCH_SEQUENCE, sequence.to_string());
        headers
    };
    for (index, message) in before.iter().enumerate() {
        let (subject, payload) = (message.subject.clone(), message.payload.clone());
        let headers = headers(message, index + 1);
        // Nothing is stored before the commit, so whatever goes wrong up to it, nothing is.
        if index == 0 {
            // The first one is a request: its empty answer says that the server has opened the batch.
            let opened = ask(client, subject, headers, payload).await.map_err(|error| match error {
                PublishError::Unknown(_) => PublishError::NotStored,
                error => error,
            })?;
            if !opened.payload.is_empty() {
                return Err(acknowledged(&opened).err().unwrap_or(PublishError::NotStored));
            }
        } else {
            let sent = timeout(ATTEMPT, client.publish_with_headers(subject, headers, payload)).await;
            if !matches!(sent, Ok(Ok(()))) {
                return Err(PublishError::NotStored);
            }
        }
    }
    let mut headers = headers(last, messages.len());
    headers.insert(header::NATS_BATCH_COMMIT, "1");
    acknowledged(&ask(client, last.subject.clone(), headers, last.payload.clone()).await?)
}
