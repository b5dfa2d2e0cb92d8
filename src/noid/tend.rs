//! What operators do with a pool: make it, open and close it, and keep it clear of ids that are in use elsewhere.

use super::{CheckScope, Pools, Template, describe, pool::Pool};
use crate::{
    api::{
        self, Call, Handle,
        noid::{
            AdvancePool, ClosePool, CreatePool, ExcludeNoids, GetPool, MOST_EXCLUDED, OpenPool, SetLowWater, SomeIds,
            ValidateNoid, Validity,
        },
    },
    error::{Code, Error, Result},
};

impl Handle<CreatePool> for Pools {
    async fn handle(&self, call: Call<CreatePool>) -> Result<api::noid::Pool> {
        let wanted = call.request;
        if wanted.template.is_empty() {
            return Err(Error::invalid("missing arguments: template").about("template"));
        }
        // A name that is taken is said before anything about the template.
        match self.read(&call.target).await {
            Ok(_) => return Err(super::taken()),
            Err(error) if error.code == Code::NotFound => {}
            Err(error) => return Err(error),
        }
        let (template, position) = understand(&wanted.template, wanted.check_scope)?;
        check_low_water(&template, wanted.low_water)?;
        let pool = Pool::new(template, position, wanted.low_water, self.clock.now());
        self.create(call.target, call.context.request_id(), pool).await
    }
}

impl Handle<GetPool> for Pools {
    async fn handle(&self, call: Call<GetPool>) -> Result<api::noid::Pool> {
        let pool = self.read(&call.target).await?;
        if pool.has_news() {
            self.announcer.announce(&call.target);
        }
        Ok(describe(call.target, &pool))
    }
}

impl Handle<OpenPool> for Pools {
    async fn handle(&self, call: Call<OpenPool>) -> Result<api::noid::Pool> {
        let open = |pool: &mut Pool| {
            pool.open();
            Ok(())
        };
        self.change(call.target, call.context.request_id(), open).await
    }
}

impl Handle<ClosePool> for Pools {
    async fn handle(&self, call: Call<ClosePool>) -> Result<api::noid::Pool> {
        let close = |pool: &mut Pool| {
            pool.closed = true;
            Ok(())
        };
        self.change(call.target, call.context.request_id(), close).await
    }
}

impl Handle<AdvancePool> for Pools {
    async fn handle(&self, call: Call<AdvancePool>) -> Result<api::noid::Pool> {
        let id = required(call.request.id)?;
        let now = self.clock.now();
        let advance = move |pool: &mut Pool| {
            let number = pool.template.number(id.as_bytes()).ok_or_else(foreign)?;
            pool.advance_past(number, now);
            Ok(())
        };
        self.change(call.target, call.context.request_id(), advance).await
    }
}

impl Handle<ExcludeNoids> for Pools {
    async fn handle(&self, call: Call<ExcludeNoids>) -> Result<api::noid::Pool> {
        let SomeIds { ids, mut numbers } = call.request;
        let count = ids.len() + numbers.len();
        if !(1..=MOST_EXCLUDED).contains(&count) {
            return Err(Error::field("ids", format!("must be 1 to {MOST_EXCLUDED} ids, are {count}")));
        }
        // Outside the change, which everybody waits for: the template of a pool stays what it is.
        let template = self.read(&call.target).await?.template;
        check_numbers("numbers", &template, &numbers)?;
        for (index, id) in ids.iter().enumerate() {
            let problem = || Error::field(&format!("ids[{index}]"), format!("{id:?} is not an id of this pool"));
            numbers.push(template.number(id.as_bytes()).ok_or_else(problem)?);
        }
        self.change(call.target, call.context.request_id(), move |pool| pool.exclude(&numbers)).await
    }
}

impl Handle<SetLowWater> for Pools {
    async fn handle(&self, call: Call<SetLowWater>) -> Result<api::noid::Pool> {
        let low_water = call.request.low_water;
        let set = move |pool: &mut Pool| {
            check_low_water(&pool.template, low_water)?;
            pool.set_low_water(low_water);
            Ok(())
        };
        self.change(call.target, call.context.request_id(), set).await
    }
}

impl Handle<ValidateNoid> for Pools {
    async fn handle(&self, call: Call<ValidateNoid>) -> Result<Validity> {
        let id = required(call.request.id)?;
        let pool = self.read(&call.target).await?;
        let number = match call.request.lenient {
            true => pool.template.number_without_hyphens(&id),
            false => pool.template.number(id.as_bytes()),
        };
        Ok(Validity {
            valid: number.is_some(),
            number: number.map_or(-1, |number| number as i64),
            used: number.is_some_and(|number| number < pool.position),
            id,
        })
    }
}

/// A template and its counter, with the scope of its check character.
pub(super) fn understand(text: &str, scope: CheckScope) -> Result<(Template, u64)> {
    let (template, position) =
        Template::parse(text).map_err(|error| Error::invalid(error.to_string()).about("template"))?;
    let template = template.with_check_scope(scope).map_err(|problem| Error::field("check_scope", problem))?;
    Ok((template, position))
}

pub(super) fn check_low_water(template: &Template, low_water: Option<u64>) -> Result<()> {
    match low_water {
        Some(_) if template.size().is_none() => Err(Error::field("low_water", "a pool without an end is never low")),
        _ => Ok(()),
    }
}

/// Numbers that a template has ids for.
pub(super) fn check_numbers(field: &str, template: &Template, numbers: &[u64]) -> Result<()> {
    match numbers.iter().find(|number| **number >= template.end()) {
        Some(beyond) => Err(Error::field(field, format!("{beyond} lies beyond the last id"))),
        None => Ok(()),
    }
}

fn required(id: String) -> Result<String> {
    if id.is_empty() { Err(Error::invalid("id parameter is required").about("id")) } else { Ok(id) }
}

fn foreign() -> Error {
    Error::invalid("Id is invalid for this counter").about("id")
}
