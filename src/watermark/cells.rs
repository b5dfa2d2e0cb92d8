//! Group commit: all callers that wait for a key share one synced write. Each key in use has one task, a [`Cell`].

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::sync::{
    mpsc::{
        self,
        error::{SendError, TrySendError},
    },
    oneshot,
};

use super::{
    Once, RequestId,
    cell::Cell,
    group::{Change, Plain, Recorded},
};
use crate::{
    error::{Code, Error, Result},
    jetstream::{Bucket, Write},
    turns::Turns,
};

/// Parts that are read at the same time.
const AT_ONCE: usize = 64;

/// Changes that may wait for one key before callers have to.
const QUEUE: usize = 4096;

/// The keys of one kind of state. Cheap to clone.
pub struct Cells<S> {
    bucket: Bucket,
    instance: Arc<str>,
    deadline: Duration,
    tasks: Tasks<S>,
    /// Of requests under one idempotency key.
    turns: Arc<Turns>,
}

/// The task of each key in use.
pub(super) type Tasks<S> = Arc<Mutex<HashMap<String, mpsc::Sender<Box<dyn Change<S>>>>>>;

/// What a change answered, and the revision that holds it.
#[derive(Debug)]
pub struct Committed<A> {
    pub answer: A,
    /// 0 if the answer was given before, and nothing has changed now.
    pub revision: u64,
}

impl<A> Committed<A> {
    pub(super) fn repeated(answer: A) -> Self {
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

    /// The names of all parts.
    async fn names(self) -> Result<Vec<String>> {
        let keys = self.bucket.keys(&part(self.key, ">")).await.inspect_err(|_| storage_error("read"))?;
        Ok(keys.into_iter().map(|key| self.name(&key)).collect())
    }

    /// All parts by their names.
    pub async fn all(self) -> Result<Vec<(String, Bytes)>> {
        let read = async |name: String| self.read(&name).await.map(|value| (name, value));
        stream::iter(self.names().await?).map(read).buffer_unordered(AT_ONCE).try_collect().await
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
pub(super) fn part(key: &str, name: &str) -> String {
    format!("{key}.{name}")
}

impl<S: State> Cells<S> {
    /// `instance` is the name that our changes are signed with.
    pub fn new(bucket: Bucket, instance: impl Into<Arc<str>>, deadline: Duration) -> Self {
        Self { bucket, instance: instance.into(), deadline, tasks: Arc::default(), turns: Arc::new(Turns::new(1)) }
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
        self.submit(key, Box::new(Plain::new(request, apply, reply))).await;
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
        let plain = Plain::new(request, apply, reply);
        self.submit(key, Box::new(Recorded { plain, once: once.clone() })).await;
        match answer.await.unwrap_or_else(|_| Err(stopped())) {
            // What refuses it may be its own twin, who was first: then there is a record by now.
            Err(refused) if refused.code != Code::Unavailable => match once.find(&self.bucket).await {
                Ok(Some(answer)) => Ok(Committed::repeated(answer)),
                _ => Err(refused),
            },
            answer => answer,
        }
    }

    /// The first answer to a request that may be repeated: one that was given before, or the one made now, which is recorded
    /// before it leaves.
    pub async fn make_once<A, F>(&self, once: Once, make: impl FnOnce() -> F) -> Result<A>
    where
        A: Serialize + DeserializeOwned,
        F: Future<Output = Result<A>>,
    {
        // Its twins in this process wait for it, and take nothing for themselves.
        let _turn = self.turns.take(once.key()).await?;
        match once.find(&self.bucket).await? {
            Some(given) => Ok(given),
            None => once.settle(&self.bucket, make().await?).await,
        }
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
        let write = Write { expected: Some(revision), ..Write::to(key.to_owned(), self.encode(to)?) };
        self.bucket.write(&[write]).await.map(drop).map_err(|error| Error::unavailable("not replaced").source(error))
    }

    /// The names of the parts beside a key's value.
    pub async fn part_names(&self, key: &str) -> Result<Vec<String>> {
        Parts { bucket: &self.bucket, key }.names().await
    }

    /// Writes what is made of a key's state without its parts, in one attempt: for a store that nobody else uses meanwhile.
    pub async fn rewrite(&self, key: &str, make: impl FnOnce(Option<S>) -> S) -> Result<()> {
        let (state, revision) = match read::<S>(&self.bucket, key).await? {
            Some((_, state, revision)) => (Some(state), revision),
            None => (None, 0),
        };
        let write = Write { expected: Some(revision), ..Write::to(key.to_owned(), self.encode(&make(state))?) };
        self.bucket.write(&[write]).await.map(drop).map_err(|error| Error::unavailable("not written").source(error))
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
        Self { bucket, instance, deadline: self.deadline, tasks: self.tasks.clone(), turns: self.turns.clone() }
    }
}

/// Under the name that IDBuilder's dashboards know.
pub(super) fn storage_error(operation: &'static str) {
    metrics::counter!("idbuilder_storage_errors_total", "backend" => "jetstream", "operation" => operation)
        .increment(1);
}

pub(super) async fn read<S: State>(bucket: &Bucket, key: &str) -> Result<Option<(String, S, u64)>> {
    let entry = bucket.read(key).await.inspect_err(|_| storage_error("read"))?;
    let Some(entry) = entry else { return Ok(None) };
    let stored = decode::<S>(key, &entry.value)?;
    Ok(Some((stored.nonce, stored.state, entry.revision)))
}

/// A key's state with all its parts.
pub(super) async fn read_whole<S: State>(
    bucket: &Bucket,
    key: &str,
    older: Option<Older<'_, S>>,
) -> Result<Option<(S, u64)>> {
    let Some((_, mut state, revision)) = read::<S>(bucket, key).await? else { return Ok(None) };
    state.complete(older, Parts { bucket, key }).await?;
    Ok(Some((state, revision)))
}

fn decode<S: DeserializeOwned>(key: &str, value: &[u8]) -> Result<Stored<S>> {
    serde_json::from_slice(value).map_err(|error| Error::internal(format!("the counter {key} is broken: {error}")))
}

/// The value with its nonce.
pub(super) fn encode<S: Serialize>(state: &S, by: Arc<str>, request: RequestId) -> Result<(String, Bytes)> {
    let nonce = format!("{:032x}", rand::random::<u128>());
    let stored = Stored { nonce, by, request, state };
    let value = serde_json::to_vec(&stored).map_err(Error::internal)?;
    Ok((stored.nonce, value.into()))
}

/// The task ended without an answer: the runtime stops, or a change panicked.
pub(super) fn stopped() -> Error {
    Error::unavailable("the change was not answered; it may have happened")
}
