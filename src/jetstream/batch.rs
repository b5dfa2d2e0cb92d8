//! Atomic batches (ADR-50): several messages of one stream, stored all or none, with one sync. The client library has
//! no publisher for them yet.

use async_nats::{Client, HeaderMap, header};
use bytes::Bytes;
use tokio::time::timeout;

use super::publish::{ATTEMPT, Ack, Message, PublishError, acknowledged, ask};

/// What the server takes in one batch.
pub const MOST_MESSAGES: usize = 1000;

/// A batch of which the server has the first message. Nothing is stored before the commit, so whatever goes wrong up to it,
/// nothing is.
pub struct Batch<'a> {
    client: &'a Client,
    id: String,
    subject: String,
    size: usize,
}

impl<'a> Batch<'a> {
    /// Opens a batch with its first message, and returns when the server is ready for the others.
    pub async fn open(client: &'a Client, first: Message) -> Result<Self, PublishError> {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let mut batch = Self { client, id, subject: first.subject.clone(), size: 0 };
        let headers = batch.headers(first.headers);
        // It is a request: its empty answer says that the batch is open.
        let opened = ask(client, first.subject, headers, first.payload).await.map_err(not_stored)?;
        match opened.payload.is_empty() {
            true => Ok(batch),
            false => Err(acknowledged(&opened).err().unwrap_or(PublishError::NotStored)),
        }
    }

    /// Adds a message.
    pub async fn add(&mut self, message: Message) -> Result<(), PublishError> {
        let headers = self.headers(message.headers);
        let sent = self.client.publish_with_headers(message.subject, headers, message.payload);
        match timeout(ATTEMPT, sent).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(PublishError::NotStored),
        }
    }

    /// Stores all or none. The ack has the sequence of the last message; the others come directly before. One attempt; an
    /// error says what is known of the whole batch.
    pub async fn commit(mut self) -> Result<Ack, PublishError> {
        let mut headers = self.headers(HeaderMap::new());
        // The end of the batch, which is no message of its own.
        headers.insert(header::NATS_BATCH_COMMIT, "eob");
        acknowledged(&ask(self.client, self.subject, headers, Bytes::new()).await?)
    }

    fn headers(&mut self, mut headers: HeaderMap) -> HeaderMap {
        self.size += 1;
        headers.insert(header::NATS_BATCH_ID, self.id.as_str());
        headers.insert(header::NATS_BATCH_SEQUENCE, self.size.to_string());
        headers
    }
}

/// Publishes the messages as one batch.
///
/// # Panics
/// On an empty batch, or one with more than the server's 1,000 messages.
pub async fn publish_batch(client: &Client, messages: &[Message]) -> Result<Ack, PublishError> {
    assert!(messages.len() <= MOST_MESSAGES, "a batch has at most {MOST_MESSAGES} messages, not {}", messages.len());
    let (first, others) = messages.split_first().expect("a batch has at least one message");
    let mut batch = Batch::open(client, first.clone()).await?;
    for message in others {
        batch.add(message.clone()).await?;
    }
    batch.commit().await
}

fn not_stored(error: PublishError) -> PublishError {
    match error {
        PublishError::Unknown(_) => PublishError::NotStored,
        error => error,
    }
}
