//! Changes that are committed together, each with the caller who waits for it.

use std::collections::HashMap;

use futures::future::join_all;
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::oneshot;

use super::{Committed, Once, RequestId, cells::stopped, once};
use crate::{
    error::{Error, Result},
    jetstream::{Bucket, Write},
};

/// Changes that are committed together.
pub(super) struct Group<S> {
    pub changes: Vec<Box<dyn Change<S>>>,
    /// Idempotent changes whose twin is among the changes, by the key of their record. A batch may create a record only
    /// once, and they get the same answer.
    twins: HashMap<String, Vec<Box<dyn Change<S>>>>,
}

impl<S> Group<S> {
    pub fn new(waiting: Vec<Box<dyn Change<S>>>) -> Self {
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

    pub fn succeed_all(&mut self, revision: u64) {
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

    pub fn fail_all(&mut self, error: &Error) {
        let twins = self.twins.drain().flat_map(|(_, twins)| twins);
        self.changes.drain(..).chain(twins).for_each(|change| change.fail(error.share()));
    }

    /// Answers the idempotent changes that somebody else has answered already.
    pub async fn answer_recorded(&mut self, bucket: &Bucket) {
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
pub(super) trait Change<S>: Send {
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

pub(super) struct Plain<A, F> {
    request: RequestId,
    apply: F,
    answer: Option<Result<A>>,
    reply: oneshot::Sender<Result<Committed<A>>>,
}

impl<A, F> Plain<A, F> {
    pub fn new(request: RequestId, apply: F, reply: oneshot::Sender<Result<Committed<A>>>) -> Self {
        Self { request, apply, answer: None, reply }
    }
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

pub(super) struct Recorded<A, F> {
    pub plain: Plain<A, F>,
    pub once: Once,
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
