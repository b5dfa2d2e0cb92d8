//! Reading records: out of a body, each for itself.

use std::borrow::Cow;

use bytes::Bytes;
use chrono::{DateTime, DurationRound, TimeDelta, Utc};
use rust_decimal::Decimal;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, value::RawValue};
use uuid::Uuid;

use super::identity::{self, Origin};
use crate::{
    api::{
        Context, Encoding, altered, named, unpacking,
        usage::{MOST_BYTES, MOST_RECORDS, MetricKind},
    },
    error::{Code, Error, Result},
};

/// Bytes of a record's metadata.
const MOST_METADATA: usize = 8 * 1024;

/// Characters of a name, and names in a lineage.
pub const MOST_CHARACTERS: usize = 255;
const MOST_LINEAGE: usize = 32;

/// A record that is sound in itself. Whether it may be kept is another question.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub id: Uuid,
    pub series: Uuid,
    pub usage_type: String,
    pub resource_id: String,
    pub value: Decimal,
    pub event_timestamp: DateTime<Utc>,
    pub idempotency_key: String,
    pub metric_kind: Option<MetricKind>,
    pub user_id: Option<String>,
    pub resource_type: Option<String>,
    /// As JSON.
    pub lineage: Option<String>,
    /// As JSON.
    pub metadata: Option<String>,
    pub body_hash: [u8; 16],
}

/// What is wrong with a record, or with a body as a whole.
pub fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Code::ValidationError, message)
}

pub fn invalid_field(field: &str, problem: impl std::fmt::Display) -> Error {
    Error::field_as(Code::ValidationError, field, problem)
}

/// A body as JSON.
pub fn as_json(encoding: Encoding, body: &Bytes) -> Result<Bytes> {
    if body.len() > MOST_BYTES {
        return Err(invalid(format!("body: has {} bytes, more than {MOST_BYTES}", body.len())));
    }
    match encoding {
        Encoding::Json => Ok(body.clone()),
        Encoding::MessagePack => {
            let mut rest: &[u8] = body;
            let mut json = Vec::with_capacity(body.len() * 2);
            serde_transcode::transcode(&mut unpacking(&mut rest), &mut serde_json::Serializer::new(&mut json))
                .map_err(|error| invalid(format!("body: is not MessagePack: {error}")))?;
            if !rest.is_empty() {
                return Err(invalid("body: more bytes than one value"));
            }
            if json.len() > MOST_BYTES {
                return Err(invalid(format!("body: has {} bytes as JSON, more than {MOST_BYTES}", json.len())));
            }
            Ok(json.into())
        }
    }
}

/// The records of a body, each as it came: a list, an object with `records`, or one record.
pub fn split(json: &[u8]) -> Result<Vec<&RawValue>> {
    #[derive(Deserialize)]
    struct Wrapped<'a> {
        #[serde(borrow, default)]
        records: Option<&'a RawValue>,
    }
    let broken = |error: serde_json::Error| invalid(format!("body: is not JSON: {error}"));
    let records: Vec<&RawValue> = match json.trim_ascii_start().first() {
        Some(b'[') => serde_json::from_slice(json).map_err(broken)?,
        Some(b'{') => match serde_json::from_slice::<Wrapped<'_>>(json).map_err(broken)?.records {
            Some(list) => {
                check_alone(json, list.get())?;
                serde_json::from_str(list.get()).map_err(|_| invalid_field("records", "must be a list"))?
            }
            None => vec![serde_json::from_slice(json).map_err(broken)?],
        },
        None => return Err(invalid("body: is empty")),
        Some(_) => return Err(invalid("body: must be JSON: a list of records, or an object")),
    };
    match records.len() {
        ..=MOST_RECORDS => Ok(records),
        count => Err(invalid_field("records", format_args!("has {count}, more than {MOST_RECORDS}"))),
    }
}

/// Refuses what stands beside the records: somebody means something by it. Looked at only where it is not just the list.
fn check_alone(json: &[u8], list: &str) -> Result<()> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Alone {
        #[serde(rename = "records")]
        _records: IgnoredAny,
    }
    let begins = list.as_ptr() as usize - json.as_ptr() as usize;
    let (before, after) = (&json[..begins], &json[begins + list.len()..]);
    let is_member = before.iter().filter(|byte| !byte.is_ascii_whitespace()).eq(br#"{"records":"#);
    match is_member && after.trim_ascii() == b"}" {
        true => Ok(()),
        false => match named::<Alone, _>(&mut serde_json::Deserializer::from_slice(json)) {
            Ok(_) => Ok(()),
            Err(mut error) => {
                error.code = Code::ValidationError;
                Err(error)
            }
        },
    }
}

/// A record as it comes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sent<'a> {
    usage_type: String,
    resource_id: String,
    #[serde(borrow)]
    value: &'a RawValue,
    event_timestamp: String,
    idempotency_key: String,
    metric_kind: Option<MetricKind>,
    user_id: Option<String>,
    resource_type: Option<String>,
    lineage: Option<Vec<String>>,
    metadata: Option<Value>,
    tenant_id: Option<String>,
    source_id: Option<String>,
}

/// Reads one record. `user` is the one user for whom its sender may speak.
pub fn read(json: &str, origin: Origin<'_>, user: Option<&str>, most_bytes: usize) -> Result<Record> {
    Sent::parse(json, most_bytes)?.read("", origin, user)
}

impl<'a> Sent<'a> {
    pub fn parse(json: &'a str, most_bytes: usize) -> Result<Self> {
        if json.len() > most_bytes {
            return Err(invalid(format!("the record has {} bytes, more than {most_bytes}", json.len())));
        }
        // Serde would also take a list for one, by position.
        if !json.starts_with('{') {
            return Err(invalid("a record must be an object"));
        }
        serde_json::from_str(json).map_err(|_| fault(json))
    }

    /// What it says that it comes from.
    pub fn source_id(&self) -> Option<&str> {
        self.source_id.as_deref()
    }

    /// Refuses a value that may have lost digits where it was parsed on its way.
    pub fn check_digits(&self) -> Result<()> {
        check_digits(self.value.get())
    }

    /// Keys are unique within a namespace: a backfill has its own.
    pub fn read(self, namespace: &str, origin: Origin<'_>, user: Option<&str>) -> Result<Record> {
        for (field, said, proven) in
            [("tenant_id", &self.tenant_id, origin.tenant), ("source_id", &self.source_id, origin.source)]
        {
            if said.as_ref().is_some_and(|said| said != proven) {
                return Err(invalid_field(field, "is not the sender's own"));
            }
        }
        for (field, text) in [
            ("usage_type", Some(&self.usage_type)),
            ("resource_id", Some(&self.resource_id)),
            ("idempotency_key", Some(&self.idempotency_key)),
            ("user_id", self.user_id.as_ref()),
            ("resource_type", self.resource_type.as_ref()),
        ] {
            check_name(field, text)?;
        }
        let value = decimal(self.value.get())?;
        let event_timestamp = moment(&self.event_timestamp)?;
        let lineage = self.lineage.as_ref().map(lineage).transpose()?;
        let metadata = self.metadata.as_ref().map(metadata).transpose()?;
        let user_id = match (self.user_id, user) {
            (Some(named), Some(user)) if named != user => {
                return Err(foreign_user());
            }
            (named, user) => named.or_else(|| user.map(str::to_owned)),
        };
        let body_hash = identity::hash(&[
            &value.to_string(),
            &event_timestamp.timestamp_micros().to_string(),
            user_id.as_deref().unwrap_or_default(),
            self.resource_type.as_deref().unwrap_or_default(),
            lineage.as_deref().unwrap_or_default(),
            metadata.as_deref().unwrap_or_default(),
        ]);
        Ok(Record {
            id: identity::record_id(namespace, origin, &self.usage_type, &self.resource_id, &self.idempotency_key),
            series: identity::series(origin, &self.usage_type, &self.resource_id),
            usage_type: self.usage_type,
            resource_id: self.resource_id,
            value,
            event_timestamp,
            idempotency_key: self.idempotency_key,
            metric_kind: self.metric_kind,
            user_id,
            resource_type: self.resource_type,
            lineage,
            metadata,
            body_hash: body_hash[..16].try_into().expect("half of a hash"),
        })
    }
}

/// A sender that is bound to a user named another, or means another's record.
pub fn foreign_user() -> Error {
    let problem = "user_id: the sender may attribute usage to its own user only";
    Error::new(Code::AttributionNotAuthorized, problem).about("user_id")
}

/// A range of time holds the records of all users.
pub fn check_speaks_for_all(context: &Context) -> Result<()> {
    match &context.user {
        None => Ok(()),
        Some(_) => {
            let problem = "a sender that is bound to a user can't replace what all users have in a range of time";
            Err(Error::new(Code::AttributionNotAuthorized, problem))
        }
    }
}

/// The key of a record that may be bad otherwise.
pub fn idempotency_key(json: &str) -> Option<String> {
    let value: Value = serde_json::from_str(json).ok()?;
    value.get("idempotency_key")?.as_str().map(cut)
}

/// Text that can be kept and told: without NUL, and of a length that somebody reads.
pub fn cut(text: &str) -> String {
    text.chars()
        .map(|character| if character == '\0' { char::REPLACEMENT_CHARACTER } else { character })
        .take(MOST_CHARACTERS)
        .collect()
}

/// What a second, slower look finds wrong.
fn fault(json: &str) -> Error {
    let mut json = serde_json::Deserializer::from_str(json);
    match serde_path_to_error::deserialize::<_, Sent<'_>>(&mut json) {
        Ok(_) => invalid("the record can't be read"),
        Err(error) => {
            let (path, problem) = (error.path().to_string(), error.into_inner().to_string());
            // Where in the record's own text says nothing to whoever sent a list of them.
            let problem = problem.split(" at line ").next().unwrap_or_default().to_owned();
            match (path.as_str(), problem.split('`').nth(1).map(str::to_owned)) {
                (".", Some(field)) => invalid(problem).about(&field),
                (".", None) => invalid(problem),
                (path, _) => invalid_field(path, problem),
            }
        }
    }
}

pub fn check_name(field: &str, text: Option<&String>) -> Result<()> {
    let Some(text) = text else { return Ok(()) };
    if !(1..=MOST_CHARACTERS).contains(&text.chars().count()) {
        return Err(invalid_field(field, format_args!("must have 1 to {MOST_CHARACTERS} characters")));
    }
    if text.contains('\0') {
        return Err(invalid_field(field, "must not contain NUL"));
    }
    Ok(())
}

/// A number that has been parsed before.
pub fn value(value: &Value) -> Result<Decimal> {
    let json = value.to_string();
    check_digits(&json)?;
    decimal(&json)
}

/// What may have lost digits when it was parsed must come as text.
fn check_digits(json: &str) -> Result<()> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    const DIGITS: usize = 15;
    let is_too_large = || json.parse::<f64>().is_ok_and(|number| number.abs() >= EXACT);
    let digits = || json.bytes().take_while(|byte| *byte != b'e').filter(u8::is_ascii_digit).count();
    let is_float = json.starts_with(|first: char| first == '-' || first.is_ascii_digit()) && json.contains(['.', 'e']);
    match is_float && (is_too_large() || digits() > DIGITS + 1) {
        true => Err(invalid_field("value", "has too many digits for a number: give it as text")),
        false => Ok(()),
    }
}

/// A number exactly as it is written, or nothing.
fn decimal(json: &str) -> Result<Decimal> {
    let problem = |problem: &str| Err(invalid_field("value", problem));
    let text = match json.as_bytes().first() {
        Some(b'"') => serde_json::from_str::<String>(json).unwrap_or_default(),
        Some(b'-' | b'0'..=b'9') => json.to_owned(),
        _ => return problem("must be a number, or text that is one"),
    };
    // What else the parser would take (underscores, a plus) is no number to JSON.
    if !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')) || text.starts_with('+')
    {
        return problem("must be a number, or text that is one");
    }
    let parsed = match text.contains(['e', 'E']) {
        true => scientific(&text),
        false => Decimal::from_str_exact(&text).ok(),
    };
    match parsed {
        // A zero has no sign.
        Some(value) if value.is_zero() => Ok(Decimal::ZERO),
        Some(value) => Ok(value.normalize()),
        None => problem("must be a number of up to 28 digits, which would be kept exactly"),
    }
}

/// `1.5e3`, if that is exact.
fn scientific(text: &str) -> Option<Decimal> {
    let (digits, exponent) = text.split_once(['e', 'E'])?;
    let (digits, exponent) = (Decimal::from_str_exact(digits).ok()?, exponent.parse::<i32>().ok()?);
    let scale = i32::try_from(digits.scale()).ok()?.checked_sub(exponent)?;
    match scale {
        0..=28 => Decimal::try_from_i128_with_scale(digits.mantissa(), scale.unsigned_abs()).ok(),
        -28..=-1 => {
            let mantissa = digits.mantissa().checked_mul(10i128.checked_pow(scale.unsigned_abs())?)?;
            Decimal::try_from_i128_with_scale(mantissa, 0).ok()
        }
        _ => digits.is_zero().then_some(Decimal::ZERO),
    }
}

/// As PostgreSQL keeps it: microseconds.
fn moment(text: &str) -> Result<DateTime<Utc>> {
    let problem = || invalid_field("event_timestamp", "must be a time such as 2026-01-31T12:00:00Z");
    let moment = DateTime::parse_from_rfc3339(text).map_err(|_| problem())?.to_utc();
    moment.duration_trunc(TimeDelta::microseconds(1)).map_err(|_| problem())
}

fn lineage(names: &Vec<String>) -> Result<String> {
    if names.len() > MOST_LINEAGE {
        return Err(invalid_field("lineage", format_args!("must have at most {MOST_LINEAGE} names")));
    }
    names.iter().try_for_each(|name| check_name("lineage", Some(name)))?;
    serde_json::to_string(names).map_err(Error::internal)
}

/// The same text for the same object, whatever order it came in.
pub fn metadata(value: &Value) -> Result<String> {
    if !value.is_object() {
        return Err(invalid_field("metadata", "must be an object"));
    }
    if has_nul(value) {
        return Err(invalid_field("metadata", "must not contain NUL"));
    }
    if let Some(number) = altered(value) {
        let problem = format_args!("{number} is too large to be kept exactly: send it as text");
        return Err(invalid_field("metadata", problem));
    }
    let mut value = value.clone();
    value.sort_all_objects();
    let text = value.to_string();
    match text.len() {
        ..=MOST_METADATA => Ok(text),
        size => Err(invalid_field("metadata", format_args!("has {size} bytes, more than {MOST_METADATA}"))),
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(members) => members.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ORIGIN: Origin<'_> = Origin { tenant: "acme", source: "api" };

    fn sample() -> Value {
        json!({
            "usage_type": "calls", "resource_id": "r1", "value": 1, "idempotency_key": "k",
            "event_timestamp": "2026-01-01T00:00:00Z"
        })
    }

    fn read_value(value: &Value) -> Result<Record> {
        let raw = serde_json::value::to_raw_value(value).unwrap();
        read(raw.get(), ORIGIN, None, 16 * 1024)
    }

    fn with(member: &str, value: Value) -> Value {
        let mut record = sample();
        record[member] = value;
        record
    }

    #[test]
    fn values_are_exact_or_refused() {
        for (json, text) in [
            ("1", "1"),
            ("2.50", "2.5"),
            ("\"2.5\"", "2.5"),
            ("0.1", "0.1"),
            ("-0.0", "0"),
            ("1e3", "1000"),
            ("1.50E-3", "0.0015"),
            ("\"12345678901234567890.12345678\"", "12345678901234567890.12345678"),
            ("9007199254740993", "9007199254740993"),
            ("0e999", "0"),
        ] {
            assert_eq!(decimal(json).unwrap().to_string(), text, "{json}");
        }
        for json in [
            "null",
            "true",
            "[1]",
            "\"\"",
            "\"NaN\"",
            "\"Infinity\"",
            "\"1_000\"",
            "\"+1\"",
            "\"1 \"",
            "1e999999999",
            "1e-2147483648",
            "1e2147483648",
            "1e-300",
            "1234567890123456789012345678901",
            "0.12345678901234567890123456789012",
        ] {
            assert_eq!(decimal(json).unwrap_err().code, Code::ValidationError, "{json}");
        }
    }

    #[test]
    fn the_same_body_is_the_same_however_it_is_written() {
        let body = |member: &str, value: Value| read_value(&with(member, value)).unwrap().body_hash;
        assert_eq!(body("value", json!("2.50")), body("value", json!(2.5)));
        assert_eq!(body("metadata", json!({"a": 1, "b": {"c": 2, "d": 3}})), {
            body("metadata", serde_json::from_str(r#"{"b": {"d": 3, "c": 2}, "a": 1}"#).unwrap())
        });
        let times = ["2026-01-01T01:00:00+01:00", "2026-01-01T00:00:00.0000009Z"];
        assert!(
            times.iter().all(|time| body("event_timestamp", json!(time)) == read_value(&sample()).unwrap().body_hash)
        );
        let different = [("value", json!(2)), ("user_id", json!("u")), ("resource_type", json!("u"))];
        let hashes = different.map(|(member, value)| body(member, value));
        assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (member, value, problem) in [
            ("value", json!("x"), "value: must be a number"),
            ("usage_type", json!(""), "usage_type: must have 1 to 255"),
            ("resource_id", json!("a\0b"), "resource_id: must not contain NUL"),
            ("idempotency_key", json!("k".repeat(256)), "idempotency_key: must have"),
            ("event_timestamp", json!("yesterday"), "event_timestamp: must be a time"),
            ("event_timestamp", json!(17), "event_timestamp: invalid type"),
            ("metric_kind", json!("Counter"), "metric_kind: unknown variant"),
            ("metadata", json!([1]), "metadata: must be an object"),
            ("metadata", json!({"a": ["\0"]}), "metadata: must not contain NUL"),
            ("metadata", json!({"a": "x".repeat(8192)}), "metadata: has 8"),
            ("metadata", json!({"a": [1e22]}), "metadata: 1e+22 is too large to be kept exactly"),
            ("lineage", json!(vec!["x"; 33]), "lineage: must have at most 32"),
            ("tenant_id", json!("other"), "tenant_id: is not the sender's own"),
            ("source_id", json!("other"), "source_id: is not the sender's own"),
            ("colour", json!("red"), "unknown field `colour`"),
        ] {
            let error = read_value(&with(member, value)).unwrap_err();
            assert!(error.message.contains(problem), "{error}");
        }
        let mut short = sample();
        short.as_object_mut().unwrap().remove("value");
        assert!(read_value(&short).unwrap_err().message.contains("missing field `value`"));
        let in_order =
            json!(["api.calls", "vm-1", 1, "2026-01-31T12:00:00Z", "k", null, null, null, null, null, null, null]);
        for no_object in [json!([]), in_order, json!(7), json!("text"), Value::Null] {
            assert_eq!(read_value(&no_object).unwrap_err().message, "a record must be an object", "{no_object}");
        }
        assert!(read_value(&with("metadata", json!({"a": "x".repeat(17_000)}))).unwrap_err().message.contains("bytes"));
    }

    #[test]
    fn a_sender_with_a_user_speaks_for_that_user_only() {
        let read = |record: Value| {
            let raw = serde_json::value::to_raw_value(&record).unwrap();
            super::read(raw.get(), ORIGIN, Some("ann"), 16 * 1024)
        };
        assert_eq!(read(sample()).unwrap().user_id.as_deref(), Some("ann"));
        assert_eq!(read(with("user_id", json!("ann"))).unwrap().user_id.as_deref(), Some("ann"));
        assert_eq!(read(with("user_id", json!("bob"))).unwrap_err().code, Code::AttributionNotAuthorized);
    }

    #[test]
    fn all_forms_of_a_body_and_both_encodings() {
        let one = sample();
        for (body, count) in [(one.clone(), 1), (json!([one, one]), 2), (json!({"records": [one]}), 1), (json!([]), 0)]
        {
            let json = Bytes::from(serde_json::to_vec(&body).unwrap());
            assert_eq!(split(&as_json(Encoding::Json, &json).unwrap()).unwrap().len(), count);
            let packed = Bytes::from(rmp_serde::to_vec_named(&body).unwrap());
            let json = as_json(Encoding::MessagePack, &packed).unwrap();
            let records = split(&json).unwrap();
            assert_eq!(records.len(), count);
            assert!(records.iter().all(|raw| read(raw.get(), ORIGIN, None, 16 * 1024).is_ok()));
        }
        for beside in [json!({"records": [one], "dry_run": true}), json!({"dry_run": true, "records": []})] {
            let refused = split(beside.to_string().as_bytes()).unwrap_err();
            assert!(refused.message.starts_with("dry_run: "), "{refused}");
        }
        assert_eq!(split(b" {\n \"records\" : [ ] } ").unwrap().len(), 0);
        for broken in ["", "7", "{", "[1,", "{\"records\": 7}", "[] x", "nonsense"] {
            assert_eq!(split(broken.as_bytes()).unwrap_err().code, Code::ValidationError, "{broken}");
        }
        let many = json!(vec![1; 1001]).to_string();
        assert!(split(many.as_bytes()).unwrap_err().message.contains("has 1001, more than 1000"));
        assert!(as_json(Encoding::MessagePack, &Bytes::from_static(b"\xc1")).is_err());
        assert!(as_json(Encoding::Json, &Bytes::from(vec![b' '; MOST_BYTES + 1])).is_err());
        // A number that is none has no JSON, and must not spoil its neighbours.
        let nan = rmp_serde::to_vec_named(&[[("value", f64::NAN)]]).unwrap();
        assert!(as_json(Encoding::MessagePack, &nan.into()).is_ok());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::arbitrary::any::<u8>(), 0..200)) {
            let bytes = Bytes::from(bytes);
            for encoding in [Encoding::Json, Encoding::MessagePack] {
                if let Ok(json) = as_json(encoding, &bytes)
                    && let Ok(records) = split(&json)
                {
                    records.iter().for_each(|raw| drop(read(raw.get(), ORIGIN, None, 16 * 1024)));
                }
            }
        }

        #[test]
        fn a_decimal_survives(mantissa in -79_228_162_514_264i64..79_228_162_514_264, scale in 0u32..28) {
            let value = Decimal::new(mantissa, scale);
            proptest::prop_assert_eq!(decimal(&value.to_string()).unwrap(), value);
            proptest::prop_assert_eq!(decimal(&format!("\"{value}\"")).unwrap(), value);
        }
    }
}
