//! Allocates stages for all who wait at the same time.
//!
//! Many requests share one atomic batch, and so one synced write. The server stores a batch or refuses it whole; when it
//! refuses, because one of the requests is a repeat, or when nobody knows what became of it, every request is published by
//! itself until it is decided. Nothing is burnt by that: a request that is stored already is found again.
//!
//! A batch costs the server several milliseconds, almost half of them for opening it. So a few requests go without one. Under
//! load the first who comes opens a batch, and whoever comes until it is open joins him.

use std::{collections::HashMap, time::Duration};

use futures::{future::join_all, join};
use serde::Serialize;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use uuid::Uuid;

use super::allocations::Allocations;
use crate::{
    api::stages::LAST_STAGE,
    error::{Code, Error, Result},
    events::Events,
    jetstream::{Ack, Batch, MOST_MESSAGES, Message, PublishError, publish},
};

/// As many requests are served faster by a batch than one by one.
const MANY: usize = 16;

/// Requests that may wait before callers have to.
const QUEUE: usize = 4096;

/// Who was answered just now and asks again is back by then.
const AT_ONCE: Duration = Duration::from_millis(5);

/// What takes longer than this holds nobody else up.
const PATIENCE: Duration = Duration::from_millis(100);

/// Takes requests for stages, and answers each when it is on disk.
pub struct Allocator(mpsc::Sender<Waiting>);

/// What a request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Given {
    pub stage: i32,
    /// The request was answered before, or a twin of it is answered now.
    pub repeated: bool,
}

struct Waiting {
    request: Uuid,
    reply: oneshot::Sender<Result<Given>>,
}

impl Allocator {
    /// Starts to take requests. Each is tried for as long as the deadline says.
    pub fn start(allocations: Allocations, events: Events, deadline: Duration) -> Self {
        let (sender, waiting) = mpsc::channel(QUEUE);
        tokio::spawn(Desk { allocations, events, deadline }.serve(waiting));
        Self(sender)
    }

    /// The stage of a request: a new one, or the one that it got before.
    pub async fn allocate(&self, request: Uuid) -> Result<Given> {
        let (reply, answer) = oneshot::channel();
        let stopped = || Error::unavailable("the request was not answered; ask again with the same request id");
        self.0.send(Waiting { request, reply }).await.map_err(|_| stopped())?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }
}

#[derive(Clone)]
struct Desk {
    allocations: Allocations,
    events: Events,
    deadline: Duration,
}

impl Desk {
    async fn serve(self, mut waiting: mpsc::Receiver<Waiting>) {
        let (mut before, mut news) = (0, Vec::new());
        while let Some(first) = self.next(&mut waiting, &mut news).await {
            let mut group = Group::of(first);
            self.gather(&mut group, &mut waiting);
            if before.max(group.asked.len()) < MANY {
                before = group.asked.len();
                self.tell(news.drain(..));
                self.one_by_one(group).await;
                continue;
            }
            let client = self.allocations.client();
            let open = Batch::open(&client, self.message(&group.asked[0]));
            // There is nothing else to do while it opens.
            let (batch, ()) = join!(open, async { self.tell(news.drain(..)) });
            self.gather(&mut group, &mut waiting);
            before = group.asked.len();
            metrics::histogram!("tidemark_stage_batch_size").record(before as f64);
            match self.store(batch, &group.asked).await {
                Ok(Ack { sequence, .. }) => {
                    let first = sequence + 1 - before as u64;
                    let given = group.asked.into_iter().zip(first..);
                    news.extend(given.filter_map(|(asked, sequence)| asked.succeed(sequence, false)));
                }
                Err(error) => {
                    tracing::debug!(%error, requests = before, "a batch of stages was not stored");
                    self.one_by_one(group).await;
                }
            }
        }
    }

    /// The next who asks. Under load he comes at once, and what there is to tell can wait until he is served.
    async fn next(&self, waiting: &mut mpsc::Receiver<Waiting>, news: &mut Vec<Allocated>) -> Option<Waiting> {
        if !news.is_empty() {
            if let Ok(Some(next)) = timeout(AT_ONCE, waiting.recv()).await {
                return Some(next);
            }
            self.tell(news.drain(..));
        }
        waiting.recv().await
    }

    /// Takes in all who wait, as far as there is room.
    fn gather(&self, group: &mut Group, waiting: &mut mpsc::Receiver<Waiting>) {
        // The end of a batch counts as one of its messages.
        while group.asked.len() < MOST_MESSAGES - 1
            && let Ok(next) = waiting.try_recv()
        {
            group.add(next);
        }
    }

    fn message(&self, asked: &Asked) -> Message {
        self.allocations.message(asked.request, asked.nonce)
    }

    async fn store(&self, batch: Result<Batch<'_>, PublishError>, asked: &[Asked]) -> Result<Ack, PublishError> {
        let mut batch = batch?;
        // The first one has opened it.
        for asked in &asked[1..] {
            batch.add(self.message(asked)).await?;
        }
        batch.commit().await
    }

    fn tell(&self, news: impl IntoIterator<Item = Allocated>) {
        for allocated in news {
            let Allocated { stage_id, request_id } = allocated;
            tracing::info!(stage_id, %request_id, "stage allocated");
            self.events.tell(format_args!("stage.allocated"), &allocated);
        }
    }

    /// Publishes each by itself, until it is decided. What takes its time goes on in the background.
    async fn one_by_one(&self, group: Group) {
        let this = self.clone();
        let decided = tokio::spawn(async move {
            let decide = async |asked: Asked| match this.settle(&asked).await {
                Ok((sequence, found)) => this.tell(asked.succeed(sequence, found)),
                Err(error) => asked.fail(&error),
            };
            join_all(group.asked.into_iter().map(decide)).await;
        });
        let _ = timeout(PATIENCE, decided).await;
    }

    /// The sequence of a request's message, and whether it was there before we came.
    async fn settle(&self, asked: &Asked) -> Result<(u64, bool)> {
        let client = self.allocations.client();
        let Ack { sequence, duplicate } =
            publish(&client, &self.message(asked), self.deadline).await.map_err(undecided)?;
        // What was there may be our own, from an attempt whose answer was lost.
        let is_ours = match duplicate {
            true => {
                matches!(self.allocations.find(stage(sequence)?).await, Ok(Some(found)) if found.nonce == asked.nonce)
            }
            false => true,
        };
        Ok((sequence, !is_ours))
    }
}

/// What is told of a new stage.
#[derive(Serialize)]
struct Allocated {
    stage_id: i32,
    request_id: Uuid,
}

/// Requests that are served together.
struct Group {
    asked: Vec<Asked>,
    /// A batch may have each message id once, so twins share a place.
    places: HashMap<Uuid, usize>,
}

/// One request and all who wait for it.
struct Asked {
    request: Uuid,
    nonce: Uuid,
    waiting: Vec<oneshot::Sender<Result<Given>>>,
}

impl Group {
    fn of(first: Waiting) -> Self {
        let mut group = Self { asked: Vec::new(), places: HashMap::new() };
        group.add(first);
        group
    }

    fn add(&mut self, Waiting { request, reply }: Waiting) {
        let place = *self.places.entry(request).or_insert(self.asked.len());
        match self.asked.get_mut(place) {
            Some(twin) => twin.waiting.push(reply),
            None => self.asked.push(Asked { request, nonce: Uuid::new_v4(), waiting: vec![reply] }),
        }
    }
}

impl Asked {
    /// Answers all who wait. Only the first of them who is still there made the stage, unless it was found. A new stage is
    /// something to tell.
    fn succeed(self, sequence: u64, found: bool) -> Option<Allocated> {
        let mut repeated = found;
        for waiting in self.waiting {
            if repeated {
                tracing::info!(stage_id = sequence, request_id = %self.request, "stage allocated before");
                metrics::counter!("tidemark_stage_repeated_total").increment(1);
            }
            // A caller that went away wants no answer.
            let answered = waiting.send(stage(sequence).map(|stage| Given { stage, repeated }));
            repeated |= answered.is_ok();
        }
        let stage_id = stage(sequence).ok().filter(|_| !found)?;
        metrics::counter!("tidemark_stage_allocated_total").increment(1);
        Some(Allocated { stage_id, request_id: self.request })
    }

    fn fail(self, error: &Error) {
        tracing::warn!(request_id = %self.request, %error, "no stage was given");
        for waiting in self.waiting {
            let _ = waiting.send(Err(error.share()));
        }
    }
}

/// The server stops at the last one; this holds even if its stream was tampered with.
fn stage(sequence: u64) -> Result<i32> {
    i32::try_from(sequence).map_err(|_| exhausted())
}

fn exhausted() -> Error {
    Error::new(Code::Exhausted, format!("no stage ids are left: the last one, {LAST_STAGE}, was given"))
}

/// What a caller is told whose request could not be decided in time.
fn undecided(error: PublishError) -> Error {
    match error {
        error if error.is_full() => exhausted(),
        // It may be stored, or be on its way: the same request id finds out.
        PublishError::Unknown(_) => {
            let text = "Another request with the same X-Request-ID is being processed. Please retry shortly.";
            Error::new(Code::Conflict, text).source(error)
        }
        error => Error::unavailable("stage ids can't be given right now").source(error),
    }
}
