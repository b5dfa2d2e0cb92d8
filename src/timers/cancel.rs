//! Canceling, one or many.

use std::collections::HashMap;

use serde::Serialize;
use uuid::Uuid;

use super::{
    Timers,
    create::check_count,
    meters,
    store::not_found,
    tend::{TRIES, refused},
};
use crate::{
    api::{
        Call, Handle, Name, Operation,
        timers::{BulkResult, BulkResults, CancelTimer, CancelTimers, CanceledTimer, Id, Status, TimerIds, number},
    },
    error::{Error, Result},
};

/// What is said of a recurring timer that is firing right now.
const UNDER_WAY: &str = "a run is under way and will finish; there will be no further one";

impl Handle<CancelTimer> for Timers {
    async fn handle(&self, call: Call<CancelTimer>) -> Result<CanceledTimer> {
        self.rates.admit(&call.target)?;
        let Id(id) = call.request.id;
        let mut outcomes = self.cancel(&call.target, &[id]).await?;
        let status = outcomes.remove(&id).ok_or_else(not_found)??;
        let note = (status != Status::Canceled).then(|| UNDER_WAY.to_owned());
        Ok(CanceledTimer { id: Id(id), status, note })
    }
}

impl Handle<CancelTimers> for Timers {
    async fn handle(&self, call: Call<CancelTimers>) -> Result<BulkResults> {
        self.rates.admit(&call.target)?;
        let TimerIds { ids } = call.request;
        check_count("ids", ids.len())?;
        let parsed: Vec<Result<Id, _>> = ids.iter().map(|id| id.parse()).collect();
        let known: Vec<Uuid> = parsed.iter().flatten().map(|Id(id)| *id).collect();
        let outcomes = self.cancel(&call.target, &known).await?;
        let result = |(index, id): (usize, Result<Id, &str>)| {
            let outcome = match id {
                Err(problem) => Err(Error::field("id", problem)),
                Ok(Id(id)) => outcomes.get(&id).map_or_else(
                    || Err(not_found()),
                    |outcome| match outcome {
                        Ok(status) => Ok(*status),
                        Err(error) => Err(error.share()),
                    },
                ),
            };
            let (code, message) = match outcome {
                Ok(Status::Canceled) => (0, CancelTimer::INFO.message.to_owned()),
                Ok(_) => (0, UNDER_WAY.to_owned()),
                Err(error) => (number(error.code), error.message.into()),
            };
            BulkResult { index, id: id.ok(), code, message }
        };
        Ok(BulkResults { results: parsed.into_iter().enumerate().map(result).collect() })
    }
}

/// What is told of a timer that was canceled.
#[derive(Serialize)]
struct Told {
    id: Id,
    status: Status,
}

impl Timers {
    /// Cancels what can be canceled, and says of the rest why not. Who is not named in the answer does not exist.
    async fn cancel(&self, tenant: &Name, ids: &[Uuid]) -> Result<HashMap<Uuid, Result<Status>>> {
        let mut outcomes = HashMap::new();
        let mut left = ids.to_vec();
        // One that fails may be pending again before it can be told why it was not canceled.
        for _ in 0..TRIES {
            for (id, status) in self.store.cancel(tenant, &left).await? {
                if status == Status::Canceled {
                    meters::settled(status);
                    self.events.send(format!("timer.{tenant}.canceled"), &Told { id: Id(id), status }).await;
                }
                outcomes.insert(id, Ok(status));
            }
            left.retain(|id| !outcomes.contains_key(id));
            if left.is_empty() {
                break;
            }
            let statuses = self.store.statuses(tenant, &left).await?;
            left.clear();
            for (id, status) in statuses {
                match status {
                    Status::Pending | Status::Paused => left.push(id),
                    status => drop(outcomes.insert(id, Err(refused("cancel", status)))),
                }
            }
            if left.is_empty() {
                break;
            }
        }
        for id in left {
            outcomes.insert(id, Err(Error::unavailable("the timer is firing again and again; cancel it once more")));
        }
        Ok(outcomes)
    }
}
