//! Changing timers that exist: update, fire now, retry, pause, resume.

use super::{
    Timers,
    plan::Options,
    store::{TimerRow, Transition},
};
use crate::{
    api::{
        Call, Handle, Name, Operation,
        timers::{
            Callback, ChangedTimer, FireTimer, Id, OnLate, PauseTimer, ResumeTimer, RetryTimer, Status, TimerId,
            TimerSummary, UpdateTimer,
        },
    },
    error::{Code, Error, Result},
};

/// How often a change is tried whose timer was changed by somebody else meanwhile.
pub(super) const TRIES: usize = 5;

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
            self.merge(&call.target, &mut row, call.request.clone())?;
            if let Some(changed) = self.replace(row, was).await? {
                return Ok(changed);
            }
        }
        Err(changed_meanwhile())
    }
}

impl Timers {
    /// Puts what is given over what was there, by the rules for new timers.
    fn merge(&self, tenant: &Name, row: &mut TimerRow, change: ChangedTimer) -> Result<()> {
        let now = self.clock.now();
        if let Some(callback) = change.callback {
            row.callback = callback;
        }
        row.destination = self.planner.rules.check(tenant, &row.callback)?.into();
        if change.metadata.is_some() {
            row.metadata = change.metadata;
            self.planner.check_metadata(row.metadata.as_ref())?;
        }
        let (retries, tries_anew) =
            (change.retry.is_some(), change.execute_at.is_some() || change.execute_in.is_some());
        let (rhythm, ends_anew) = (row.options.rhythm(), change.recurrence.is_some());
        // What the caller once asked for holds until it has come.
        let not_before = if rhythm.is_some() { row.options.not_before } else { Some(row.execute_at) };
        let max_lateness = change.max_lateness.map(|text| super::plan::duration("max_lateness", &text)).transpose()?;
        let answers = matches!(row.callback, Callback::Http(_));
        let options = &mut row.options;
        *options = Options {
            timezone: change.timezone.or(options.timezone.take()),
            retry: change.retry.or(options.retry.take()),
            recurrence: change.recurrence.or(options.recurrence.take()),
            not_before: options.not_before,
            began: options.began,
            on_late: change.on_late.unwrap_or(options.on_late),
            // What has no meaning any more goes with what gave it one.
            max_lateness: max_lateness.or(options.max_lateness.filter(|_| change.on_late != Some(OnLate::Fire))),
            capture_response: change.capture_response.unwrap_or(options.capture_response && answers),
            expect: change.expect.or(options.expect.take().filter(|_| answers)),
        };
        self.planner.check_options(options, &row.callback)?;
        let asked = self.planner.earliest(change.execute_at.as_deref(), change.execute_in.as_deref(), options, now)?;
        let beats_anew = options.recurrence.is_some() && options.rhythm() != rhythm;
        if asked.is_some() || beats_anew {
            let earliest = asked.or(not_before.filter(|moment| *moment > now));
            row.execute_at = self.planner.first_run(earliest, options, now)?;
            row.due_at = row.execute_at;
        } else if ends_anew {
            self.planner.check_end(options, row.execute_at)?;
        }
        if retries || tries_anew || beats_anew {
            row.attempts_allowed = row.attempt + row.options.max_attempts();
        }
        Ok(())
    }

    /// Writes a changed timer over the one that was read. None if that is not what it was any more.
    async fn replace(&self, row: TimerRow, was: Status) -> Result<Option<TimerSummary>> {
        let store = self.store.clone();
        self.carry_out(async move { store.replace(&row, was).await }).await
    }

    /// Makes a change. A timer that is due at another moment from then on is also expected, even if the caller has left
    /// meanwhile.
    async fn carry_out(
        &self,
        change: impl Future<Output = Result<Option<TimerRow>>> + Send + 'static,
    ) -> Result<Option<TimerSummary>> {
        let scheduler = self.scheduler.clone();
        let changing = tokio::spawn(async move {
            let changed = change.await?;
            if let Some(row) = changed.as_ref().filter(|row| row.status == Status::Pending) {
                scheduler.expect(vec![row.entry()]);
            }
            Ok(changed.map(|row| row.summary()))
        });
        changing.await.map_err(Error::internal)?
    }

    /// Makes a transition, or says why it is not possible.
    async fn transition<O: Operation<Target = Name, Request = TimerId>>(
        &self,
        call: Call<O>,
        transition: Transition,
        word: &str,
    ) -> Result<TimerSummary> {
        self.rates.admit(&call.target)?;
        let (tenant, Id(id)) = (call.target, call.request.id);
        for _ in 0..TRIES {
            let (store, whose) = (self.store.clone(), tenant.clone());
            let change = async move { store.transition(&whose, id, transition).await };
            if let Some(changed) = self.carry_out(change).await? {
                return Ok(changed);
            }
            let row = self.store.get(&tenant, id).await?;
            match (transition, row.status) {
                (Transition::Pause, Status::Pending | Status::Executing) if row.options.recurrence.is_none() => {
                    return Err(Error::invalid("cannot pause timer that does not recur"));
                }
                // It was something else a moment ago.
                (Transition::Fire, Status::Pending) | (Transition::Pause, Status::Pending) => {}
                (Transition::Retry, Status::Failed) => {}
                (_, status) => return Err(refused(word, status)),
            }
        }
        match transition {
            // It only looks as if it would recur.
            Transition::Pause => Err(Error::invalid("cannot pause timer that is canceled after this run")),
            Transition::Fire | Transition::Retry => Err(changed_meanwhile()),
        }
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
        let Id(id) = call.request.id;
        let now = self.clock.now();
        for _ in 0..TRIES {
            let mut row = self.store.get(&call.target, id).await?;
            if row.status != Status::Paused {
                return Err(refused("resume", row.status));
            }
            // A single one that is overdue fires at once: it was paused by a restore, and somebody has decided.
            if row.execute_at <= now && row.options.recurrence.is_some() {
                // What was missed meanwhile was meant to be missed.
                let next = row.options.next_run(row.run - 1, row.execute_at, now);
                row.execute_at = next.ok_or_else(|| Error::invalid("cannot resume timer whose recurrence is over"))?;
            }
            row.due_at = row.execute_at.max(now);
            row.status = Status::Pending;
            row.destination = self.planner.rules.check(&call.target, &row.callback)?.into();
            row.attempts_allowed = row.attempt + row.options.max_attempts();
            if let Some(changed) = self.replace(row, Status::Paused).await? {
                return Ok(changed);
            }
        }
        Err(changed_meanwhile())
    }
}

/// As the timer platform says it.
pub(super) fn refused(word: &str, status: Status) -> Error {
    Error::invalid(format!("cannot {word} timer with status '{status}'"))
}

fn changed_meanwhile() -> Error {
    Error::new(Code::Conflict, "the timer was changed by others at the same moment; look again and repeat")
}
