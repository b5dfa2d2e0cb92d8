//! JSON Schemas that callers give us.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

/// A schema to check with. Its patterns run in linear time, and it may not refer to anything outside.
pub fn schema(schema: &Value) -> Result<Validator, String> {
    let options = jsonschema::options().with_pattern_options(PatternOptions::regex());
    options.build(schema).map_err(|error| format!("is no valid JSON Schema: {error}"))
}
