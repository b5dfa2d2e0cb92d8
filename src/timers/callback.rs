//! What a callback may be: checked when a timer is set, so that it does not fail for that when it fires.

use std::collections::BTreeMap;

use http::{HeaderName, HeaderValue};
use serde_json::Value;
use url::Url;

use crate::{
    api::{
        Name, altered,
        timers::{Callback, CallbackType, HttpCallback, NatsCallback},
    },
    config::Config,
    error::{Error, Result},
    jetstream::declarations,
};

/// Nobody needs more, and a deep value costs stack wherever it goes.
const DEEPEST: usize = 64;

const LONGEST_URL: usize = 2048;
const LONGEST_SUBJECT: usize = 255;
const MOST_HEADERS: usize = 50;
const LONGEST_HEADER: usize = 8192;

/// What the protocol or we set ourselves.
const OURS: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "traceparent",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "webhook-id",
    "webhook-signature",
    "webhook-timestamp",
];

/// What all NATS callbacks share a bound by.
pub const NATS: &str = "nats";

/// The rules of a deployment.
pub struct Rules {
    payload_limit: usize,
    /// First tokens that nobody may publish to.
    reserved: [String; 3],
    /// The subjects of our own streams.
    streams: Vec<String>,
    /// What tenants may publish to, where that is said.
    allowed: Vec<(Name, Vec<String>)>,
}

impl Rules {
    pub fn new(config: &Config) -> Self {
        let subjects = |declaration: crate::jetstream::Declaration| declaration.subjects();
        let allowed = config.timers.tenants.iter();
        Self {
            payload_limit: config.timers.payload_limit,
            reserved: [
                config.nats.prefix.to_string(),
                config.usage.subject.to_string(),
                format!("{}-rejected", config.usage.subject),
            ],
            streams: declarations(config).into_iter().flat_map(subjects).collect(),
            allowed: allowed.filter_map(|(name, tenant)| Some((name.clone(), tenant.subjects.clone()?))).collect(),
        }
    }

    /// Checks a callback. The answer is its destination: what shares a bound with it.
    pub fn check(&self, tenant: &Name, callback: &Callback) -> Result<String> {
        match callback {
            Callback::Http(http) => self.check_http(http),
            Callback::Nats(nats) => self.check_nats(tenant, nats).map(|()| NATS.to_owned()),
        }
    }

    fn check_http(&self, http: &HttpCallback) -> Result<String> {
        let field = |problem: &str| Err(Error::field("callback.url", problem));
        let url = match Url::parse(&http.url) {
            Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => url,
            _ => return field("must be a valid HTTP or HTTPS URL"),
        };
        if http.url.len() > LONGEST_URL {
            return field(&format!("must not be longer than {LONGEST_URL} bytes"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return field("must not carry a user or password: use callback.headers, which are kept secret");
        }
        for (name, value) in checked(&http.headers)? {
            let field = |problem: String| Err(Error::field(&format!("callback.headers.{name}"), problem));
            let Ok(parsed) = HeaderName::try_from(name) else { return field("is not a valid header name".into()) };
            if HeaderValue::try_from(value).is_err() {
                return field("is not a valid header value".into());
            }
            let lower = parsed.as_str();
            if OURS.contains(&lower) || lower.starts_with("proxy-") {
                return field("is set by the platform or the protocol".into());
            }
            if lower == "content-type" && !value.to_ascii_lowercase().starts_with("application/json") {
                return field("must be application/json: payloads are JSON".into());
            }
        }
        self.check_value("callback.payload", http.payload.as_ref())?;
        let (host, port) = (url.host_str().unwrap_or_default(), url.port_or_known_default().unwrap_or_default());
        Ok(format!("{host}:{port}"))
    }

    fn check_nats(&self, tenant: &Name, nats: &NatsCallback) -> Result<()> {
        let topic = nats.topic.as_str();
        let field = |problem: &str| Err(Error::field("callback.topic", problem));
        let wild = |token: &str| token.is_empty() || token == "*" || token == ">";
        if topic.is_empty() || topic.len() > LONGEST_SUBJECT || topic.split('.').any(wild) {
            return field("must be a NATS subject without wildcards, up to 255 bytes");
        }
        if topic.chars().any(|one| one.is_whitespace() || one.is_control()) {
            return field("must not contain spaces or control characters");
        }
        let first = topic.split('.').next().unwrap_or_default();
        let ours = first.starts_with(['$', '_']) || self.reserved.iter().any(|reserved| reserved == first);
        if ours || self.streams.iter().any(|pattern| covers(pattern, topic)) {
            return field("is a subject of the service itself");
        }
        let allowed = self.allowed.iter().find(|(name, _)| name == tenant);
        if allowed.is_some_and(|(_, patterns)| !patterns.iter().any(|pattern| covers(pattern, topic))) {
            return field("is not among the subjects that this tenant may name");
        }
        if nats.key.as_ref().is_some_and(|key| key.len() > LONGEST_HEADER || !is_one_line(key)) {
            return Err(Error::field("callback.key", "must be one line of at most 8 KiB"));
        }
        for (name, value) in checked(&nats.headers)? {
            let field = |problem: &str| Err(Error::field(&format!("callback.headers.{name}"), problem));
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':') {
                return field("is not a valid header name");
            }
            let lower = name.to_ascii_lowercase();
            if lower.starts_with("nats-") || lower.starts_with("tidemark-") {
                return field("is set by the platform or the server");
            }
            if !is_one_line(value) {
                return field("is not a valid header value");
            }
        }
        self.check_value("callback.payload", nats.payload.as_ref())
    }

    /// Whether a value is one that can be kept and sent as it is.
    pub fn check_value(&self, field: &str, value: Option<&Value>) -> Result<()> {
        let Some(value) = value else { return Ok(()) };
        check_depth(field, value, 0)?;
        if let Some(number) = altered(value) {
            return Err(Error::field(field, format!("{number} is too large to be kept exactly: send it as text")));
        }
        let size = serde_json::to_string(value).map_err(Error::internal)?.len();
        match size > self.payload_limit {
            true => Err(Error::field(field, format!("is larger than {} bytes of JSON", self.payload_limit))),
            false => Ok(()),
        }
    }
}

pub fn kind(callback: &Callback) -> CallbackType {
    match callback {
        Callback::Http(_) => CallbackType::Http,
        Callback::Nats(_) => CallbackType::Nats,
    }
}

/// The same with the values of its headers hidden.
pub fn redacted(mut callback: Callback) -> Callback {
    let (Callback::Http(HttpCallback { headers, .. }) | Callback::Nats(NatsCallback { headers, .. })) = &mut callback;
    for value in headers.iter_mut().flat_map(BTreeMap::values_mut) {
        *value = "[redacted]".to_owned();
    }
    callback
}

fn checked(headers: &Option<BTreeMap<String, String>>) -> Result<impl Iterator<Item = (&str, &str)>> {
    let headers = || headers.iter().flatten();
    if headers().count() > MOST_HEADERS {
        return Err(Error::field("callback.headers", format!("must not be more than {MOST_HEADERS}")));
    }
    if let Some((name, _)) = headers().find(|(name, value)| name.len() + value.len() > LONGEST_HEADER) {
        return Err(Error::field("callback.headers", format!("{name} is longer than {LONGEST_HEADER} bytes")));
    }
    Ok(headers().map(|(name, value)| (name.as_str(), value.as_str())))
}

fn is_one_line(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

fn check_depth(field: &str, value: &Value, depth: usize) -> Result<()> {
    if depth > DEEPEST {
        return Err(Error::field(field, format!("is nested deeper than {DEEPEST} levels")));
    }
    match value {
        Value::Array(values) => values.iter().try_for_each(|value| check_depth(field, value, depth + 1)),
        Value::Object(members) => members.values().try_for_each(|value| check_depth(field, value, depth + 1)),
        _ => Ok(()),
    }
}

/// Whether a pattern with wildcards covers a subject.
fn covers(pattern: &str, subject: &str) -> bool {
    let (mut pattern, mut subject) = (pattern.split('.'), subject.split('.'));
    loop {
        match (pattern.next(), subject.next()) {
            (Some(">"), Some(_)) => return true,
            (Some(wanted), Some(found)) if wanted == "*" || wanted == found => {}
            (None, None) => return true,
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(callback: Value) -> Result<String> {
        let file = "[timers.tenants.acme]\nsubjects = ['acme.>', 'shared.*']";
        let config = Config::from_parts(Some(file), Default::default()).unwrap();
        let callback = serde_json::from_value(callback).unwrap();
        Rules::new(&config).check(&"acme".parse().unwrap(), &callback)
    }

    fn http(url: &str) -> Result<String> {
        check(json!({ "type": "http", "url": url }))
    }

    fn nats(topic: &str) -> Result<String> {
        let config = Config::from_parts(None, Default::default()).unwrap();
        let callback = serde_json::from_value(json!({ "type": "nats", "topic": topic })).unwrap();
        Rules::new(&config).check(&"acme".parse().unwrap(), &callback)
    }

    #[test]
    fn a_url_is_http_and_its_destination_is_host_and_port() {
        assert_eq!(http("https://api.example.com/webhook?x=1").unwrap(), "api.example.com:443");
        assert_eq!(http("http://EXAMPLE.com:8080").unwrap(), "example.com:8080");
        for bad in ["", "nonsense", "ftp://example.com", "http://", "/webhook", "http://user:secret@example.com/"] {
            assert!(http(bad).unwrap_err().message.starts_with("callback.url"), "{bad}");
        }
        assert!(http(&format!("http://example.com/{}", "x".repeat(3000))).is_err());
    }

    #[test]
    fn headers_are_checked_by_name_and_value() {
        let with = |name: &str, value: &str| {
            check(json!({ "type": "http", "url": "http://example.com", "headers": { name: value } }))
        };
        for (name, value) in [("Authorization", "Bearer x"), ("content-type", "application/json; charset=utf-8")] {
            with(name, value).unwrap();
        }
        for (name, value) in [
            ("bad name", "x"),
            ("", "x"),
            ("X-A", "a\r\nX-B: b"),
            ("Host", "x"),
            ("Content-Type", "text/plain"),
            ("Webhook-Signature", "v1,x"),
        ] {
            let error = with(name, value).unwrap_err();
            assert!(error.message.starts_with(&format!("callback.headers.{name}")), "{name}: {error}");
        }
        let on_nats =
            |name: &str, value: &str| check(json!({ "type": "nats", "topic": "acme.x", "headers": { name: value } }));
        on_nats("X-Event-Type", "x").unwrap();
        for (name, value) in
            [("Nats-Msg-Id", "x"), ("nats-ttl", "1"), ("a b", "x"), ("A", "b\nc"), ("Tidemark-Key", "x")]
        {
            assert!(on_nats(name, value).is_err(), "{name}");
        }
    }

    #[test]
    fn subjects_of_ours_and_of_others_are_refused() {
        for good in ["events.timer.triggered", "a", "tmx.y", "Usage.x"] {
            assert_eq!(nats(good).unwrap(), NATS, "{good}");
        }
        for bad in [
            "",
            ".",
            "a..b",
            "a.*",
            ">",
            "a b",
            "a\n",
            "$JS.API.STREAM.DELETE.X",
            "_INBOX.x",
            "tm.id.increment.x",
            "usage.acme.x",
            "usage-rejected.a.b",
            "tm_timers.wake.1",
            "tm_stages.allocated",
        ] {
            assert!(nats(bad).unwrap_err().message.starts_with("callback.topic"), "{bad}");
        }
        let allowed = |topic: &str| check(json!({ "type": "nats", "topic": topic })).is_ok();
        assert!(allowed("acme.a.b") && allowed("shared.x"));
        assert!(!allowed("acme") && !allowed("shared.x.y") && !allowed("other.x"));
    }

    #[test]
    fn what_can_not_be_kept_is_refused() {
        let payload = |payload: Value| check(json!({ "type": "nats", "topic": "acme.x", "payload": payload }));
        payload(json!({ "n": u64::MAX, "x": 0.1, "deep": [[[[1]]]] })).unwrap();
        let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
        for bad in [deep, json!(1e300), json!("x".repeat(300_000))] {
            assert!(payload(bad).unwrap_err().message.starts_with("callback.payload"));
        }
    }
}
