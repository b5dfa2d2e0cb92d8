//! Atomic batches (ADR-50): several messages of one stream, stored all or none, with one sync. The client library has
//! no publisher for them yet.

use async_nats::{Client, HeaderMap, Request, header};
use bytes::Bytes;

use super::publish::{ATTEMPT, Ack, PublishError, acknowledged};

/// One message of a batch.
#[derive(Debug, Clone)]
pub struct Message {
    pub subject: String,
    pub headers: HeaderMap,
    pub payload: Bytes,
}

/// Publishes the messages as one batch. The ack has the sequence of the last of them; the others come directly before.
/// One attempt. An error says what is known of the whole batch.
///
/// # Panics
/// On an empty batch, or one with more than the server's 1,000 messages.
pub async fn publish_batch(client: &Client, messages: &[Message]) -> Result<Ack, PublishError> {
    assert!((1..=1000).contains(&messages.len()), "a batch has 1 to 1,000 messages, not {}", messages.len());
    let id = uuid::Uuid::new_v4().simple().to_string();
    let last = messages.len() - 1;
    for (index, message) in messages.iter().enumerate() {
        let mut headers = message.headers.clone();
        headers.insert(header::NATS_BATCH_ID, id.as_str());
        headers.insert(header::NATS_BATCH_SEQUENCE, (index + 1).to_string());
        if index == last {
            headers.insert(header::NATS_BATCH_COMMIT, "1");
            let request = Request::new().headers(headers).payload(message.payload.clone()).timeout(Some(ATTEMPT));
            return acknowledged(client.send_request(message.subject.clone(), request).await);
        }
        if index == 0 {
            // The first one is a request: its empty answer says that the server has opened the batch.
            let request = Request::new().headers(headers).payload(message.payload.clone()).timeout(Some(ATTEMPT));
            let answer = client.send_request(message.subject.clone(), request).await;
            match answer {
                Ok(opened) if opened.payload.is_empty() => {}
                // Nothing is stored before the commit, so whatever went wrong here, nothing is.
                other => {
                    return Err(match acknowledged(other) {
                        Err(error @ PublishError::Refused { .. }) => error,
                        _ => PublishError::NotStored,
                    });
                }
            }
        } else {
            client
                .publish_with_headers(message.subject.clone(), headers, message.payload.clone())
                .await
                .map_err(|_| PublishError::NotStored)?;
        }
    }
    unreachable!("the loop returns with the last message")
}
