//! The streams and buckets that we declare in `streams/`: to JetStream what migrations are to SQL.
//!
//! A file has the server's own configuration fields. Applying creates what is missing and updates what differs; a change
//! that would lose data is left alone and explained. Fields that a file does not name are the operator's.

use async_nats::jetstream::{Context, ErrorCode, context::RequestError, response::Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::Config;

const FILES: &[(&str, &str)] = &[
    ("counters.toml", include_str!("../../streams/counters.toml")),
    ("leases.toml", include_str!("../../streams/leases.toml")),
    ("registry.toml", include_str!("../../streams/registry.toml")),
    ("stage_contents.toml", include_str!("../../streams/stage_contents.toml")),
    ("stage_limits.toml", include_str!("../../streams/stage_limits.toml")),
    ("stages.toml", include_str!("../../streams/stages.toml")),
    ("timers.toml", include_str!("../../streams/timers.toml")),
    ("usage.toml", include_str!("../../streams/usage.toml")),
    ("usage_limits.toml", include_str!("../../streams/usage_limits.toml")),
];

/// One file of `streams/`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Declaration {
    /// Whether losing it would repeat ids or forget callers.
    pub holds_identity: bool,
    /// Fields that are set in `tidemark.toml`: a change of them is meant, even if something is lost by it.
    #[serde(default)]
    settings: Vec<String>,
    pub(crate) config: Map<String, Value>,
    /// Its durable consumers.
    #[serde(default)]
    consumers: Vec<Map<String, Value>>,
}

impl Declaration {
    pub fn name(&self) -> &str {
        self.config.get("name").and_then(Value::as_str).unwrap_or_default()
    }

    /// Whether it is gone when its server is restarted.
    pub fn is_in_memory(&self) -> bool {
        self.config.get("storage").and_then(Value::as_str) == Some("memory")
    }

    /// Whether the server sends what it stores at its moment.
    pub fn has_schedules(&self) -> bool {
        self.config.get("allow_msg_schedules") == Some(&Value::Bool(true))
    }

    /// What it stores.
    pub fn subjects(&self) -> Vec<String> {
        let subjects = self.config.get("subjects").and_then(Value::as_array);
        subjects.into_iter().flatten().filter_map(|subject| Some(subject.as_str()?.to_owned())).collect()
    }
}

/// How the live stream differs from its declaration.
#[derive(Debug)]
pub struct Drift {
    pub stream: String,
    pub missing: bool,
    pub changes: Vec<Change>,
}

impl Drift {
    /// What there is to say, a line per difference, and whether a difference remains. `applied` says that what could be
    /// mended was.
    pub fn describe(&self, applied: bool) -> (String, bool) {
        let name = &self.stream;
        match self.missing {
            true if applied => return (format!("{name}: created"), false),
            true => return (format!("{name}: is missing"), true),
            false if self.changes.is_empty() => return (format!("{name}: as declared"), false),
            false => {}
        }
        let line = |Change { field, live, declared, loses }: &Change| match loses {
            None if applied => format!("{name}: {field} changed from {live} to {declared}"),
            None => format!("{name}: {field} is {live}, declared is {declared}"),
            Some(why) => format!("{name}: {field} is {live}, declared is {declared}, not applied: {why}"),
        };
        let remains = !applied || self.changes.iter().any(|change| change.loses.is_some());
        (self.changes.iter().map(line).collect::<Vec<_>>().join("\n"), remains)
    }
}

#[derive(Debug)]
pub struct Change {
    pub field: String,
    pub live: Value,
    pub declared: Value,
    /// What would be lost by making the live stream as declared.
    pub loses: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("JetStream did not answer: {0}; it answers those who have the service's own credentials")]
    Request(#[from] RequestError),
    #[error("JetStream refused {action} of {stream}: {error}")]
    Refused { action: &'static str, stream: String, error: async_nats::jetstream::Error },
    #[error("{0}")]
    Identity(String),
    #[error("PostgreSQL: {0}")]
    Database(#[from] sqlx::Error),
}

/// All declarations, with the settings of a configuration in them.
pub fn declarations(config: &Config) -> Vec<Declaration> {
    let stages = &config.stages;
    let settings = [
        ("{prefix}", config.nats.prefix.to_string()),
        // Where nothing is limited nobody asks the stream, but it can't do without a limit.
        ("{stages.rate_limit.requests}", stages.rate_limit.requests.max(1).to_string()),
        ("{stages.rate_limit.window}", stages.rate_limit.window.as_nanos().to_string()),
        ("{usage.subject}", config.usage.subject.to_string()),
        ("{usage.shards}", config.usage.shards.to_string()),
        ("{usage.backlog_bytes}", config.usage.backlog_bytes.to_string()),
        ("{usage.backlog_per_source}", config.usage.backlog_per_source.to_string()),
    ];
    let declare = |(file, text): &(&str, &str)| {
        let text = settings.iter().fold(text.to_string(), |text, (name, value)| text.replace(name, value));
        let mut declaration: Declaration =
            toml::from_str(&text).unwrap_or_else(|error| panic!("streams/{file}: {error}"));
        declaration.config.insert("num_replicas".into(), config.jetstream.replicas.into());
        declaration
    };
    FILES.iter().map(declare).collect()
}

/// Compares the live stream with its declaration.
pub async fn diff(jetstream: &Context, declaration: &Declaration) -> Result<Drift, ApplyError> {
    let live = live(jetstream, declaration.name()).await?;
    let mut drift = compare(declaration, live.as_ref());
    if live.is_some() {
        for consumer in &declaration.consumers {
            drift.changes.extend(consumer_changes(jetstream, declaration.name(), consumer).await?);
        }
    }
    Ok(drift)
}

/// Creates the stream, or brings it up to its declaration as far as nothing is lost. Returns what it found.
pub async fn apply(jetstream: &Context, declaration: &Declaration) -> Result<Drift, ApplyError> {
    let name = declaration.name();
    let live = live(jetstream, name).await?;
    let mut drift = compare(declaration, live.as_ref());
    let refused = |action, error| ApplyError::Refused { action, stream: name.to_owned(), error };
    match live {
        None => {
            let config = Value::Object(declaration.config.clone());
            let created = jetstream.request(format!("STREAM.CREATE.{name}"), &config).await?;
            let _: Value = outcome(created).map_err(|error| refused("the creation", error))?;
        }
        Some(live) if drift.changes.iter().any(|change| change.loses.is_none()) => {
            let mut config = live.config;
            for change in drift.changes.iter().filter(|change| change.loses.is_none()) {
                config.insert(change.field.clone(), change.declared.clone());
            }
            let updated = jetstream.request(format!("STREAM.UPDATE.{name}"), &Value::Object(config)).await?;
            let _: Value = outcome(updated).map_err(|error| refused("the update", error))?;
        }
        Some(_) => {}
    }
    for consumer in &declaration.consumers {
        let changes = consumer_changes(jetstream, name, consumer).await?;
        if !changes.is_empty() {
            // Creates it, or brings it up to its declaration.
            let request = json!({ "stream_name": name, "config": consumer });
            let subject = format!("CONSUMER.CREATE.{name}.{}", durable_name(consumer));
            let made = jetstream.request(subject, &request).await?;
            let _: Value = outcome(made).map_err(|error| refused("a consumer", error))?;
        }
        if !drift.missing {
            drift.changes.extend(changes);
        }
    }
    Ok(drift)
}

/// What the server says of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Live {
    pub(super) created: String,
    pub(super) state: LiveState,
    config: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct LiveState {
    #[serde(rename = "last_seq")]
    pub(super) last_sequence: i64,
}

pub(super) async fn live(jetstream: &Context, name: &str) -> Result<Option<Live>, ApplyError> {
    let info = jetstream.request(format!("STREAM.INFO.{name}"), &json!({})).await?;
    match outcome(info) {
        Ok(live) => Ok(Some(live)),
        Err(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
        Err(error) => Err(ApplyError::Refused { action: "the inspection", stream: name.to_owned(), error }),
    }
}

/// How a live consumer differs from its declaration.
async fn consumer_changes(
    jetstream: &Context,
    stream: &str,
    declared: &Map<String, Value>,
) -> Result<Vec<Change>, ApplyError> {
    let name = durable_name(declared);
    let info: Response<Value> = jetstream.request(format!("CONSUMER.INFO.{stream}.{name}"), &json!({})).await?;
    let live = match outcome(info) {
        Ok(live) => live["config"].clone(),
        Err(error) if error.error_code() == ErrorCode::CONSUMER_NOT_FOUND => Value::Null,
        Err(error) => {
            return Err(ApplyError::Refused { action: "the inspection", stream: stream.to_owned(), error });
        }
    };
    let differs = |(field, declared): (&String, &Value)| {
        let live = live.get(field).cloned().unwrap_or(Value::Null);
        (live != *declared).then(|| Change {
            field: format!("consumer {name}, {field}"),
            live,
            declared: declared.clone(),
            loses: None,
        })
    };
    Ok(declared.iter().filter_map(differs).collect())
}

fn durable_name(consumer: &Map<String, Value>) -> &str {
    consumer.get("durable_name").and_then(Value::as_str).unwrap_or_default()
}

fn outcome<T>(response: Response<T>) -> Result<T, async_nats::jetstream::Error> {
    match response {
        Response::Ok(value) => Ok(value),
        Response::Err { error } => Err(error),
    }
}

fn compare(declaration: &Declaration, live: Option<&Live>) -> Drift {
    let stream = declaration.name().to_owned();
    let Some(live) = live else {
        return Drift { stream, missing: true, changes: Vec::new() };
    };
    let changes = declaration
        .config
        .iter()
        .filter_map(|(field, declared)| {
            // The server leaves out what is empty or false.
            let live = live.config.get(field).cloned().unwrap_or_else(|| nothing_like(declared));
            let meant = declaration.settings.contains(field);
            (live != *declared).then(|| Change {
                loses: if meant { None } else { loss(field, &live, declared) },
                field: field.clone(),
                declared: declared.clone(),
                live,
            })
        })
        .collect();
    Drift { stream, missing: false, changes }
}

fn nothing_like(value: &Value) -> Value {
    match value {
        Value::Bool(_) => Value::Bool(false),
        Value::Number(_) => 0.into(),
        Value::String(_) => "".into(),
        Value::Array(_) => json!([]),
        Value::Object(_) => json!({}),
        Value::Null => Value::Null,
    }
}

/// What is lost when the field changes from live to declared.
fn loss(field: &str, live: &Value, declared: &Value) -> Option<String> {
    // Zero and minus one mean "no limit".
    let limit = |value: &Value| value.as_i64().filter(|limit| *limit > 0).unwrap_or(i64::MAX);
    let tighter = limit(declared) < limit(live);
    match field {
        "max_age" | "max_bytes" | "max_msgs" | "max_msgs_per_subject" if tighter => {
            Some("the tighter limit would delete stored messages".into())
        }
        "duplicate_window" if tighter => Some("repeats inside the old window would be taken for new".into()),
        "num_replicas" if tighter => Some("copies would be given up".into()),
        "discard" if declared == "old" => Some("a full stream would delete its oldest messages".into()),
        "retention" | "storage" => Some("the server can't change it; the stream would have to be made anew".into()),
        "subjects" => {
            let declared = declared.as_array()?;
            let dropped: Vec<_> = live.as_array()?.iter().filter(|subject| !declared.contains(subject)).collect();
            let dropped = (!dropped.is_empty()).then(|| Value::from_iter(dropped.into_iter().cloned()))?;
            Some(format!("what is published to {dropped} would no longer be stored"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_declared_and_named_after_the_prefix() {
        let mut files: Vec<String> = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/streams"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, FILES.iter().map(|(file, _)| *file).collect::<Vec<_>>());
        let mut config = Config::from_parts(None, Default::default()).unwrap();
        config.nats.prefix = "blue".parse().unwrap();
        config.jetstream.replicas = 3;
        for declaration in declarations(&config) {
            assert!(declaration.name().contains("blue"), "{}", declaration.name());
            assert_eq!(declaration.config["num_replicas"], 3);
            let stray = declaration.settings.iter().find(|field| !declaration.config.contains_key(*field));
            assert_eq!(stray, None, "{}", declaration.name());
        }
    }

    #[test]
    fn what_is_set_in_the_configuration_is_changed_in_both_directions() {
        let mut config = Config::from_parts(None, Default::default()).unwrap();
        let live = |config: &Config| {
            let declaration = declarations(config).into_iter().find(|one| one.name().ends_with("_USAGE")).unwrap();
            let live = json!({ "created": "", "state": { "last_seq": 0 }, "config": declaration.config });
            (declaration, serde_json::from_value::<Live>(live).unwrap())
        };
        let (_, before) = live(&config);
        config.usage.backlog_bytes /= 2;
        config.usage.backlog_per_source *= 2;
        let (after, _) = live(&config);
        let changes = compare(&after, Some(&before)).changes;
        let kept: Vec<_> = changes.iter().map(|change| (&*change.field, change.loses.is_some())).collect();
        assert_eq!(kept, [("max_bytes", false), ("max_msgs_per_subject", false)]);
    }

    #[test]
    fn a_change_that_loses_data_is_known() {
        for (field, live, declared, loses) in [
            ("max_age", json!(0), json!(60), true),
            ("max_age", json!(60), json!(0), false),
            ("max_bytes", json!(-1), json!(1000), true),
            ("max_msgs_per_subject", json!(1), json!(5), false),
            ("max_msgs_per_subject", json!(5), json!(1), true),
            ("duplicate_window", json!(120), json!(60), true),
            ("num_replicas", json!(3), json!(1), true),
            ("num_replicas", json!(1), json!(3), false),
            ("discard", json!("new"), json!("old"), true),
            ("storage", json!("memory"), json!("file"), true),
            ("subjects", json!(["a", "b"]), json!(["a"]), true),
            ("subjects", json!(["a"]), json!(["a", "b"]), false),
            ("description", json!("x"), json!("y"), false),
        ] {
            assert_eq!(loss(field, &live, &declared).is_some(), loses, "{field}: {live} to {declared}");
        }
    }
}
