//! Group commit: all callers that wait for a key share one synced write.
//!
//! Each key in use has one task. It takes every change that waits, applies them in order to the state that it knows, and
//! writes the result with one compare-and-set. When another instance was first it reads again and applies them anew.
//!
//! A write whose answer is lost may have happened or not, and may even happen later. Every proposed value carries a fresh
//! nonce, and the very same bytes are sent again under the same expected revision: at most one of the copies lands, and
//! the nonce tells whether it was ours. If somebody has written over it meanwhile, the changes count as skipped and are
//! applied anew: numbers are lost that way, but none is given twice.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};

use super::{Bucket, Once, Write};
use crate::{
    error::{Code, Error, Result},
    jetstream::CasError,
};

/// Changes that share one write: one less than an atomic batch may have messages, for the counter itself.
const GROUP: usize = 999;

/// Changes that may wait for one key before callers have to.
const QUEUE: usize = 4096;

/// A task whose key nobody used for this long ends.
const IDLE: Duration = Duration::from_secs(60);

/// The keys of one kind of state. Cheap to clone.
pub struct Cells<S> {
    bucket: Bucket,
    deadline: Duration,
    tasks: Tasks<S>,
}

/// The task of each key in use.
type Tasks<S> = Arc<Mutex<HashMap<String, mpsc::Sender<Box<dyn Change<S>>>>>>;

/// What a change answered, and the revision that holds it.
#[derive(Debug)]
pub struct Committed<A> {
    pub answer: A,
    pub revision: u64,
}

/// What stands in the bucket.
#[derive(Serialize, Deserialize)]
struct Stored<S> {
    nonce: String,
    state: S,
}

/// A state that changes under [`Cells`].
pub trait State: Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static {}
impl<S: Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static> State for S {}

impl<S: State> Cells<S> {
    pub fn new(bucket: Bucket, deadline: Duration) -> Self {
        Self { bucket, deadline, tasks: Arc::default() }
    }

    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// Changes a key, and returns when the change is on disk.
    ///
    /// The function sees the state (none: the key is new), changes it and answers; with an error it must leave the state
    /// as it was. It may be applied more than once, always to a newer state; the last time counts.
    pub async fn change<A: Send + 'static>(
        &self,
        key: &str,
        apply: impl FnMut(&mut Option<S>) -> Result<A> + Send + 'static,
    ) -> Result<Committed<A>> {
        let (reply, answer) = oneshot::channel();
        self.submit(key, Box::new(Plain { apply, answer: None, reply })).await?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// The same for a request that may be repeated: change and record are written together.
    pub async fn change_once<A: Serialize + DeserializeOwned + Send + 'static>(
        &self,
        key: &str,
        once: Once,
        apply: impl FnMut(&mut Option<S>) -> Result<A> + Send + 'static,
    ) -> Result<A> {
        if let Some(answer) = once.find(&self.bucket).await? {
            return Ok(answer);
        }
        let (reply, answer) = oneshot::channel();
        let plain = Plain { apply, answer: None, reply };
        self.submit(key, Box::new(Recorded { plain, once })).await?;
        answer.await.unwrap_or_else(|_| Err(stopped())).map(|committed| committed.answer)
    }

    /// Reads a key's state as the leader has it.
    pub async fn read(&self, key: &str) -> Result<Option<S>> {
        Ok(read(&self.bucket, key).await?.map(|(_, state, _)| state))
    }

    /// Puts a key from a known revision and state to another state, in one attempt that is never repeated. Whether it
    /// happened stays open: for what is nice to have, such as giving back a range.
    pub async fn try_replace(&self, key: &str, revision: u64, from: &S, to: &S) -> Result<()> {
        match read::<S>(&self.bucket, key).await? {
            Some((_, state, found)) if found == revision && state == *from => {}
            _ => return Err(Error::new(Code::Conflict, "the key was changed since")),
        }
        let write = Write { key: key.to_owned(), value: encode(to)?.1, expected: revision, ttl: None };
        self.bucket.write(&[write]).await.map(drop).map_err(|error| Error::unavailable("not replaced").source(error))
    }

    async fn submit(&self, key: &str, mut change: Box<dyn Change<S>>) -> Result<()> {
        loop {
            let task = self.task(key);
            match task.send(change).await {
                Ok(()) => return Ok(()),
                // The task ended for want of work between our look and our call.
                Err(mpsc::error::SendError(back)) => change = back,
            }
        }
    }

    fn task(&self, key: &str) -> mpsc::Sender<Box<dyn Change<S>>> {
        let mut tasks = self.tasks.lock().expect("no panic while the tasks are held");
        if let Some(task) = tasks.get(key).filter(|task| !task.is_closed()) {
            return task.clone();
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        tasks.insert(key.to_owned(), sender.clone());
        let cell = Cell { bucket: self.bucket.clone(), key: key.to_owned(), deadline: self.deadline, known: None };
        tokio::spawn(cell.run(receiver, self.tasks.clone()));
        sender
    }
}

impl<S> Clone for Cells<S> {
    fn clone(&self) -> Self {
        Self { bucket: self.bucket.clone(), deadline: self.deadline, tasks: self.tasks.clone() }
    }
}

/// One key's task.
struct Cell<S> {
    bucket: Bucket,
    key: String,
    deadline: Duration,
    /// The state after our own last write or read, and its revision.
    known: Option<(Option<S>, u64)>,
}

impl<S: State> Cell<S> {
    async fn run(mut self, mut waiting: mpsc::Receiver<Box<dyn Change<S>>>, tasks: Tasks<S>) {
        let mut group = Vec::new();
        loop {
            match timeout(IDLE, waiting.recv_many(&mut group, GROUP)).await {
                Ok(0) => return,
                Ok(_) => self.commit(&mut group).await,
                Err(_) => {
                    // What was sent before the close is still received, and answered in the next rounds.
                    waiting.close();
                    let mut tasks = tasks.lock().expect("no panic while the tasks are held");
                    // Unless somebody has put a new task in our place already.
                    if tasks.get(&self.key).is_some_and(mpsc::Sender::is_closed) {
                        tasks.remove(&self.key);
                    }
                }
            }
        }
    }

    /// Commits the group, however many rounds it takes, and answers everyone in it.
    async fn commit(&mut self, group: &mut Vec<Box<dyn Change<S>>>) {
        let began = Instant::now();
        metrics::histogram!("tidemark_watermark_group_size").record(group.len() as f64);
        while !group.is_empty() {
            let twins = split_off_twins(group);
            self.commit_distinct(group).await;
            // By now the first of each pair is recorded, or has failed and leaves it to the next.
            for twin in twins {
                group.extend(still_open(&self.bucket, twin).await);
            }
        }
        metrics::histogram!("tidemark_watermark_commit_seconds").record(began.elapsed().as_secs_f64());
    }

    async fn commit_distinct(&mut self, group: &mut Vec<Box<dyn Change<S>>>) {
        let deadline = Instant::now() + self.deadline;
        let mut conflicts = 0;
        while !group.is_empty() {
            if let Err(error) = self.round(group, deadline, &mut conflicts).await {
                self.known = None;
                error.log("watermark.commit");
                metrics::counter!("tidemark_watermark_failures_total").increment(group.len() as u64);
                group.drain(..).for_each(|change| change.fail(error.share()));
            }
        }
    }

    /// One attempt. Empties the group when it is decided; leaves it for another round after a conflict.
    async fn round(
        &mut self,
        group: &mut Vec<Box<dyn Change<S>>>,
        deadline: Instant,
        conflicts: &mut u32,
    ) -> Result<()> {
        let (before, revision, fresh) = match self.known.take() {
            Some((state, revision)) => (state, revision, false),
            None => {
                let (state, revision) = self.read_until(deadline).await?;
                (state, revision, true)
            }
        };
        let mut after = before.clone();
        let mut writes = Vec::new();
        for change in group.iter_mut() {
            change.apply(&mut after);
            writes.extend(change.record()?);
        }
        if after == before && writes.is_empty() {
            if fresh {
                self.known = Some((before, revision));
                group.drain(..).for_each(|change| change.succeed(revision));
            }
            // Else what we knew may be old, and "nothing to change" untrue: read, and apply again.
            return Ok(());
        }
        let Some(state) = &after else {
            return Err(Error::internal("a change removed the state of a key"));
        };
        let (nonce, value) = encode(state)?;
        // The counter comes last: the ack's sequence is its revision.
        writes.push(Write { key: self.key.clone(), value, expected: revision, ttl: None });
        if let Some(revision) = self.write_until(&writes, &nonce, deadline).await? {
            self.known = Some((after, revision));
            group.drain(..).for_each(|change| change.succeed(revision));
            return Ok(());
        }
        metrics::counter!("tidemark_watermark_conflicts_total").increment(1);
        if Instant::now() >= deadline {
            return Err(Error::unavailable("too many instances change this key at once; ask again"));
        }
        // Either the counter moved, or a record exists by now. The latter are answered and leave the group.
        if writes.len() > 1 {
            let (recorded, plain) = std::mem::take(group).into_iter().partition(|change| change.once().is_some());
            *group = plain;
            for change in recorded {
                if let Some(change) = still_open(&self.bucket, change).await {
                    group.push(change);
                }
            }
        }
        *conflicts += 1;
        let ceiling = (1 << (*conflicts).min(6)) as f64;
        tokio::time::sleep(Duration::from_millis(1).mul_f64(rand::random_range(0.0..ceiling))).await;
        Ok(())
    }

    async fn read_until(&self, deadline: Instant) -> Result<(Option<S>, u64)> {
        loop {
            match read(&self.bucket, &self.key).await {
                Ok(Some((_, state, revision))) => return Ok((Some(state), revision)),
                Ok(None) => return Ok((None, 0)),
                Err(error) if pause_before(deadline).await => error.log("watermark.read"),
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes until the outcome is known. None is a conflict: nothing of ours is stored, or it was written over.
    async fn write_until(&self, writes: &[Write], nonce: &str, deadline: Instant) -> Result<Option<u64>> {
        let mut in_doubt = false;
        loop {
            let source = match self.bucket.write(writes).await {
                Ok(revision) => return Ok(Some(revision)),
                Err(CasError::Conflict) if in_doubt => {
                    let stored = read::<S>(&self.bucket, &self.key).await?;
                    return Ok(stored.and_then(|(found, _, revision)| (found == nonce).then_some(revision)));
                }
                Err(CasError::Conflict) => return Ok(None),
                Err(CasError::NotStored(error)) => error,
                Err(CasError::Unknown(error)) => {
                    in_doubt = true;
                    error
                }
            };
            if !pause_before(deadline).await {
                return Err(Error::unavailable("the counters can't be written").source(source));
            }
        }
    }
}

/// Waits a moment if there is one before the deadline.
async fn pause_before(deadline: Instant) -> bool {
    let until = Instant::now() + Duration::from_millis(rand::random_range(20..100));
    let in_time = until < deadline;
    if in_time {
        tokio::time::sleep_until(until).await;
    }
    in_time
}

async fn read<S: State>(bucket: &Bucket, key: &str) -> Result<Option<(String, S, u64)>> {
    let Some(entry) = bucket.read(key).await? else { return Ok(None) };
    let stored: Stored<S> = serde_json::from_slice(&entry.value)
        .map_err(|error| Error::internal(format!("the counter {key} is broken: {error}")))?;
    Ok(Some((stored.nonce, stored.state, entry.revision)))
}

fn encode<S: Serialize>(state: &S) -> Result<(String, Bytes)> {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let value = serde_json::to_vec(&Stored { nonce: nonce.clone(), state }).map_err(Error::internal)?;
    Ok((nonce, value.into()))
}

fn stopped() -> Error {
    Error::unavailable("the process is stopping")
}

/// A change that waits, with its caller.
trait Change<S>: Send {
    /// Applies it to the state and keeps the answer.
    fn apply(&mut self, state: &mut Option<S>);
    fn once(&self) -> Option<&Once>;
    /// The record of the answer just computed.
    fn record(&self) -> Result<Option<Write>>;
    fn succeed(self: Box<Self>, revision: u64);
    fn fail(self: Box<Self>, error: Error);
    /// Answers with what a record says.
    fn repeat(self: Box<Self>, record: &[u8]);
}

struct Plain<A, F> {
    apply: F,
    answer: Option<Result<A>>,
    reply: oneshot::Sender<Result<Committed<A>>>,
}

impl<S, A: Send, F: FnMut(&mut Option<S>) -> Result<A> + Send> Change<S> for Plain<A, F> {
    fn apply(&mut self, state: &mut Option<S>) {
        self.answer = Some((self.apply)(state));
    }

    fn once(&self) -> Option<&Once> {
        None
    }

    fn record(&self) -> Result<Option<Write>> {
        Ok(None)
    }

    fn succeed(self: Box<Self>, revision: u64) {
        let answer = self.answer.unwrap_or_else(|| Err(stopped()));
        // A caller that went away wants no answer.
        let _ = self.reply.send(answer.map(|answer| Committed { answer, revision }));
    }

    fn fail(self: Box<Self>, error: Error) {
        let _ = self.reply.send(Err(error));
    }

    fn repeat(self: Box<Self>, _: &[u8]) {}
}

struct Recorded<A, F> {
    plain: Plain<A, F>,
    once: Once,
}

impl<S, A, F> Change<S> for Recorded<A, F>
where
    A: Serialize + DeserializeOwned + Send,
    F: FnMut(&mut Option<S>) -> Result<A> + Send,
{
    fn apply(&mut self, state: &mut Option<S>) {
        self.plain.apply(state);
    }

    fn once(&self) -> Option<&Once> {
        Some(&self.once)
    }

    fn record(&self) -> Result<Option<Write>> {
        match &self.plain.answer {
            Some(Ok(answer)) => self.once.record(answer).map(Some),
            _ => Ok(None),
        }
    }

    fn succeed(self: Box<Self>, revision: u64) {
        Change::<S>::succeed(Box::new(self.plain), revision);
    }

    fn fail(self: Box<Self>, error: Error) {
        Change::<S>::fail(Box::new(self.plain), error);
    }

    fn repeat(self: Box<Self>, record: &[u8]) {
        let answer = self.once.read(record);
        let _ = self.plain.reply.send(answer.map(|answer| Committed { answer, revision: 0 }));
    }
}

/// Answers an idempotent change whose record exists by now; gives back one that is still open.
async fn still_open<S>(bucket: &Bucket, change: Box<dyn Change<S>>) -> Option<Box<dyn Change<S>>> {
    let once = change.once()?;
    match bucket.read(once.key()).await {
        Ok(Some(entry)) => {
            change.repeat(&entry.value);
            None
        }
        Ok(None) => Some(change),
        Err(error) => {
            change.fail(error);
            None
        }
    }
}

/// Takes out every idempotent change whose twin stands before it in the group: a batch may create a record only once.
fn split_off_twins<S>(group: &mut Vec<Box<dyn Change<S>>>) -> Vec<Box<dyn Change<S>>> {
    let mut records = HashSet::new();
    let is_twin =
        |change: &mut Box<dyn Change<S>>| change.once().is_some_and(|once| !records.insert(once.key().to_owned()));
    group.extract_if(.., is_twin).collect()
}
