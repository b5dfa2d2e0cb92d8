//! One key's task: it takes every change that waits, applies them in order to the state that it knows, and writes the result
//! with one compare-and-set. When another instance was first it reads again and applies them anew.
//!
//! Every proposed value carries a fresh nonce, which tells whether a write whose answer was lost was ours. If somebody has
//! written over it meanwhile, the changes count as skipped and are applied anew: numbers are lost that way, but none is given
//! twice.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

use super::{
    State,
    cells::{Older, Tasks, encode, part, read, read_whole, storage_error},
    group::{Change, Group},
};
use crate::{
    error::{Code, Error, Result},
    gathering::Gathering,
    jetstream::{Bucket, CasError, Undecided, Write, pause_before, step_back, until_decided},
};

/// Changes that share one write. An atomic batch may have 1,000 messages: the state, and for each change an answer to be
/// remembered and a part, and some parts more.
const GROUP: usize = 450;

/// A task whose key nobody used for this long ends.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct Cell<S> {
    pub bucket: Bucket,
    pub instance: Arc<str>,
    pub key: String,
    pub deadline: Duration,
    /// The state after our own last write or read, and its revision.
    pub known: Option<(Option<S>, u64)>,
    /// What we knew before we had to read again, and its revision. Its parts are still good.
    pub older: Option<(S, u64)>,
}

impl<S: State> Cell<S> {
    pub async fn run(mut self, waiting: mpsc::Receiver<Box<dyn Change<S>>>, tasks: Tasks<S>) {
        let mut waiting = Gathering::new(waiting, GROUP);
        let mut changes = Vec::new();
        loop {
            match timeout(IDLE, waiting.first(&mut changes)).await {
                Ok(0) => return,
                Ok(_) => {
                    waiting.rest(&mut changes).await;
                    self.commit(Group::new(std::mem::take(&mut changes))).await;
                    // Nobody's key needs no task: callers may ask for any number of names that don't exist.
                    if !matches!(self.known, Some((Some(_), _))) {
                        self.leave(&mut waiting, &tasks);
                    }
                }
                Err(_) => self.leave(&mut waiting, &tasks),
            }
        }
    }

    /// Takes no more changes. What was sent before is still received, and answered in the next rounds.
    fn leave(&self, waiting: &mut Gathering<Box<dyn Change<S>>>, tasks: &Tasks<S>) {
        waiting.close();
        let mut tasks = tasks.lock().expect("no panic while the tasks are held");
        // Unless somebody has put a new task in our place already.
        if tasks.get(&self.key).is_some_and(mpsc::Sender::is_closed) {
            tasks.remove(&self.key);
        }
    }

    /// Commits the group, however many rounds it takes, and answers everyone in it.
    async fn commit(&mut self, mut group: Group<S>) {
        let began = Instant::now();
        let deadline = began + self.deadline;
        metrics::histogram!("tidemark_watermark_group_size").record(group.changes.len() as f64);
        let mut conflicts = 0;
        while !group.changes.is_empty() {
            if let Err(error) = self.round(&mut group, deadline, &mut conflicts).await {
                self.known = None;
                error.log("watermark.commit");
                metrics::counter!("tidemark_watermark_failures_total").increment(group.changes.len() as u64);
                group.fail_all(&error);
            }
        }
        metrics::histogram!("tidemark_watermark_commit_seconds").record(began.elapsed().as_secs_f64());
    }

    /// One attempt. Empties the group when it is decided; leaves it for another round after a conflict.
    async fn round(&mut self, group: &mut Group<S>, deadline: Instant, conflicts: &mut u32) -> Result<()> {
        let (before, revision, fresh) = match self.known.take() {
            Some((state, revision)) => (state, revision, false),
            None => {
                let (state, revision) = self.read_until(deadline).await?;
                self.older = None;
                (state, revision, true)
            }
        };
        let mut after = before.clone();
        let mut writes = Vec::new();
        for change in &mut group.changes {
            change.apply(&mut after);
            writes.extend(change.record()?);
        }
        let parts = after.as_mut().map(S::take_new_parts).unwrap_or_default();
        writes.extend(parts.into_iter().map(|(name, value)| Write::to(part(&self.key, &name), value)));
        if after == before && writes.is_empty() {
            if fresh {
                self.known = Some((before, revision));
                group.succeed_all(revision);
            } else {
                // What we knew may be old, and "nothing to change" untrue: read, and apply again.
                self.older = before.map(|before| (before, revision));
            }
            return Ok(());
        }
        let Some(state) = &after else {
            return Err(Error::internal("a change answered without leaving a state"));
        };
        let request = group.changes.iter().find_map(|change| change.request());
        let (nonce, value) = encode(state, self.instance.clone(), request)?;
        // The counter comes last: the ack's sequence is its revision.
        writes.push(Write { expected: Some(revision), ..Write::to(self.key.clone(), value) });
        if let Some(revision) = self.write_until(&writes, &nonce, deadline).await? {
            self.known = Some((after, revision));
            group.succeed_all(revision);
            return Ok(());
        }
        metrics::counter!("tidemark_watermark_conflicts_total").increment(1);
        self.older = before.map(|before| (before, revision));
        if Instant::now() >= deadline {
            return Err(Error::unavailable("too many instances change this key at once; ask again"));
        }
        // Either the counter moved, or a record exists by now. Those that have one leave the group with it.
        if writes.len() > 1 {
            group.answer_recorded(&self.bucket).await;
        }
        *conflicts += 1;
        step_back(*conflicts).await;
        Ok(())
    }

    async fn read_until(&self, deadline: Instant) -> Result<(Option<S>, u64)> {
        loop {
            let older = self.older.as_ref().map(|(state, revision)| Older { state, revision: *revision });
            match read_whole(&self.bucket, &self.key, older).await {
                Ok(Some((state, revision))) => return Ok((Some(state), revision)),
                Ok(None) => return Ok((None, 0)),
                // A broken counter does not mend by itself; a server that is away may come back.
                Err(error) if error.code == Code::Unavailable && pause_before(deadline).await => {
                    error.log("watermark.read");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes until the outcome is known. None is a conflict: nothing of ours is stored, or it was written over.
    async fn write_until(&self, writes: &[Write], nonce: &str, deadline: Instant) -> Result<Option<u64>> {
        let write = async || {
            let written = self.bucket.write(writes).await;
            written.inspect_err(|error| {
                if matches!(error, CasError::NotStored(_) | CasError::Unknown(_)) {
                    storage_error("write");
                }
            })
        };
        let find = async || {
            let found = read::<S>(&self.bucket, &self.key).await?;
            Ok(found.filter(|(found, ..)| found == nonce).map(|(_, _, revision)| revision))
        };
        let decided = until_decided(deadline, write, find).await;
        decided.map_err(|Undecided { in_doubt, source }| {
            let problem = match in_doubt {
                true => "whether the counters were written is not known yet",
                false => "the counters can't be written",
            };
            Error::unavailable(problem).source(source)
        })
    }
}
