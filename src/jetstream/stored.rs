//! Messages as they stand in a stream.

use async_nats::jetstream::{
    message::StreamMessage,
    stream::{RawMessageError, RawMessageErrorKind},
};
use chrono::{DateTime, Utc};

/// A message that was asked for, if there is one.
pub fn if_any(read: Result<StreamMessage, RawMessageError>) -> Result<Option<StreamMessage>, RawMessageError> {
    match read {
        Ok(message) => Ok(Some(message)),
        Err(error) if matches!(error.kind(), RawMessageErrorKind::NoMessageFound) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The library's time as ours.
pub fn time(at: async_nats::datetime::DateTime) -> DateTime<Utc> {
    DateTime::from_timestamp_nanos(at.unix_timestamp_nanos() as i64)
}
