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
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt, future::join_all, stream};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    sync::{
        mpsc::{
            self,
            error::{SendError, TrySendError},
        },
        oneshot,
    },
    time::{Instant, timeout},
};

use super::{Once, RequestId, once};
use crate::{
    error::{Code, Error, Result},
    jetstream::{Bucket, CasError, Write},
};

/// Changes that share one write. An atomic batch may have 1,000 messages: the state, and for each change an answer to be
/// remembered and a part, and some parts more.
const GROUP: usize = 450;

/// Parts that are read at the same time.
const AT_ONCE: usize = 64;

/// Changes that may wait for one key before callers have to.
const QUEUE: usize = 4096;

/// A task whose key nobody used for this long ends.
const IDLE: Duration = Duration::from_secs(60);

/// The keys of one kind of state. Cheap to clone.
pub struct Cells<S> {
    bucket: Bucket,
    instance: Arc<str>,
    deadline: Duration,
    tasks: Tasks<S>,
}

/// The task of each key in use.
type Tasks<S> = Arc<Mutex<HashMap<String, mpsc::Sender<Box<dyn Change<S>>>>>>;

/// What a change answered, and the revision that holds it.
#[derive(Debug)]
pub struct Committed<A> {
    pub answer: A,
    /// 0 if the answer was given before, and nothing has changed now.
    pub revision: u64,
}

impl<A> Committed<A> {
    fn repeated(answer: A) -> Self {
        Self { answer, revision: 0 }
    }
}

/// What stands in the bucket.
#[derive(Serialize, Deserialize)]
struct Stored<S> {
    nonce: String,
    /// The instance that wrote it, and the first request that it was for: who was given what.
    #[serde(default)]
    by: Arc<str>,
    #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
    request: RequestId,
    state: S,
}

/// One of the states that a key had.
#[derive(Debug, Clone)]
pub struct Past<S> {
    pub state: S,
    pub at: DateTime<Utc>,
    pub by: Arc<str>,
    pub request: RequestId,
}

/// A state that changes under [`Cells`].
///
/// What is large and does not change every time need not be written every time: it can stand in parts beside the value, each
/// under a name of its own. A part is stored in one batch with the value, and the value's revision guards them both.
pub trait State: Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static {
    /// Reads the parts of a state that was just read, as far as an older state that we had does not have them.
    fn complete(
        &mut self,
        _older: Option<Older<'_, Self>>,
        _parts: Parts<'_>,
    ) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// The parts that the changes have made anew, each name once. As many as there were such changes, and not a hundred more.
    fn take_new_parts(&mut self) -> Vec<(String, Bytes)> {
        Vec::new()
    }
}

/// A state that we had, with its parts.
pub struct Older<'a, S> {
    pub state: &'a S,
    pub revision: u64,
}

/// What stands beside a key's value.
#[derive(Clone, Copy)]
pub struct Parts<'a> {
    bucket: &'a Bucket,
    key: &'a str,
}

impl Parts<'_> {
    /// A part that must be there.
    pub async fn read(self, name: &str) -> Result<Bytes> {
        let key = part(self.key, name);
        let entry = self.bucket.read(&key).await.inspect_err(|_| storage_error("read"))?;
        entry.map(|entry| entry.value).ok_or_else(|| Error::internal(format!("{key} is missing")))
    }

    /// All parts by their names.
    pub async fn all(self) -> Result<Vec<(String, Bytes)>> {
        let keys = self.bucket.keys(&part(self.key, ">")).await.inspect_err(|_| storage_error("read"))?;
        let names = keys.into_iter().map(|key| self.name(&key));
        let read = async |name: String| self.read(&name).await.map(|value| (name, value));
        stream::iter(names).map(read).buffer_unordered(AT_ONCE).try_collect().await
    }

    /// The parts that were written after a revision, one after the other: for a few.
    pub async fn written_after(self, revision: u64) -> Result<Vec<(String, Bytes)>> {
        let (pattern, mut from, mut parts) = (part(self.key, ">"), revision + 1, Vec::new());
        while let Some((key, entry)) = self.bucket.next(&pattern, from).await.inspect_err(|_| storage_error("read"))? {
            from = entry.revision + 1;
            parts.push((self.name(&key), entry.value));
        }
        Ok(parts)
    }

    fn name(&self, key: &str) -> String {
        key[part(self.key, "").len()..].to_owned()
    }
}

/// Where a part of a key stands.
fn part(key: &str, name: &str) -> String {
    format!("{key}.{name}")
}

impl<S: State> Cells<S> {
    /// `instance` is the name that our changes are signed with.
    pub fn new(bucket: Bucket, instance: impl Into<Arc<str>>, deadline: Duration) -> Self {
        Self { bucket, instance: instance.into(), deadline, tasks: Arc::default() }
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
        request: RequestId,
        apply: impl FnMut(&mut Option<S>) -> Result<A> + Send + 'static,
    ) -> Result<Committed<A>> {
        let (reply, answer) = oneshot::channel();
        self.submit(key, Box::new(Plain { request, apply, answer: None, reply })).await;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// The same for a request that may be repeated: change and record are written together.
    pub async fn change_once<A: Serialize + DeserializeOwned + Send + 'static>(
        &self,
        key: &str,
        request: RequestId,
        once: Once,
        apply: impl FnMut(&mut Option<S>) -> Result<A> + Send + 'static,
    ) -> Result<Committed<A>> {
        if let Some(answer) = once.find(&self.bucket).await? {
            return Ok(Committed::repeated(answer));
        }
        let (reply, answer) = oneshot::channel();
        let plain = Plain { request, apply, answer: None, reply };
        self.submit(key, Box::new(Recorded { plain, once })).await;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// Reads a key's state as the leader has it, without its parts.
    pub async fn read(&self, key: &str) -> Result<Option<S>> {
        Ok(read(&self.bucket, key).await?.map(|(_, state, _)| state))
    }

    /// The states that a key had, as far back as the bucket keeps them, in their order.
    pub async fn history(&self, key: &str) -> Result<Vec<Past<S>>> {
        let entries = self.bucket.history(key).await?;
        let past = entries.into_iter().map(|(at, value)| {
            let Stored { by, request, state, .. } = decode(key, &value)?;
            Ok(Past { state, at, by, request })
        });
        past.collect()
    }

    /// Puts a key from a known revision and state to another state, in one attempt that is never repeated. Whether it
    /// happened stays open: for what is nice to have, such as giving back a range. The state is compared as well because
    /// other changes may have been committed under the same revision.
    pub async fn try_replace(&self, key: &str, revision: u64, from: &S, to: &S) -> Result<()> {
        match read::<S>(&self.bucket, key).await? {
            Some((_, state, found)) if found == revision && state == *from => {}
            _ => return Err(Error::new(Code::Conflict, "the key was changed since")),
        }
        let write = Write { key: key.to_owned(), value: self.encode(to)?, expected: Some(revision), ttl: None };
        self.bucket.write(&[write]).await.map(drop).map_err(|error| Error::unavailable("not replaced").source(error))
    }

    fn encode(&self, state: &S) -> Result<Bytes> {
        Ok(encode(state, self.instance.clone(), None)?.1)
    }

    async fn submit(&self, key: &str, mut change: Box<dyn Change<S>>) {
        loop {
            let task = self.task(key);
            change = match task.try_send(change) {
                Ok(()) => return,
                // The task ended for want of work between our look and our call.
                Err(TrySendError::Closed(back)) => back,
                // Boxed because it is rare, and every caller's state would have to hold it.
                Err(TrySendError::Full(back)) => match Box::pin(task.send(back)).await {
                    Ok(()) => return,
                    Err(SendError(back)) => back,
                },
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
        let cell = Cell {
            bucket: self.bucket.clone(),
            instance: self.instance.clone(),
            key: key.to_owned(),
            deadline: self.deadline,
            known: None,
            older: None,
        };
        tokio::spawn(cell.run(receiver, self.tasks.clone()));
        sender
    }
}

impl<S> Clone for Cells<S> {
    fn clone(&self) -> Self {
        let (bucket, instance) = (self.bucket.clone(), self.instance.clone());
        Self { bucket, instance, deadline: self.deadline, tasks: self.tasks.clone() }
    }
}

/// One key's task.
struct Cell<S> {
    bucket: Bucket,
    instance: Arc<str>,
    key: String,
    deadline: Duration,
    /// The state after our own last write or read, and its revision.
    known: Option<(Option<S>, u64)>,
    /// What we knew before we had to read again, and its revision. Its parts are still good.
    older: Option<(S, u64)>,
}

impl<S: State> Cell<S> {
    async fn run(mut self, mut waiting: mpsc::Receiver<Box<dyn Change<S>>>, tasks: Tasks<S>) {
        let mut changes = Vec::new();
        loop {
            match timeout(IDLE, waiting.recv_many(&mut changes, GROUP)).await {
                Ok(0) => return,
                Ok(_) => {
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
    fn leave(&self, waiting: &mut mpsc::Receiver<Box<dyn Change<S>>>, tasks: &Tasks<S>) {
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
        writes.extend(parts.into_iter().map(|(name, value)| {
            let key = part(&self.key, &name);
            Write { key, value, expected: None, ttl: None }
        }));
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
        writes.push(Write { key: self.key.clone(), value, expected: Some(revision), ttl: None });
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
        let ceiling = (1 << (*conflicts).min(6)) as f64;
        tokio::time::sleep(Duration::from_millis(1).mul_f64(rand::random_range(0.0..ceiling))).await;
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
        let mut in_doubt = false;
        loop {
            let source = match self.bucket.write(writes).await {
                Ok(revision) => return Ok(Some(revision)),
                Err(CasError::Conflict) if in_doubt => match read::<S>(&self.bucket, &self.key).await {
                    Ok(Some((found, _, revision))) if found == nonce => return Ok(Some(revision)),
                    Ok(_) => return Ok(None),
                    Err(error) if pause_before(deadline).await => {
                        error.log("watermark.read");
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                Err(CasError::Conflict) => return Ok(None),
                Err(CasError::NotStored(error)) => error,
                Err(CasError::Unknown(error)) => {
                    in_doubt = true;
                    error
                }
            };
            storage_error("write");
            if !pause_before(deadline).await {
                return Err(Error::unavailable("the counters can't be written").source(source));
            }
        }
    }
}

/// Under the name that IDBuilder's dashboards know.
fn storage_error(operation: &'static str) {
    metrics::counter!("idbuilder_storage_errors_total", "backend" => "jetstream", "operation" => operation)
        .increment(1);
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
    let entry = bucket.read(key).await.inspect_err(|_| storage_error("read"))?;
    let Some(entry) = entry else { return Ok(None) };
    let stored = decode::<S>(key, &entry.value)?;
    Ok(Some((stored.nonce, stored.state, entry.revision)))
}

/// A key's state with all its parts.
async fn read_whole<S: State>(bucket: &Bucket, key: &str, older: Option<Older<'_, S>>) -> Result<Option<(S, u64)>> {
    let Some((_, mut state, revision)) = read::<S>(bucket, key).await? else { return Ok(None) };
    state.complete(older, Parts { bucket, key }).await?;
    Ok(Some((state, revision)))
}

fn decode<S: DeserializeOwned>(key: &str, value: &[u8]) -> Result<Stored<S>> {
    serde_json::from_slice(value).map_err(|error| Error::internal(format!("the counter {key} is broken: {error}")))
}

/// The value with its nonce.
fn encode<S: Serialize>(state: &S, by: Arc<str>, request: RequestId) -> Result<(String, Bytes)> {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let stored = Stored { nonce, by, request, state };
    let value = serde_json::to_vec(&stored).map_err(Error::internal)?;
    Ok((stored.nonce, value.into()))
}

/// The task ended without an answer: the runtime stops, or a change panicked.
fn stopped() -> Error {
    Error::unavailable("the change was not answered; it may have happened")
}

/// Changes that are committed together.
struct Group<S> {
    changes: Vec<Box<dyn Change<S>>>,
    /// Idempotent changes whose twin is among the changes, by the key of their record. A batch may create a record only
    /// once, and they get the same answer.
    twins: HashMap<String, Vec<Box<dyn Change<S>>>>,
}

impl<S> Group<S> {
    fn new(waiting: Vec<Box<dyn Change<S>>>) -> Self {
        let mut group = Self { changes: Vec::with_capacity(waiting.len()), twins: HashMap::new() };
        let mut first: HashMap<String, Once> = HashMap::new();
        for change in waiting {
            let Some(once) = change.once() else {
                group.changes.push(change);
                continue;
            };
            match first.get(once.key()) {
                None => {
                    first.insert(once.key().to_owned(), once.clone());
                    group.changes.push(change);
                }
                Some(twin) if once.asks_the_same(twin) => {
                    group.twins.entry(once.key().to_owned()).or_default().push(change);
                }
                Some(_) => change.fail(once::other_parameters()),
            }
        }
        group
    }

    fn succeed_all(&mut self, revision: u64) {
        for change in std::mem::take(&mut self.changes) {
            let twins = self.twins_of(&*change);
            if !twins.is_empty() {
                match change.record() {
                    Ok(Some(record)) => twins.into_iter().for_each(|twin| twin.repeat(&record.value)),
                    Ok(None) | Err(_) => {
                        let error = change.refusal().unwrap_or_else(stopped);
                        twins.into_iter().for_each(|twin| twin.fail(error.share()));
                    }
                }
            }
            change.succeed(revision);
        }
    }

    fn fail_all(&mut self, error: &Error) {
        let twins = self.twins.drain().flat_map(|(_, twins)| twins);
        self.changes.drain(..).chain(twins).for_each(|change| change.fail(error.share()));
    }

    /// Answers the idempotent changes that somebody else has answered already.
    async fn answer_recorded(&mut self, bucket: &Bucket) {
        let keys = self.changes.iter().filter_map(|change| Some(change.once()?.key().to_owned()));
        let read = async |key: String| {
            let record = bucket.read(&key).await;
            (key, record)
        };
        let mut records: HashMap<_, _> = join_all(keys.map(read)).await.into_iter().collect();
        for change in std::mem::take(&mut self.changes) {
            match change.once().and_then(|once| records.remove(once.key())) {
                Some(Ok(Some(record))) => {
                    self.twins_of(&*change).into_iter().for_each(|twin| twin.repeat(&record.value));
                    change.repeat(&record.value);
                }
                // None yet, or not known: the next round will tell.
                _ => self.changes.push(change),
            }
        }
    }

    fn twins_of(&mut self, change: &dyn Change<S>) -> Vec<Box<dyn Change<S>>> {
        change.once().and_then(|once| self.twins.remove(once.key())).unwrap_or_default()
    }
}

/// A change that waits, with its caller.
trait Change<S>: Send {
    /// Applies it to the state and keeps the answer.
    fn apply(&mut self, state: &mut Option<S>);
    fn once(&self) -> Option<&Once>;
    fn request(&self) -> RequestId;
    /// The record of the answer just computed.
    fn record(&self) -> Result<Option<Write>>;
    /// The error just computed.
    fn refusal(&self) -> Option<Error>;
    fn succeed(self: Box<Self>, revision: u64);
    fn fail(self: Box<Self>, error: Error);
    /// Answers with what a record says.
    fn repeat(self: Box<Self>, record: &[u8]);
}

struct Plain<A, F> {
    request: RequestId,
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

    fn request(&self) -> RequestId {
        self.request.clone()
    }

    fn record(&self) -> Result<Option<Write>> {
        Ok(None)
    }

    fn refusal(&self) -> Option<Error> {
        self.answer.as_ref()?.as_ref().err().map(Error::share)
    }

    fn succeed(self: Box<Self>, revision: u64) {
        let answer = self.answer.unwrap_or_else(|| Err(stopped()));
        // A caller that went away wants no answer.
        let _ = self.reply.send(answer.map(|answer| Committed { answer, revision }));
    }

    fn fail(self: Box<Self>, error: Error) {
        let _ = self.reply.send(Err(error));
    }

    fn repeat(self: Box<Self>, _: &[u8]) {
        unreachable!("only what has a record is answered from one");
    }
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

    fn request(&self) -> RequestId {
        self.plain.request.clone()
    }

    fn record(&self) -> Result<Option<Write>> {
        match &self.plain.answer {
            Some(Ok(answer)) => self.once.record(answer).map(Some),
            _ => Ok(None),
        }
    }

    fn refusal(&self) -> Option<Error> {
        Change::<S>::refusal(&self.plain)
    }

    fn succeed(self: Box<Self>, revision: u64) {
        Change::<S>::succeed(Box::new(self.plain), revision);
    }

    fn fail(self: Box<Self>, error: Error) {
        Change::<S>::fail(Box::new(self.plain), error);
    }

    fn repeat(self: Box<Self>, record: &[u8]) {
        let answer = self.once.read(record);
        let _ = self.plain.reply.send(answer.map(Committed::repeated));
    }
}
