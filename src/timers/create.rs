//! Setting timers, one or many.

use super::{
    Timers,
    plan::Plan,
    store::{Entry, Inserted},
};
use crate::{
    api::{
        Call, Context, Handle, Name,
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
        let plan = self.planner.plan(&call.target, call.request, &call.context, self.clock.now())?;
        let mut inserted = self.keep(vec![plan]).await?;
        inserted.pop().ok_or_else(|| Error::internal("an insert without an answer"))?
    }
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
                Ok(plan) => {
                    plans.push(plan);
                    places.push(index);
                    outcomes.push(None);
                }
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
                let message = if timer.repeated { "success" } else { "timer created successfully" };
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
    fn plan_one(&self, tenant: &Name, timer: serde_json::Value, context: &Context) -> Result<Plan> {
        let wanted: NewTimer = match timer.is_object() {
            true => crate::api::named(timer)?,
            false => return Err(Error::invalid("must be an object")),
        };
        self.planner.plan(tenant, wanted, context, self.clock.now())
    }

    /// Keeps timers, and sees to it that they are fired.
    async fn keep(&self, plans: Vec<Plan>) -> Result<Vec<Result<TimerSummary>>> {
        let inserted = self.inserter.insert(plans).await?;
        let new = inserted.iter().filter_map(|one| one.as_ref().ok()?.plan.as_ref());
        let entries: Vec<Entry> = new
            .map(|plan| Entry { due_at: plan.execute_at, id: plan.id, destination: plan.destination.as_str().into() })
            .collect();
        metrics::counter!("tidemark_timers_created_total").increment(entries.len() as u64);
        self.scheduler.expect(entries);
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
