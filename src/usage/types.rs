//! The types registry: units that records can be of, and the sources that they are bound to.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use jsonschema::Validator;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    api::{Name, usage::Unit},
    error::{Code, Error, Result},
    hex,
    registry::{Record, Registry},
    schema::schema,
};

impl Record for Unit {
    const TABLE: &'static str = "unit";
}

/// A source that units can be bound to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SourceRecord {
    pub created_at: DateTime<Utc>,
}

impl Record for SourceRecord {
    const TABLE: &'static str = "source";
}

/// A unit with what is needed to check records of it.
pub struct Type {
    pub unit: Arc<Unit>,
    /// None where the schema asks for nothing.
    pub schema: Option<Validator>,
}

/// What a unit is called in the registry, whose ids are tokens of subjects and names of units need not be.
pub fn registry_id(unit: &str) -> Option<Name> {
    const ESCAPED: &str = "x-";
    match unit.parse() {
        Ok(name) if !unit.starts_with(ESCAPED) => Some(name),
        _ => format!("{ESCAPED}{}", hex::encode(unit.as_bytes())).parse().ok(),
    }
}

/// How long an unknown type is not asked for again: registered elsewhere, it comes by itself.
const UNKNOWN: Duration = Duration::from_secs(1);

/// Unknown names that are remembered. Whoever invents them by the thousand gets no memory for it.
const MOST_UNKNOWN: usize = 10_000;

/// The registered types, made ready for use.
pub struct Types {
    registry: Registry,
    ready: Mutex<HashMap<String, (u64, Arc<Type>)>>,
    unknown: Mutex<HashMap<String, Instant>>,
}

impl Types {
    pub fn new(registry: Registry) -> Self {
        Self { registry, ready: Mutex::default(), unknown: Mutex::default() }
    }

    /// A type by its name. One that this instance does not know may have been registered a moment ago, elsewhere.
    pub async fn find(&self, name: &str) -> Result<Option<Arc<Type>>> {
        let Some(id) = registry_id(name) else { return Ok(None) };
        let mut row = self.registry.units.get(id.as_str());
        if row.record.is_none() && !self.is_unknown(name) {
            row = self.registry.find(&self.registry.units, &id).await?;
        }
        let Some(unit) = row.record else {
            self.note_unknown(name);
            return Ok(None);
        };
        let mut ready = self.ready.lock().expect(UNBROKEN);
        match ready.get(name) {
            Some((revision, known)) if *revision == row.revision => Ok(Some(known.clone())),
            _ => {
                let made = Arc::new(Type::new(unit)?);
                ready.insert(name.to_owned(), (row.revision, made.clone()));
                Ok(Some(made))
            }
        }
    }

    fn is_unknown(&self, name: &str) -> bool {
        self.unknown.lock().expect(UNBROKEN).get(name).is_some_and(|since| since.elapsed() < UNKNOWN)
    }

    fn note_unknown(&self, name: &str) {
        let mut unknown = self.unknown.lock().expect(UNBROKEN);
        if unknown.len() >= MOST_UNKNOWN {
            unknown.clear();
        }
        unknown.insert(name.to_owned(), Instant::now());
    }

    /// Whether a source is registered: by name, or by an API key for it.
    pub fn has_source(&self, source: &str) -> bool {
        let of_a_key = |(_, key): &(Name, Arc<crate::registry::keys::ApiKey>)| {
            key.source.as_ref().is_some_and(|name| name.as_str() == source)
        };
        source == crate::access::DEFAULT_TENANT
            || self.registry.sources.get(source).record.is_some()
            || self.registry.keys.all().iter().any(of_a_key)
    }
}

const UNBROKEN: &str = "no panic while types are held";

impl Type {
    pub fn new(unit: Arc<Unit>) -> Result<Self> {
        let asks_for_nothing = match &unit.schema {
            Value::Bool(true) => true,
            Value::Object(members) => {
                members.iter().all(|(name, value)| name.starts_with('$') || name == "type" && value == "object")
                    && !members.contains_key("$ref")
            }
            _ => false,
        };
        let schema = match asks_for_nothing {
            true => None,
            false => Some(
                schema(&unit.schema)
                    .map_err(|problem| Error::new(Code::InvalidSchema, format!("schema: {problem}")).about("schema"))?,
            ),
        };
        Ok(Self { unit, schema })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_a_unit_has_an_id_of_its_own() {
        assert_eq!(registry_id("api_calls").unwrap().as_str(), "api_calls");
        assert_eq!(registry_id("compute.cpu").unwrap().as_str(), "x-636f6d707574652e637075");
        assert_ne!(registry_id("x-636f6d707574652e637075"), registry_id("compute.cpu"));
        assert!(registry_id(&"ü".repeat(200)).is_none());
    }
}
