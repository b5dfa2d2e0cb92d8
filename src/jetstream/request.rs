//! A request that is bounded on its whole way.

use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, Request, RequestError, client::RequestErrorKind, subject::ToSubject};
use bytes::Bytes;
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
