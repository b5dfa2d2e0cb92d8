//! Whether a record may be kept, as far as it can be told from the record itself.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use rust_decimal::Decimal;
use serde_json::{Value, json};

use super::{
    limits::Nested,
    record::{Record, invalid, invalid_field},
    types::Type,
};
use crate::{
    api::usage::{MetricKind, Unit},
    error::{Code, Error, Result},
};

/// Checks a record against its type, its source and the time at which it came.
pub fn check(
    record: &Record,
    json: &str,
    source: &str,
    came_at: DateTime<Utc>,
    of_type: Option<&Type>,
    limits: &Nested,
) -> Result<()> {
    let unit = check_type(record, json, source, of_type)?;
    check_time(record, came_at, unit.grace_period.unwrap_or(limits.grace_period), true)?;
    check_time(record, came_at, unit.future_tolerance.unwrap_or(limits.future_tolerance), false)?;
    match unit.metric_kind {
        MetricKind::Counter => check_reading(record.value),
        MetricKind::Gauge => Ok(()),
    }
}

/// Checks a record against its type and its source.
pub fn check_type<'a>(record: &Record, json: &str, source: &str, of_type: Option<&'a Type>) -> Result<&'a Unit> {
    let Some(of_type) = of_type else {
        let message = format!("usage_type: no unit {:?} is registered", record.usage_type);
        return Err(Error::new(Code::TypeNotFound, message).about("usage_type"));
    };
    let unit = &of_type.unit;
    if !unit.allowed_sources.iter().any(|allowed| allowed == source) {
        let message = format!("source {source} may not send {}", unit.name);
        return Err(Error::new(Code::SourceNotAuthorized, message));
    }
    if let Some(claimed) = record.metric_kind
        && claimed != unit.metric_kind
    {
        let problem = format_args!("{} is a {}", unit.name, unit.metric_kind.as_str());
        return Err(invalid_field("metric_kind", problem));
    }
    if of_type.schema.is_some() {
        let value: Value = serde_json::from_str(json).map_err(|error| invalid(error.to_string()))?;
        check_schema(of_type, &value)?;
    }
    Ok(unit)
}

/// Whether a record as it was sent is as its unit wants it.
pub fn check_schema(of_type: &Type, sent: &Value) -> Result<()> {
    let Some(schema) = &of_type.schema else { return Ok(()) };
    schema.validate(sent).map_err(|error| {
        let place = error.instance_path().to_string();
        let message = format!("the schema of {} is not met at {:?}: {error}", of_type.unit.name, place);
        invalid(message).details(json!({ "path": place }))
    })
}

/// Whether it can be a counter's.
pub fn check_reading(value: Decimal) -> Result<()> {
    match value.is_sign_negative() {
        true => Err(Error::new(Code::CounterViolation, "value: a counter is never negative").about("value")),
        false => Ok(()),
    }
}

/// Against the time at which the stream had it: nobody is late because we were away.
fn check_time(record: &Record, came_at: DateTime<Utc>, tolerance: Duration, past: bool) -> Result<()> {
    let tolerance = TimeDelta::from_std(tolerance).unwrap_or(TimeDelta::MAX);
    let at = record.event_timestamp;
    let (distance, code) = match past {
        true => (came_at - at, Code::GracePeriodExceeded),
        false => (at - came_at, Code::ValidationError),
    };
    if distance <= tolerance {
        return Ok(());
    }
    let tolerance = humantime::format_duration(tolerance.to_std().unwrap_or_default());
    let problem = match past {
        true => format!("came more than {tolerance} late"),
        false => format!("lies more than {tolerance} ahead"),
    };
    Err(Error::field_as(code, "event_timestamp", problem))
}
