//! The types registry: units that records can be of, and the sources that they are bound to.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
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

/// The registered types, made ready for use.
pub struct Types {
    registry: Registry,
    ready: Mutex<HashMap<String, (u64, Arc<Type>)>>,
}

impl Types {
    pub fn new(registry: Registry) -> Self {
        Self { registry, ready: Mutex::default() }
    }

    /// A type by its name, as far as this instance knows. An error is a unit that can't be used.
    pub fn known(&self, name: &str) -> Result<Option<Arc<Type>>> {
        let Some(id) = registry_id(name) else { return Ok(None) };
        let row = self.registry.units.get(id.as_str());
        let Some(unit) = row.record else { return Ok(None) };
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

    /// Makes sure that what was registered until now is known: "there is no such type" would be untrue of one that was
    /// registered elsewhere a moment ago.
    pub async fn catch_up(&self) -> Result<()> {
        self.registry.catch_up().await
    }

    /// Whether a source is registered. The default one always is.
    pub fn has_source(&self, source: &str) -> bool {
        source == crate::access::DEFAULT_TENANT || self.registry.sources.get(source).record.is_some()
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
