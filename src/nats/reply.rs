//! Replies: the result alone, or an error as headers and body.

use async_nats::{HeaderMap, PublishError, client::PublishErrorKind, service::Request};

use crate::{
    api::Encoding,
    client::{CONTENT_TYPE, REPEATED, SERVICE_ERROR, SERVICE_ERROR_CODE},
    error::{Body, Code, Error},
    gateway::Encoded,
};

/// Whether there is an inbox to reply to. We may publish anywhere and a caller may not, so a reply to any subject that
/// he names would lend him our rights: a counter could be overwritten with an answer.
pub fn is_wanted(request: &Request, operation: &str) -> bool {
    match request.message.reply.as_deref() {
        Some(reply) if reply.starts_with('_') => true,
        Some(reply) => {
            tracing::warn!(operation, reply, "a request whose reply is no inbox is not answered");
            false
        }
        None => false,
    }
}

/// The client library's own error reply has no body, so this writes the headers itself.
pub async fn send(
    request: &Request,
    encoding: Encoding,
    answer: Result<Encoded, Error>,
    more: Vec<(&'static str, String)>,
) -> Result<(), PublishError> {
    let mut headers = HeaderMap::new();
    more.into_iter().for_each(|(name, value)| headers.insert(name, value));
    match send_as_is(request, encoding, answer, headers.clone()).await {
        Err(error) if error.kind() == PublishErrorKind::MaxPayloadExceeded => {
            let error =
                Error::new(Code::PayloadTooLarge, "the answer is larger than this NATS server's messages may be");
            send_as_is(request, encoding, Err(error), headers).await
        }
        sent => sent,
    }
}

async fn send_as_is(
    request: &Request,
    encoding: Encoding,
    answer: Result<Encoded, Error>,
    mut headers: HeaderMap,
) -> Result<(), PublishError> {
    let body = match answer {
        Ok(Encoded { body, repeated }) => {
            if repeated {
                headers.insert(REPEATED, "true");
            }
            body
        }
        Err(error) => {
            headers.insert(SERVICE_ERROR_CODE, error.code.status().to_string());
            // A header is one line.
            headers.insert(SERVICE_ERROR, error.message.replace(['\r', '\n'], " "));
            encoding.encode(&Body::from(&error)).unwrap_or_default()
        }
    };
    if encoding != Encoding::Json {
        headers.insert(CONTENT_TYPE, encoding.content_type());
    }
    request.respond_with_headers(Ok(body), headers).await
}
