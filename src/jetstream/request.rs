//! Requests that are bounded on their whole way.

use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, Request, RequestError, client::RequestErrorKind, subject::ToSubject};
use bytes::Bytes;
use futures::StreamExt;
use tokio::time::timeout;

/// Sends a request and waits for its reply. The library's own timeout does not cover the way into its send buffer, which
/// stands still while the connection is lost; this one does.
pub async fn request_within(
    limit: Duration,
    client: &Client,
    subject: impl ToSubject,
    headers: HeaderMap,
    payload: Bytes,
) -> Result<Message, RequestError> {
    let request = Request::new().headers(headers).payload(payload).timeout(None);
    match timeout(limit, client.send_request(subject, request)).await {
        Ok(reply) => reply,
        Err(_) => Err(RequestError::new(RequestErrorKind::TimedOut)),
    }
}

/// Returns when the server has everything that we sent. The library's flush only empties our own buffer.
pub async fn round_trip(client: &Client) -> Result<(), async_nats::Error> {
    let inbox = client.new_inbox();
    let there_and_back = async {
        let mut echo = client.subscribe(inbox.clone()).await?;
        client.publish(inbox, Bytes::new()).await?;
        Ok(echo.next().await.is_some())
    };
    match timeout(Duration::from_secs(2), there_and_back).await {
        Ok(Ok(true)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Ok(Ok(false)) | Err(_) => Err("the server did not confirm what we sent".into()),
    }
}
