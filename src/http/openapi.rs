//! The OpenAPI document, from the declarations.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use super::{
    bridge::{SOURCE, TENANT},
    dialect::REPEATED,
};
use crate::{
    api::{self, Info, Method, Operation, Route, Scope, Surface},
    error,
};

/// The whole document.
pub fn document() -> Value {
    struct Document {
        paths: BTreeMap<&'static str, Map<String, Value>>,
        schemas: BTreeMap<String, Value>,
    }

    impl Document {
        fn schema<T: ToSchema>(&mut self) -> Value {
            let schema = json!(T::schema());
            let mut schemas = Vec::new();
            T::schemas(&mut schemas);
            schemas.into_iter().for_each(|(name, schema)| self.add(name, json!(schema)));
            // A list has no name of its own.
            if schema["type"] == "array" {
                return schema;
            }
            self.add(T::name().into_owned(), schema);
            json!({ "$ref": format!("#/components/schemas/{}", T::name()) })
        }

        fn add(&mut self, name: String, schema: Value) {
            if let Some(known) = self.schemas.get(&name) {
                debug_assert_eq!(*known, schema, "two types are called {name}");
            }
            self.schemas.insert(name, schema);
        }
    }

    impl api::Visitor for Document {
        fn visit<O: Operation>(&mut self) {
            let request = self.schema::<O::Request>();
            let response = self.schema::<O::Response>();
            let fields = json!(O::Request::schema());
            for route in O::INFO.routes {
                let entry = describe(&O::INFO, route, &request, &fields, &response);
                self.paths.entry(route.path).or_default().insert(verb(route.method), entry);
            }
        }
    }

    let mut document = Document { paths: BTreeMap::new(), schemas: BTreeMap::new() };
    document.schema::<error::Body>();
    api::visit(&mut document);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tidemark",
            "version": env!("CARGO_PKG_VERSION"),
            "description": env!("CARGO_PKG_DESCRIPTION"),
        },
        "paths": document.paths,
        "components": {
            "schemas": document.schemas,
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer", "description": "Admin token or API key" },
                "apiKey": { "type": "apiKey", "in": "header", "name": "X-API-Key" },
            },
        },
    })
}

fn describe(info: &Info, route: &Route, request: &Value, fields: &Value, response: &Value) -> Value {
    let mut operation = json!({
        "operationId": operation_id(info, route),
        "tags": [info.service],
        "summary": info.summary(),
        "description": description(info),
        "x-nats-subject": info.pattern(&"tm".parse().expect("a valid name")),
        "responses": {
            info.success.to_string(): answer("Success", "application/json", enveloped(info, info.message, response)),
            "default": answer("Error", failure_type(info.surface), failure(info.surface)),
        },
    });
    if info.repeated != info.success {
        let again = answer("The same answer again", "application/json", enveloped(info, REPEATED, response));
        operation["responses"][info.repeated.to_string()] = again;
    }
    if info.deferred != info.success {
        let later = answer("Kept, and done later", "application/json", enveloped(info, info.message, response));
        operation["responses"][info.deferred.to_string()] = later;
    }
    if let Some(preview) = info.preview {
        let shown = answer("What would be done", "application/json", enveloped(info, info.message, response));
        operation["responses"][preview.to_string()] = shown;
    }
    if !info.surface.open_by_default() {
        operation["security"] = json!([{ "bearer": [] }, { "apiKey": [] }]);
    }
    let in_path = |name: &str| route.path.contains(&format!("{{{name}}}"));
    let is_the_callers = |name: &str| matches!(name, TENANT | SOURCE) && !in_path(name);
    let parameter = |name: &str, schema: &Value, required: bool| {
        let place = if in_path(name) { "path" } else { "query" };
        json!({
            "name": name,
            "in": place,
            "required": required || in_path(name),
            "description": schema.get("description"),
            "schema": schema,
        })
    };
    let properties = fields.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    let is_required = |name: &str| {
        fields.get("required").and_then(Value::as_array).is_some_and(|required| required.iter().any(|one| one == name))
    };
    let name_schema = json!({ "type": "string", "pattern": "^[A-Za-z0-9_-]{1,255}$" });
    let with_body = matches!(route.method, Method::Post | Method::Put | Method::Patch);
    let mut parameters: Vec<Value> = info
        .target
        .iter()
        .filter(|name| !is_the_callers(name) && (!with_body || in_path(name)))
        .map(|name| parameter(name, &name_schema, true))
        .collect();
    parameters.extend(
        properties
            .iter()
            .filter(|(name, _)| !with_body || in_path(name))
            .map(|(name, schema)| parameter(name, schema, is_required(name))),
    );
    parameters.extend(
        info.header
            .map(|name| json!({ "name": name, "in": "header", "required": true, "schema": { "type": "string" } })),
    );
    operation["parameters"] = parameters.into();
    if with_body {
        let targets: Vec<_> = info.target.iter().filter(|name| !is_the_callers(name) && !in_path(name)).collect();
        let request = match properties.keys().any(|name| in_path(name)) {
            true => without(fields, in_path),
            false => request.clone(),
        };
        let schema = if targets.is_empty() {
            request
        } else {
            let names: Map<_, _> = targets.iter().map(|name| (name.to_string(), name_schema.clone())).collect();
            json!({ "allOf": [{ "type": "object", "properties": names, "required": targets }, request] })
        };
        let content: Map<_, _> =
            content_types(info.surface).iter().map(|kind| (kind.to_string(), json!({ "schema": schema }))).collect();
        operation["requestBody"] = json!({ "content": content });
    }
    operation
}

/// A schema of an object without some of its members.
fn without(fields: &Value, left_out: impl Fn(&str) -> bool) -> Value {
    let mut schema = fields.clone();
    if let Some(properties) = schema["properties"].as_object_mut() {
        properties.retain(|name, _| !left_out(name));
    }
    if let Some(required) = schema["required"].as_array_mut() {
        required.retain(|name| !name.as_str().is_some_and(&left_out));
    }
    schema
}

/// One operation may have two routes, and the document wants an id for each.
fn operation_id(info: &Info, route: &Route) -> String {
    match route.method {
        first if info.routes.first().is_some_and(|route| route.method == first) => info.name(),
        other => format!("{}.{}", info.name(), verb(other)),
    }
}

fn description(info: &Info) -> String {
    let scope = match info.scope {
        Scope::Operator => "For the operator: the admin token, or the default tenant's key with the role `admin`.",
        Scope::Mint => "For the admin token, or an API key with the role `mint`.",
        Scope::Timers => {
            "For an API key with the role `timers`, on its own tenant; the admin token is the default tenant's."
        }
        Scope::Secrets => "For an API key with the role `secrets`, on its own tenant.",
        Scope::Key => "For any API key.",
        Scope::Usage => {
            "For an API key with the role `usage`, on its own tenant; the admin token is the default tenant's."
        }
        Scope::Elevated => "For an API key with the role `elevated`, on its own tenant.",
        Scope::Tenant => "For the operator, or a key of that tenant with the role `admin`.",
    };
    format!("{}\n\n{scope}", info.about.trim())
}

fn answer(description: &str, content_type: &str, schema: Value) -> Value {
    json!({ "description": description, "content": { content_type: { "schema": schema } } })
}

fn failure_type(surface: Surface) -> &'static str {
    if surface == Surface::Pools { "text/plain" } else { "application/json" }
}

/// How the body of a request may be written, as callers of each surface know it.
fn content_types(surface: Surface) -> &'static [&'static str] {
    match surface {
        Surface::Pools => &["application/x-www-form-urlencoded", "multipart/form-data", "application/json"],
        _ => &["application/json"],
    }
}

fn enveloped(info: &Info, message: &str, data: &Value) -> Value {
    match info.surface {
        Surface::Ids | Surface::Timers => object(json!({
            "code": { "type": "integer", "const": 0 },
            "message": { "type": "string", "const": message },
            "data": data,
        })),
        _ => data.clone(),
    }
}

fn failure(surface: Surface) -> Value {
    let text = json!({ "type": "string" });
    match surface {
        Surface::Ids | Surface::Timers => {
            object(json!({ "code": { "type": "integer" }, "message": text, "data": { "type": "null" } }))
        }
        Surface::Stages => object(json!({ "error": text })),
        Surface::Pools => text,
        Surface::Usage => object(json!({ "code": text, "message": text, "details": {} })),
        Surface::Native => json!({ "$ref": "#/components/schemas/Body" }),
    }
}

fn object(properties: Value) -> Value {
    json!({ "type": "object", "properties": properties })
}

fn verb(method: Method) -> String {
    method.as_str().to_ascii_lowercase()
}
