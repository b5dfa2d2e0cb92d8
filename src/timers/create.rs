//! Setting timers, one or many.

use super::{
    Timers,
    plan::{Identity, Plan},
    store::Inserted,
};
use crate::{
    api::{
        Call, Context, Handle, Name, Operation,
        timers::{
            BulkResult, BulkResults, CreateTimer, CreateTimers, Id, MOST_IN_BULK, NewTimer, NewTimers, TimerSummary,
            number,
        },
    },
    error::{Error, Result},
};

impl Handle<CreateTimer> for Timers {
    async fn handle(&self, call: Call<CreateTimer>) -> Result<TimerSummary> {
        self.rates.admit(&call.target)?;
        match self.plan(&call.target, call.request, &call.context)? {
            Ok(plan) => {
                let mut kept = self.keep(vec![plan]).await?;
                kept.pop().ok_or_else(|| Error::internal("an insert without an answer"))?
            }
            Err(refused) => self.repeated(&call.target, refused).await,
        }
    }
}

/// A request that can't be planned now, but may have been before: the time that it names passes.
struct Refused {
    error: Error,
    identity: Option<Identity>,
}

impl Handle<CreateTimers> for Timers {
    async fn handle(&self, call: Call<CreateTimers>) -> Result<BulkResults> {
        self.rates.admit(&call.target)?;
        let NewTimers { timers } = call.request;
        check_count("timers", timers.len())?;
        // A key names one timer, and there are many.
        if call.context.idempotency_key.is_some() {
            return Err(Error::field("Idempotency-Key", "is for single timers: give each its idempotency_key"));
        }
        let mut outcomes: Vec<Option<Result<TimerSummary>>> = Vec::with_capacity(timers.len());
        let (mut plans, mut places) = (Vec::new(), Vec::new());
        for (index, timer) in timers.into_iter().enumerate() {
            match self.plan_one(&call.target, timer, &call.context) {
                Ok(Ok(plan)) => {
                    plans.push(plan);
                    places.push(index);
                    outcomes.push(None);
                }
                Ok(Err(refused)) => outcomes.push(Some(self.repeated(&call.target, refused).await)),
                Err(error) => outcomes.push(Some(Err(error))),
            }
        }
        if !plans.is_empty() {
            for (place, outcome) in places.into_iter().zip(self.keep(plans).await?) {
                outcomes[place] = Some(outcome);
            }
        }
        let result = |(index, outcome): (usize, Option<Result<TimerSummary>>)| match outcome {
            Some(Ok(timer)) => {
                let message = if timer.repeated { "success" } else { CreateTimer::INFO.message };
                BulkResult { index, id: Some(timer.id), code: 0, message: message.into() }
            }
            Some(Err(error)) => {
                // The id under which a timer may exist, or does.
                let id = error.details.as_ref().and_then(|details| details["id"].as_str()?.parse::<Id>().ok());
                BulkResult { index, id, code: number(error.code), message: error.message.into() }
            }
            None => BulkResult { index, id: None, code: 1, message: "was not tried".into() },
        };
        Ok(BulkResults { results: outcomes.into_iter().enumerate().map(result).collect() })
    }
}

impl Timers {
    fn plan_one(&self, tenant: &Name, timer: serde_json::Value, context: &Context) -> Result<Result<Plan, Refused>> {
        let wanted: NewTimer = match timer.is_object() {
            true => crate::api::named(timer)?,
            false => return Err(Error::invalid("must be an object")),
        };
        self.plan(tenant, wanted, context)
    }

    fn plan(&self, tenant: &Name, wanted: NewTimer, context: &Context) -> Result<Result<Plan, Refused>> {
        let identity = Identity::of(&wanted, context)?;
        let planned = self.planner.plan(tenant, wanted, identity.as_ref(), context.trace, self.clock.now());
        Ok(planned.map_err(|error| Refused { error, identity }))
    }

    /// The timer that the same request has set before, or why it is refused.
    async fn repeated(&self, tenant: &Name, refused: Refused) -> Result<TimerSummary> {
        let Refused { error, identity: Some(identity) } = refused else { return Err(refused.error) };
        match self.store.find_by_key(tenant, &identity.key).await? {
            Some(row) if row.body_hash.as_ref() == Some(&identity.body_hash) => Ok(row.repeated()),
            _ => Err(error),
        }
    }

    /// Keeps timers. The answers are in the same order.
    async fn keep(&self, plans: Vec<Plan>) -> Result<Vec<Result<TimerSummary>>> {
        let inserted = self.inserter.insert(plans).await?;
        Ok(inserted.into_iter().map(|one| one.map(|Inserted { summary, .. }| summary)).collect())
    }
}

pub(super) fn check_count(field: &str, count: usize) -> Result<()> {
    match count {
        0 => Err(Error::field(field, "must not be empty")),
        count if count > MOST_IN_BULK => {
            Err(Error::field(field, format!("must not be more than {MOST_IN_BULK}, are {count}")))
        }
        _ => Ok(()),
    }
}
