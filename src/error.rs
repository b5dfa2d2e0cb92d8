//! What can go wrong, as outcomes with stable codes.
//!
//! A caller sees the code, the message and the details. The source stays here: it is logged where the error is
//! answered and never sent out.

use std::{borrow::Cow, error::Error as StdError, fmt};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub type Result<T, E = Error> = std::result::Result<T, E>;

type Source = Box<dyn StdError + Send + Sync>;

/// Declares the outcomes once: variant, stable text, HTTP status.
macro_rules! outcomes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $text:literal, $status:literal;)+) => {
        /// The outcome of a failed operation. The text is part of the contract and never changes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Code { $($(#[doc = $doc])+ #[serde(rename = $text)] $variant,)+ }

        impl Code {
            pub const ALL: &'static [Code] = &[$(Code::$variant,)+];

            pub fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $text,)+ }
            }

            /// The HTTP status, which is also the number in `Nats-Service-Error-Code`.
            pub fn status(self) -> u16 {
                match self { $(Code::$variant => $status,)+ }
            }
        }
    };
}

outcomes! {
    /// A field is missing, unknown, of the wrong type or out of bounds.
    InvalidRequest = "invalid_request", 400;
    /// A key, pool or tenant name outside `[A-Za-z0-9_-]{1,255}`.
    InvalidKey = "invalid_key", 400;
    /// More ids asked for than one request may have.
    SizeExceedsLimit = "size_exceeds_limit", 400;
    /// A step larger than the key allows.
    DeltaExceedsLimit = "delta_exceeds_limit", 400;
    /// No credentials, or wrong ones.
    Unauthenticated = "unauthenticated", 401;
    /// Known, but not allowed to do this.
    Forbidden = "forbidden", 403;
    /// The thing named does not exist.
    NotFound = "not_found", 404;
    /// The path exists, the method does not.
    MethodNotAllowed = "method_not_allowed", 405;
    /// Contradicts what is already there.
    Conflict = "conflict", 409;
    /// The body is larger than the limit.
    PayloadTooLarge = "payload_too_large", 413;
    /// Too many requests.
    RateLimited = "rate_limited", 429;
    /// A defect of ours; the log knows more.
    Internal = "internal", 500;
    /// A server that we need is away, or the answer did not come in time.
    Unavailable = "unavailable", 503;
    /// A sequence reached its end.
    Exhausted = "exhausted", 503;

    /// A usage record, or what is said about usage, is not as it must be.
    ValidationError = "validation_error", 400;
    /// A cursor that is too old.
    CursorExpired = "cursor_expired", 410;
    /// The record's range is closed while a backfill replaces it.
    BackfillInProgress = "BACKFILL_IN_PROGRESS", 409;
    /// Another backfill works on a part of the range.
    BackfillRangeOverlap = "BACKFILL_RANGE_OVERLAP", 409;
    /// What a backfill is to do can't be done as things are.
    BackfillConflict = "backfill_conflict", 409;
    /// Further back than a backfill may reach.
    BackfillWindowExceeded = "backfill_window_exceeded", 400;
    /// A usage record that is older than the grace period.
    GracePeriodExceeded = "grace_period_exceeded", 400;
    /// A published message whose id is not under its own tenant and source.
    UnsafeMessageId = "unsafe_message_id", 400;
    /// No unit has the record's usage type.
    TypeNotFound = "type_not_found", 404;
    /// The unit is not bound to the source.
    SourceNotAuthorized = "source_not_authorized", 403;
    /// The caller may not attribute usage to this user.
    AttributionNotAuthorized = "attribution_not_authorized", 403;
    /// The same idempotency key with another body.
    DuplicateRecord = "duplicate_record", 409;
    /// A counter that goes down.
    CounterViolation = "counter_violation", 422;
    /// A unit of this name exists.
    UnitNameConflict = "unit_name_conflict", 409;
    /// Neither counter nor gauge.
    InvalidMetricKind = "invalid_metric_kind", 400;
    /// No JSON Schema.
    InvalidSchema = "invalid_schema", 400;
    /// A unit that nobody may use.
    AllowedSourcesEmpty = "allowed_sources_empty", 400;
    /// A source that is not registered.
    SourceNotFound = "source_not_found", 404;
    /// A storage backend that is not configured.
    StorageBackendNotFound = "storage_backend_not_found", 404;
    /// Less than 7 days or more than 2555.
    RetentionOutOfBounds = "retention_out_of_bounds", 400;
    /// The units can't be read or written right now.
    TypesRegistryUnavailable = "types_registry_unavailable", 503;
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failed operation.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub code: Code,
    pub message: Cow<'static, str>,
    pub details: Option<Value>,
    #[source]
    source: Option<Source>,
}

impl Error {
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), details: None, source: None }
    }

    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    /// A bad value of one field.
    pub fn field(field: &str, problem: impl fmt::Display) -> Self {
        Self::field_as(Code::InvalidRequest, field, problem)
    }

    /// The same as another outcome. The message opens with the field's name, so that it reads well in any dialect.
    pub fn field_as(code: Code, field: &str, problem: impl fmt::Display) -> Self {
        Self::new(code, format!("{field}: {problem}")).about(field)
    }

    /// Names the field in the details, where the message has words of its own.
    pub fn about(self, field: &str) -> Self {
        self.details(serde_json::json!({ "field": field }))
    }

    pub fn unavailable(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Unavailable, message)
    }

    /// A defect of ours: callers learn nothing but that.
    pub fn internal(source: impl Into<Source>) -> Self {
        Self::new(Code::Internal, "an internal error occurred").source(source)
    }

    pub fn details(mut self, details: Value) -> Self {
        self.details = Some(details);
        self
    }

    /// When asking again may help.
    pub fn retry_after(self, wait: std::time::Duration) -> Self {
        self.details(serde_json::json!({ "retry_after_ms": wait.as_millis() as u64 }))
    }

    pub fn source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// One copy for each of several callers that wait for the same thing. The source stays with the original.
    pub fn share(&self) -> Self {
        Self { code: self.code, message: self.message.clone(), details: self.details.clone(), source: None }
    }

    /// Logs what callers don't see: defects loudly, outages as warnings, callers' mistakes for the curious.
    pub fn log(&self, operation: &str) {
        let source = self.source.as_deref().map(|source| chain(source)).unwrap_or_default();
        let code = self.code.as_str();
        match self.code {
            Code::Internal => tracing::error!(operation, code, source, "{self}"),
            Code::Unavailable => tracing::warn!(operation, code, source, "{self}"),
            _ => tracing::debug!(operation, code, source, "{self}"),
        }
    }
}

/// An error and its causes in one line.
pub fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let next_text = next.to_string();
        // Many libraries repeat their cause in their own message.
        if !text.contains(&next_text) {
            text.push_str(": ");
            text.push_str(&next_text);
        }
        cause = next.source();
    }
    text
}

/// The body of a failed reply over NATS, and of HTTP surfaces that have no dialect of their own.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Body {
    /// Stable text of the outcome, such as `not_found`.
    #[schema(value_type = String)]
    pub code: Code,
    pub message: Cow<'static, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
}

impl From<&Error> for Body {
    fn from(error: &Error) -> Self {
        Self { code: error.code, message: error.message.clone(), details: error.details.clone() }
    }
}

impl From<Body> for Error {
    fn from(body: Body) -> Self {
        Self { code: body.code, message: body.message, details: body.details, source: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_survives_the_way_there_and_back() {
        for &code in Code::ALL {
            let error = Error::new(code, "what happened").details(serde_json::json!({"field": "base"}));
            let text = serde_json::to_string(&Body::from(&error)).unwrap();
            assert!(text.contains(code.as_str()), "{text}");
            let back: Error = serde_json::from_str::<Body>(&text).unwrap().into();
            assert_eq!((back.code, &*back.message, back.details), (code, "what happened", error.details));
        }
    }

    #[test]
    fn the_source_is_in_the_log_line_and_not_in_the_body() {
        let error = Error::internal(std::io::Error::other("password=hunter2"));
        assert!(chain(&error).contains("hunter2"));
        assert!(!serde_json::to_string(&Body::from(&error)).unwrap().contains("hunter2"));
    }
}
