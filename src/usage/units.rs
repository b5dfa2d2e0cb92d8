//! Registering units and sources.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    Usage,
    audit::Change,
    types::{SourceRecord, Type, registry_id},
};
use crate::{
    api::{
        Call, Context, Handle, Name,
        usage::{
            ChangeUnit, ListSources, ListUnits, MetricKind, RegisterSource, RegisterUnit, Source, Sources, Unit, Units,
        },
    },
    error::{Code, Error, Result},
    registry::Row,
};

/// The one storage backend.
const BACKEND: &str = "postgresql";

/// Bytes of a schema.
const MOST_SCHEMA: usize = 64 * 1024;

const MOST_SOURCES: usize = 1000;

impl Handle<RegisterUnit> for Usage {
    async fn handle(&self, call: Call<RegisterUnit>) -> Result<Unit> {
        let wanted = call.request;
        let Some(id) = registry_id(&wanted.name).filter(|_| is_unit_name(&wanted.name)) else {
            let problem = "must have 1 to 100 letters, digits or _ . : / -";
            return Err(Error::field_as(Code::ValidationError, "name", problem));
        };
        self.reachable()?;
        let Row { record, revision } = self.registry.find(&self.registry.units, &id).await.map_err(unavailable)?;
        if record.is_some() {
            return Err(Error::field_as(Code::UnitNameConflict, "name", format_args!("{} exists", wanted.name)));
        }
        let Some(metric_kind) = MetricKind::from_word(&wanted.metric_kind) else {
            let problem = format_args!("must be counter or gauge, not {:?}", wanted.metric_kind);
            return Err(Error::field_as(Code::InvalidMetricKind, "metric_kind", problem));
        };
        if !(1..=100).contains(&wanted.base_unit.chars().count()) {
            return Err(Error::field_as(Code::ValidationError, "base_unit", "must have 1 to 100 characters"));
        }
        let storage_backend = wanted.storage_backend.unwrap_or_else(|| BACKEND.to_owned());
        let now = self.clock.now();
        let unit = Unit {
            name: wanted.name,
            metric_kind,
            base_unit: wanted.base_unit,
            schema: wanted.schema,
            allowed_sources: wanted.allowed_sources,
            priority: wanted.priority.unwrap_or_default(),
            storage_backend,
            retention_days: wanted.retention_days,
            grace_period: wanted.grace_period,
            future_tolerance: wanted.future_tolerance,
            created_at: now,
            updated_at: now,
        };
        self.check(&unit)?;
        if unit.storage_backend != BACKEND {
            let problem = format_args!("{:?} is not configured; there is {BACKEND}", unit.storage_backend);
            return Err(Error::field_as(Code::StorageBackendNotFound, "storage_backend", problem));
        }
        self.store_unit(unit, revision, "unit-register", &call.context).await
    }
}

impl Handle<ChangeUnit> for Usage {
    async fn handle(&self, call: Call<ChangeUnit>) -> Result<Unit> {
        let wanted = call.request;
        self.reachable()?;
        let id = registry_id(&wanted.name);
        let row = match &id {
            Some(id) => self.registry.find(&self.registry.units, id).await.map_err(unavailable)?,
            None => Row { record: None, revision: 0 },
        };
        let Row { record: Some(known), revision } = row else {
            return Err(Error::new(Code::TypeNotFound, format!("there is no unit {}", wanted.name)));
        };
        let mut unit = Unit::clone(&known);
        unit.schema = wanted.schema.unwrap_or(unit.schema);
        unit.allowed_sources = wanted.allowed_sources.unwrap_or(unit.allowed_sources);
        unit.priority = wanted.priority.unwrap_or(unit.priority);
        unit.retention_days = wanted.retention_days.or(unit.retention_days);
        unit.grace_period = wanted.grace_period.or(unit.grace_period);
        unit.future_tolerance = wanted.future_tolerance.or(unit.future_tolerance);
        unit.updated_at = self.clock.now();
        self.check(&unit)?;
        self.store_unit(unit, revision, "unit-change", &call.context).await
    }
}

impl Usage {
    /// What holds for a new unit and for a changed one.
    fn check(&self, unit: &Unit) -> Result<()> {
        if !unit.schema.is_object() && !unit.schema.is_boolean() {
            return Err(Error::field_as(Code::InvalidSchema, "schema", "must be a JSON Schema"));
        }
        if unit.schema.to_string().len() > MOST_SCHEMA {
            return Err(Error::field_as(Code::InvalidSchema, "schema", "has more than 64 KiB"));
        }
        check_type(&unit.schema)?;
        Type::new(Arc::new(unit.clone()))?;
        if unit.allowed_sources.is_empty() {
            let problem = "must name at least one source";
            return Err(Error::field_as(Code::AllowedSourcesEmpty, "allowed_sources", problem));
        }
        if unit.allowed_sources.len() > MOST_SOURCES {
            return Err(Error::field_as(Code::ValidationError, "allowed_sources", "has more than 1,000 names"));
        }
        if let Some(source) = unit.allowed_sources.iter().find(|source| !self.types.has_source(source)) {
            let problem = format_args!("{source:?} is no registered source");
            return Err(Error::field_as(Code::SourceNotFound, "allowed_sources", problem));
        }
        if let Some(days) = unit.retention_days
            && !(7..=2555).contains(&days)
        {
            let problem = format_args!("must lie between 7 and 2555, is {days}");
            return Err(Error::field_as(Code::RetentionOutOfBounds, "retention_days", problem));
        }
        super::limits::check_time("grace_period", unit.grace_period)?;
        super::limits::check_time("future_tolerance", unit.future_tolerance)
    }

    async fn store_unit(&self, unit: Unit, revision: u64, operation: &'static str, context: &Context) -> Result<Unit> {
        let id = registry_id(&unit.name).ok_or_else(|| Error::internal("a unit without an id"))?;
        let change = Change { operation, tenant: None, details: json!(unit) };
        let stored = self.audited(change, context, self.registry.store(&id, &unit, revision)).await;
        stored.map_err(|error| match (error.code, revision) {
            // Somebody else registered it meanwhile.
            (Code::Conflict, 0) => {
                Error::field_as(Code::UnitNameConflict, "name", format_args!("{} exists", unit.name))
            }
            _ => unavailable(error),
        })?;
        self.events.tell(format_args!("usage.{operation}"), &unit);
        Ok(unit)
    }

    /// Nobody is let in by a registry that was never read.
    fn reachable(&self) -> Result<()> {
        self.registry.ready().map_err(unavailable)
    }
}

impl Handle<ListUnits> for Usage {
    async fn handle(&self, _: Call<ListUnits>) -> Result<Units> {
        self.reachable()?;
        let mut units: Vec<Unit> = self.registry.units.all().iter().map(|(_, unit)| Unit::clone(unit)).collect();
        units.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Units { units })
    }
}

impl Handle<RegisterSource> for Usage {
    async fn handle(&self, call: Call<RegisterSource>) -> Result<Source> {
        self.reachable()?;
        let register = || self.register_source(&call.request.name, &call.context);
        self.registry.until_stored(register).await.map_err(unavailable)
    }
}

impl Usage {
    async fn register_source(&self, name: &Name, context: &Context) -> Result<Source> {
        let Row { record, revision } = self.registry.find(&self.registry.sources, name).await?;
        if let Some(known) = record {
            return Ok(Source { name: name.clone(), created_at: known.created_at, repeated: true });
        }
        let record = SourceRecord { created_at: self.clock.now() };
        let change = Change { operation: "source-register", tenant: None, details: json!({ "name": name }) };
        self.audited(change, context, self.registry.store(name, &record, revision)).await?;
        Ok(Source { name: name.clone(), created_at: record.created_at, repeated: false })
    }
}

impl Handle<ListSources> for Usage {
    async fn handle(&self, _: Call<ListSources>) -> Result<Sources> {
        self.reachable()?;
        let source =
            |(name, record): (Name, Arc<SourceRecord>)| Source { name, created_at: record.created_at, repeated: false };
        Ok(Sources { sources: self.registry.sources.all().into_iter().map(source).collect() })
    }
}

fn is_unit_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:/-".contains(&byte);
    (1..=100).contains(&name.len()) && name.bytes().all(allowed)
}

/// A schema that no record can satisfy is a mistake.
fn check_type(schema: &Value) -> Result<()> {
    let of_object = match schema.get("type") {
        None => schema != &Value::Bool(false),
        Some(Value::Array(types)) => types.iter().any(|one| one == "object"),
        Some(one) => one == "object",
    };
    match of_object {
        true => Ok(()),
        false => Err(Error::field_as(Code::InvalidSchema, "schema", "must be of objects: a record is one")),
    }
}

/// The registry is what units can't do without.
fn unavailable(error: Error) -> Error {
    match error.code {
        Code::Unavailable => {
            Error::new(Code::TypesRegistryUnavailable, "the types registry is unavailable").source(error)
        }
        _ => error,
    }
}
