//! Changing timers that exist: update, fire now, retry, pause, resume.

use uuid::Uuid;

use super::{
    Timers,
    plan::Options,
    store::{Entry, TimerRow, Transition},
};
use crate::{
    api::{
        Call, Handle, Name, Operation,
        timers::{
            ChangedTimer, FireTimer, Id, PauseTimer, ResumeTimer, RetryTimer, Status, TimerId, TimerSummary,
            UpdateTimer,
        },
    },
    error::{Code, Error, Result},
};

/// How often a change is tried whose timer was changed by somebody else meanwhile.
const TRIES: usize = 5;

impl Handle<UpdateTimer> for Timers {
    async fn handle(&self, call: Call<UpdateTimer>) -> Result<TimerSummary> {
        self.rates.admit(&call.target)?;
        let Id(id) = call.request.id;
        for _ in 0..TRIES {
            let mut row = self.store.get(&call.target, id).await?;
            let was = row.status;
            if !matches!(was, Status::Pending | Status::Paused) {
                return Err(refused("update", was));
            }
            let destination = self.merge(&call.target, &mut row, call.request.clone())?;
            if let Some(row) = self.store.replace(&call.target, &row, &destination, was).await? {
                return Ok(self.goes_on(row, &destination));
            }
        }
        Err(changed_meanwhile())
    }
}

impl Timers {
    /// Puts what is given over what was there, by the rules for new timers.
    fn merge(&self, tenant: &Name, row: &mut TimerRow, change: ChangedTimer) -> Result<String> {
        let now = self.clock.now();
        if let Some(callback) = change.callback {
            row.callback = callback;
        }
        let destination = self.planner.rules.check(tenant, &row.callback)?;
        if change.metadata.is_some() {
            row.metadata = change.metadata;
            self.planner.check_metadata(row.metadata.as_ref())?;
        }
        let beats_anew = change.recurrence.is_some() || (change.timezone.is_some() && row.options.recurrence.is_some());
        let max_lateness = change.max_lateness.map(|text| super::plan::duration("max_lateness", &text)).transpose()?;
        let options = &mut row.options;
        *options = Options {
            timezone: change.timezone.or(options.timezone.take()),
            retry: change.retry.or(options.retry.take()),
            recurrence: change.recurrence.or(options.recurrence.take()),
            began: options.began,
            on_late: change.on_late.unwrap_or(options.on_late),
            max_lateness: max_lateness.or(options.max_lateness),
            capture_response: change.capture_response.unwrap_or(options.capture_response),
            expect: change.expect.or(options.expect.take()),
        };
        self.planner.check_options(options, &row.callback)?;
        let asked = self.planner.earliest(change.execute_at.as_deref(), change.execute_in.as_deref(), options, now)?;
        if asked.is_some() || beats_anew {
            row.execute_at = self.planner.first_run(asked, options, now)?;
            row.due_at = row.execute_at;
        }
        Ok(destination)
    }

    /// A timer that is due at another moment from now on.
    fn goes_on(&self, row: TimerRow, destination: &str) -> TimerSummary {
        if row.status == Status::Pending {
            self.scheduler.expect(vec![Entry { due_at: row.due_at, id: row.id, destination: destination.into() }]);
        }
        row.summary()
    }

    /// Makes a transition, or says why it is not possible.
    async fn transition<O: Operation<Target = Name, Request = TimerId>>(
        &self,
        call: Call<O>,
        transition: Transition,
        word: &str,
    ) -> Result<TimerSummary> {
        self.rates.admit(&call.target)?;
        let Id(id) = call.request.id;
        let Some(row) = self.store.transition(&call.target, id, transition).await? else {
            let row = self.store.get(&call.target, id).await?;
            return Err(match transition {
                Transition::Pause if row.status == Status::Pending => {
                    Error::invalid("cannot pause timer that does not recur")
                }
                _ => refused(word, row.status),
            });
        };
        let destination = self.planner.rules.check(&call.target, &row.callback)?;
        Ok(self.goes_on(row, &destination))
    }
}

impl Handle<FireTimer> for Timers {
    async fn handle(&self, call: Call<FireTimer>) -> Result<TimerSummary> {
        self.transition(call, Transition::Fire, "fire").await
    }
}

impl Handle<RetryTimer> for Timers {
    async fn handle(&self, call: Call<RetryTimer>) -> Result<TimerSummary> {
        self.transition(call, Transition::Retry, "retry").await
    }
}

impl Handle<PauseTimer> for Timers {
    async fn handle(&self, call: Call<PauseTimer>) -> Result<TimerSummary> {
        self.transition(call, Transition::Pause, "pause").await
    }
}

impl Handle<ResumeTimer> for Timers {
    async fn handle(&self, call: Call<ResumeTimer>) -> Result<TimerSummary> {
        self.rates.admit(&call.target)?;
        let id: Uuid = call.request.id.0;
        let now = self.clock.now();
        for _ in 0..TRIES {
            let mut row = self.store.get(&call.target, id).await?;
            if row.status != Status::Paused {
                return Err(refused("resume", row.status));
            }
            if row.execute_at <= now {
                // What was missed meanwhile was meant to be missed.
                let next = row.options.next_run(row.run - 1, row.execute_at, now);
                row.execute_at = next.ok_or_else(|| Error::invalid("cannot resume timer whose recurrence is over"))?;
            }
            row.due_at = row.execute_at;
            row.status = Status::Pending;
            let destination = self.planner.rules.check(&call.target, &row.callback)?;
            if let Some(row) = self.store.replace(&call.target, &row, &destination, Status::Paused).await? {
                return Ok(self.goes_on(row, &destination));
            }
        }
        Err(changed_meanwhile())
    }
}

/// As the timer platform says it.
fn refused(word: &str, status: Status) -> Error {
    Error::invalid(format!("cannot {word} timer with status '{status}'"))
}

fn changed_meanwhile() -> Error {
    Error::new(Code::Conflict, "the timer was changed by others at the same moment; look again and repeat")
}
