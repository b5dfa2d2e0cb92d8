//! How each surface writes its answers and errors, as its callers know it from the service that it replaces.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde::Serialize;
use serde_json::json;

use crate::{
    api::{Encoding, Info, Surface, timers},
    error::{Body, Code, Error, Result},
};

/// IDBuilder's and the timer platform's envelope.
#[derive(Serialize)]
struct Envelope<T> {
    code: u16,
    message: &'static str,
    /// An answer that says nothing but yes has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<T>,
}

/// What an answer is called that is not a plain success: one that was given before.
pub const REPEATED: &str = "success";

/// A successful answer.
pub fn success<A: Serialize>(info: &Info, status: u16, encoding: Encoding, answer: &A) -> Result<Response> {
    let Info { surface, .. } = *info;
    let message = if status == info.success { info.message } else { REPEATED };
    let body = match surface {
        Surface::Ids | Surface::Timers => {
            let data = (size_of::<A>() > 0).then_some(answer);
            encoding.encode(&Envelope { code: 0, message, data })
        }
        Surface::Pools | Surface::Stages | Surface::Usage | Surface::Native => encoding.encode(answer),
    }?;
    let body = if surface == Surface::Pools && encoding == Encoding::Json { with_line_end(&body) } else { body };
    Ok(respond(status, encoding.content_type(), body))
}

/// An error. What the source says stays in the log.
pub fn failure(surface: Surface, encoding: Encoding, error: &Error) -> Response {
    let status = match surface {
        Surface::Usage => usage_code(error.code).status(),
        _ => error.code.status(),
    };
    let envelope = |code: u16| json!({ "code": code, "message": error.message, "data": null });
    let body = match surface {
        Surface::Ids => envelope(id_code(error.code)),
        Surface::Timers => envelope(timers::number(error.code)),
        Surface::Stages => json!({ "error": stage_text(error) }),
        Surface::Usage => json!({ "code": usage_code(error.code), "message": error.message, "details": error.details }),
        Surface::Native => json!(Body::from(error)),
        Surface::Pools => {
            let text = with_line_end(error.message.as_bytes());
            let mut response = respond(status, "text/plain; charset=utf-8", text);
            response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
            return decorate(error, response);
        }
    };
    let (content_type, body) = (encoding.content_type(), encoding.encode(&body).unwrap_or_default());
    decorate(error, respond(status, content_type, body))
}

/// As the noid server ends every body.
fn with_line_end(body: &[u8]) -> Bytes {
    [body, b"\n"].concat().into()
}

fn respond(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Response {
    let status = StatusCode::from_u16(status).expect("declarations and codes have valid statuses");
    // An answer is for this caller and this moment, even to a GET.
    let headers = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-store")];
    (status, headers, body.into()).into_response()
}

fn decorate(error: &Error, mut response: Response) -> Response {
    if error.code == Code::Unauthenticated {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if let Some(wait) = error.details.as_ref().and_then(|details| details["retry_after_ms"].as_u64()) {
        response.headers_mut().insert(header::RETRY_AFTER, wait.div_ceil(1000).into());
    }
    response
}

fn id_code(code: Code) -> u16 {
    match code {
        Code::InvalidKey => 1002,
        Code::SizeExceedsLimit => 1003,
        Code::DeltaExceedsLimit => 1004,
        Code::Unauthenticated => 2001,
        Code::Forbidden => 2002,
        Code::NotFound => 3001,
        Code::Internal => 4001,
        Code::Unavailable | Code::RateLimited => 4002,
        Code::Exhausted => 4003,
        _ => 1001,
    }
}

fn stage_text(error: &Error) -> &str {
    match error.code {
        Code::Internal => "An internal server error occurred.",
        Code::RateLimited => "Too many requests.",
        Code::Unavailable => "The service is unavailable. Please retry shortly.",
        _ => &error.message,
    }
}

/// What is wrong with a request as such is found before anybody knows that it is about usage.
fn usage_code(code: Code) -> Code {
    match code {
        Code::InvalidRequest | Code::InvalidKey | Code::PayloadTooLarge => Code::ValidationError,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Operation, admin::ListKeys};

    const SURFACES: [Surface; 6] =
        [Surface::Ids, Surface::Pools, Surface::Stages, Surface::Timers, Surface::Usage, Surface::Native];

    async fn text(response: Response) -> String {
        let body = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn every_dialect_writes_every_error_without_its_source() {
        for surface in SURFACES {
            for &code in Code::ALL {
                let error = Error::new(code, "what happened").source("password=hunter2");
                let response = failure(surface, Encoding::Json, &error);
                let expected = if surface == Surface::Usage { usage_code(code) } else { code };
                assert_eq!(response.status().as_u16(), expected.status());
                let body = text(response).await;
                assert!(!body.contains("hunter2") && !body.is_empty(), "{surface:?} {code}: {body}");
            }
        }
    }

    #[tokio::test]
    async fn the_same_error_in_each_dialect() {
        let error = Error::new(Code::NotFound, "key not found: x");
        for (surface, expected) in [
            (Surface::Ids, r#"{"code":3001,"message":"key not found: x","data":null}"#),
            (Surface::Timers, r#"{"code":3,"message":"key not found: x","data":null}"#),
            (Surface::Stages, r#"{"error":"key not found: x"}"#),
            (Surface::Pools, "key not found: x\n"),
            (Surface::Usage, r#"{"code":"not_found","message":"key not found: x","details":null}"#),
            (Surface::Native, r#"{"code":"not_found","message":"key not found: x"}"#),
        ] {
            assert_eq!(text(failure(surface, Encoding::Json, &error)).await, expected);
        }
    }

    #[tokio::test]
    async fn the_same_answer_in_each_dialect() {
        for surface in SURFACES {
            let info = Info { surface, success: 201, ..<ListKeys as Operation>::INFO };
            let response = success(&info, 201, Encoding::Json, &json!({"id": [1]})).unwrap();
            assert_eq!(response.status(), 201);
            let expected = match surface {
                Surface::Ids | Surface::Timers => r#"{"code":0,"message":"success","data":{"id":[1]}}"#,
                Surface::Pools => "{\"id\":[1]}\n",
                _ => r#"{"id":[1]}"#,
            };
            assert_eq!(text(response).await, expected);
        }
    }
}
