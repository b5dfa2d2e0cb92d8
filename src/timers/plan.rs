//! From what a caller asks for to a timer that can be kept: everything is checked here, and nowhere else.

use std::time::Duration;

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::{NoContext, Timestamp, Uuid};

use super::{
    callback::{self, Rules},
    moment,
    recurrence::Rhythm,
};
use crate::{
    api::{
        Context, Name,
        timers::{Callback, CallbackType, Expect, NewTimer, OnLate, Recurrence, Retry},
    },
    error::{Error, Result},
    telemetry::Trace,
};

/// The seed's bound on what still fires after an outage.
pub const MAX_LATENESS: Duration = Duration::from_secs(300);

const MOST_ATTEMPTS: u32 = 100;
const LONGEST_KEY: usize = 255;
const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);

/// A timer that may be kept.
#[derive(Debug, Clone)]
pub struct Plan {
    pub id: Uuid,
    pub tenant: Name,
    pub created_at: DateTime<Utc>,
    pub execute_at: DateTime<Utc>,
    pub kind: CallbackType,
    /// As JSON.
    pub callback: String,
    pub destination: String,
    pub options: Option<String>,
    pub metadata: Option<String>,
    pub idempotency_key: Option<String>,
    pub body_hash: Option<Vec<u8>>,
    pub attempts_allowed: i32,
    pub traceparent: Option<String>,
}

/// What few timers have, kept as one value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Options {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrence: Option<Recurrence>,
    /// Before this moment a recurrence does not begin, because its caller said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<DateTime<Utc>>,
    /// The first run, which intervals are counted from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<DateTime<Utc>>,
    #[serde(default)]
    pub on_late: OnLate,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "humantime_serde")]
    pub max_lateness: Option<Duration>,
    #[serde(default)]
    pub capture_response: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Expect>,
}

impl Options {
    /// What decides when a recurrence runs.
    pub fn rhythm(&self) -> Option<(Option<String>, Option<Duration>, Option<String>)> {
        let Recurrence { cron, every, .. } = self.recurrence.clone()?;
        Some((cron, every, self.timezone.clone()))
    }

    pub fn max_attempts(&self) -> i32 {
        self.retry.as_ref().map_or(1, |retry| retry.max_attempts as i32)
    }

    /// The run after one, from now on, if there is to be one.
    pub fn next_run(&self, run: i32, execute_at: DateTime<Utc>, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let recurrence = self.recurrence.as_ref()?;
        if recurrence.count.is_some_and(|count| i64::from(run) >= i64::from(count)) {
            return None;
        }
        let rhythm = Rhythm::of(recurrence, self.zone()).ok()?;
        let next = moment::kept(rhythm.next(self.began.unwrap_or(execute_at), now.max(execute_at))?);
        (recurrence.until.is_none_or(|until| next <= until)).then_some(next)
    }

    fn zone(&self) -> Option<Tz> {
        self.timezone.as_deref().and_then(|name| name.parse().ok())
    }

    pub fn encode(&self) -> Result<Option<String>> {
        if *self == Self::default() {
            return Ok(None);
        }
        serde_json::to_string(self).map(Some).map_err(Error::internal)
    }
}

/// What plans are made by.
pub struct Planner {
    pub rules: Rules,
    pub min_delay: Duration,
}

impl Planner {
    /// Checks a new timer.
    pub fn plan(
        &self,
        tenant: &Name,
        wanted: NewTimer,
        identity: Option<&Identity>,
        trace: Trace,
        now: DateTime<Utc>,
    ) -> Result<Plan> {
        let Some(callback) = &wanted.callback else { return Err(Error::field("callback", "is missing")) };
        let destination = self.rules.check(tenant, callback)?;
        let mut options = Options {
            timezone: wanted.timezone,
            retry: wanted.retry,
            recurrence: wanted.recurrence,
            not_before: None,
            began: None,
            on_late: wanted.on_late.unwrap_or_default(),
            max_lateness: wanted.max_lateness.map(|text| duration("max_lateness", &text)).transpose()?,
            capture_response: wanted.capture_response.unwrap_or_default(),
            expect: wanted.expect,
        };
        self.check_options(&options, callback)?;
        let asked = self.earliest(wanted.execute_at.as_deref(), wanted.execute_in.as_deref(), &options, now)?;
        let execute_at = self.first_run(asked, &mut options, now)?;
        self.check_metadata(wanted.metadata.as_ref())?;
        let (id, created_at) = new_id(now)?;
        Ok(Plan {
            id,
            tenant: tenant.clone(),
            created_at,
            execute_at,
            kind: callback::kind(callback),
            callback: serde_json::to_string(callback).map_err(Error::internal)?,
            destination,
            attempts_allowed: options.max_attempts(),
            options: options.encode()?,
            metadata: wanted.metadata.as_ref().map(Value::to_string),
            idempotency_key: identity.map(|identity| identity.key.clone()),
            body_hash: identity.map(|identity| identity.body_hash.clone()),
            traceparent: trace.header(),
        })
    }

    /// The moment that a caller names, if he names one.
    pub fn earliest(
        &self,
        execute_at: Option<&str>,
        execute_in: Option<&str>,
        options: &Options,
        now: DateTime<Utc>,
    ) -> Result<Option<DateTime<Utc>>> {
        let earliest = match (execute_at, execute_in) {
            (Some(_), Some(_)) => return Err(Error::field("execute_in", "and execute_at can't both be given")),
            (Some(text), None) => moment::parse(text, options.zone())?,
            (None, Some(text)) => now + duration("execute_in", text)?,
            (None, None) => return Ok(None),
        };
        let earliest = moment::kept(earliest);
        // The longest that PostgreSQL and everyone who reads it can do with.
        if earliest > DateTime::from_timestamp(253_402_300_799, 0).expect("the last second of the year 9999") {
            return Err(Error::field("execute_at", "must lie before the year 10000"));
        }
        if earliest <= now {
            return Err(Error::invalid("execute_at must be in the future").about("execute_at"));
        }
        if earliest < now + self.min_delay {
            let text = format!("execute_at must be in the future: at least {:?} from now", self.min_delay);
            return Err(Error::invalid(text).about("execute_at"));
        }
        Ok(Some(earliest))
    }

    /// When the timer runs first. A recurrence decides; without one the caller must have.
    pub fn first_run(
        &self,
        asked: Option<DateTime<Utc>>,
        options: &mut Options,
        now: DateTime<Utc>,
    ) -> Result<DateTime<Utc>> {
        let Some(recurrence) = &options.recurrence else {
            return asked.ok_or_else(|| Error::field("execute_at", "is missing"));
        };
        let rhythm = Rhythm::of(recurrence, options.zone())?;
        let soonest = moment::kept(now + self.min_delay.max(recurrence.every.unwrap_or_default()));
        let first = rhythm.first(asked.unwrap_or(soonest));
        let first = first.ok_or_else(|| Error::field("recurrence.cron", "never fires"))?;
        check_until(recurrence, first)?;
        (options.not_before, options.began) = (asked, Some(first));
        Ok(first)
    }

    /// A recurrence whose runs come when they did, with another end.
    pub fn check_end(&self, options: &Options, next: DateTime<Utc>) -> Result<()> {
        let Some(recurrence) = &options.recurrence else { return Ok(()) };
        Rhythm::of(recurrence, options.zone())?;
        check_until(recurrence, next)
    }

    pub fn check_metadata(&self, metadata: Option<&Value>) -> Result<()> {
        self.rules.check_value("metadata", metadata)?;
        metadata.map_or(Ok(()), |metadata| check_nul("metadata", metadata))
    }

    /// All but the recurrence, which [`Planner::first_run`] checks.
    pub fn check_options(&self, options: &Options, callback: &Callback) -> Result<()> {
        if let Some(name) = &options.timezone {
            moment::zone(name)?;
        }
        if let Some(Retry { max_attempts, initial_delay, max_delay }) = &options.retry {
            if !(1..=MOST_ATTEMPTS).contains(max_attempts) {
                return Err(Error::field("retry.max_attempts", format!("must lie between 1 and {MOST_ATTEMPTS}")));
            }
            if *initial_delay > *max_delay {
                return Err(Error::field("retry.initial_delay", "must not be above max_delay"));
            }
            if *max_delay > CENTURY {
                return Err(Error::field("retry.max_delay", "must not be above a hundred years"));
            }
        }
        if options.max_lateness.is_some() && options.on_late != OnLate::Skip {
            return Err(Error::field("max_lateness", "has a meaning only with on_late: skip"));
        }
        if matches!(callback, Callback::Nats(_)) {
            if options.expect.is_some() {
                return Err(Error::field("expect", "is for HTTP callbacks: NATS callbacks have no answer"));
            }
            if options.capture_response {
                return Err(Error::field("capture_response", "is for HTTP callbacks: NATS callbacks have no answer"));
            }
        }
        if let Some(expect) = &options.expect {
            if let Some(statuses) = &expect.status
                && (statuses.is_empty() || statuses.iter().any(|status| !(100..=599).contains(status)))
            {
                return Err(Error::field("expect.status", "must name statuses from 100 to 599"));
            }
            if let Some(schema) = &expect.schema {
                self.rules.check_value("expect.schema", Some(schema))?;
                check_nul("expect.schema", schema)?;
                crate::schema::schema(schema).map_err(|problem| Error::field("expect.schema", problem))?;
            }
        }
        Ok(())
    }
}

fn check_until(recurrence: &Recurrence, next: DateTime<Utc>) -> Result<()> {
    match recurrence.until.is_some_and(|until| until < next) {
        true => {
            let problem = format!("lies before the first run at {}", next.to_rfc3339());
            Err(Error::field("recurrence.until", problem))
        }
        false => Ok(()),
    }
}

/// A span of time as callers write it.
pub fn duration(field: &str, text: &str) -> Result<Duration> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration <= CENTURY => Ok(duration),
        Ok(_) => Err(Error::field(field, "must not be above a hundred years")),
        Err(error) => Err(Error::field(field, format!("{error}; write it such as 90s or 2h"))),
    }
}

/// What a request that may be repeated is known by.
#[derive(Debug)]
pub struct Identity {
    pub key: String,
    pub body_hash: Vec<u8>,
}

impl Identity {
    pub fn of(wanted: &NewTimer, context: &Context) -> Result<Option<Self>> {
        let key = idempotency_key(wanted, context)?;
        key.map(|key| Ok(Self { key, body_hash: body_hash(wanted)? })).transpose()
    }
}

/// The body's key, or the header's.
fn idempotency_key(wanted: &NewTimer, context: &Context) -> Result<Option<String>> {
    let header = context.idempotency_key.as_ref().map(|key| key.as_str());
    match (wanted.idempotency_key.as_deref(), header) {
        (Some(body), Some(header)) if body != header => {
            Err(Error::field("idempotency_key", "and the header Idempotency-Key are not the same"))
        }
        (Some(key), _) | (None, Some(key)) => match (1..=LONGEST_KEY).contains(&key.chars().count()) {
            true if key.contains('\0') => Err(Error::field("idempotency_key", "must not contain U+0000")),
            true => Ok(Some(key.to_owned())),
            false => Err(Error::field("idempotency_key", format!("must have 1 to {LONGEST_KEY} characters"))),
        },
        (None, None) => Ok(None),
    }
}

/// What was asked for, whatever the order of its members. The key itself is no part of it.
fn body_hash(wanted: &NewTimer) -> Result<Vec<u8>> {
    let mut body = serde_json::to_value(wanted).map_err(Error::internal)?;
    body.as_object_mut().map(|members| members.shift_remove("idempotency_key"));
    body.sort_all_objects();
    Ok(Sha256::digest(body.to_string()).to_vec())
}

/// A new id, and the moment that it carries.
fn new_id(now: DateTime<Utc>) -> Result<(Uuid, DateTime<Utc>)> {
    let millis = now.timestamp_millis();
    let created_at = DateTime::from_timestamp_millis(millis).ok_or_else(|| Error::internal("a clock out of range"))?;
    let seconds = u64::try_from(millis.div_euclid(1000)).map_err(Error::internal)?;
    let timestamp = Timestamp::from_unix(NoContext, seconds, created_at.timestamp_subsec_nanos());
    Ok((Uuid::new_v7(timestamp), created_at))
}

fn check_nul(field: &str, value: &Value) -> Result<()> {
    match has_nul(value) {
        true => Err(Error::field(field, "contains the character U+0000, which PostgreSQL can't keep")),
        false => Ok(()),
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(members) => members.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
        _ => false,
    }
}
