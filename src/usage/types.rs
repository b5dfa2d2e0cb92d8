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
        let schema = schema(&unit.schema)
            .map_err(|problem| Error::new(Code::InvalidSchema, format!("schema: {problem}")).about("schema"))?;
        // What is a record at all is an object, and need not be asked.
        let says_something = |(name, value): (&String, &Value)| match name.as_str() {
            "$schema" | "$id" | "$comment" | "title" | "description" => false,
            "type" => value != "object",
            _ => true,
        };
        let asks_for_nothing = match &unit.schema {
            Value::Object(members) => !members.iter().any(says_something),
            schema => *schema == Value::Bool(true),
        };
        Ok(Self { unit, schema: (!asks_for_nothing).then_some(schema) })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_schema_is_checked_and_asked_unless_it_says_nothing() {
        let asks = |schema: Value| {
            let unit = json!({
                "name": "u", "metric_kind": "gauge", "base_unit": "1", "schema": schema, "allowed_sources": [],
                "priority": "medium", "storage_backend": "postgresql", "retention_days": null,
                "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z",
            });
            Type::new(Arc::new(serde_json::from_value(unit).unwrap())).map(|of_type| of_type.schema.is_some())
        };
        for nothing in [json!(true), json!({}), json!({"type": "object", "$comment": "any", "title": "t"})] {
            assert!(!asks(nothing).unwrap());
        }
        let by_anchor = json!({"$dynamicRef": "#x", "$defs": {"s": {"$dynamicAnchor": "x", "required": ["user_id"]}}});
        for something in [by_anchor, json!({"$ref": "#/$defs/s", "$defs": {"s": {}}}), json!(false)] {
            assert!(asks(something).unwrap());
        }
        for broken in [json!({"$defs": 5}), json!({"$schema": 5}), json!({"$id": 5}), json!({"type": 5})] {
            assert_eq!(asks(broken.clone()).err().map(|error| error.code), Some(Code::InvalidSchema), "{broken}");
        }
    }

    #[test]
    fn every_name_of_a_unit_has_an_id_of_its_own() {
        assert_eq!(registry_id("api_calls").unwrap().as_str(), "api_calls");
        assert_eq!(registry_id("compute.cpu").unwrap().as_str(), "x-636f6d707574652e637075");
        assert_ne!(registry_id("x-636f6d707574652e637075"), registry_id("compute.cpu"));
        assert!(registry_id(&"ü".repeat(200)).is_none());
    }
}
