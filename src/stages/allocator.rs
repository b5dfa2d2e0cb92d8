//! Allocates stages for all who wait at the same time: whoever comes while an entry is written shares the next one, and so
//! one synced write. A request that has a stage is answered from what was read, without any.
//!
//! When another process was first, its entries are read, and whoever has no stage by then gets one behind them. An entry
//! whose fate is not known burns nothing: whether it stands there is found out before the next one is written.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use chrono::TimeDelta;
use serde::Serialize;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use uuid::Uuid;

use super::{
    allocations::{Allocations, Run},
    book::Book,
};
use crate::{
    api::stages::LAST_STAGE,
    clock::Clock,
    config,
    error::{Code, Error, Result},
    events::Events,
    gathering::Gathering,
    jetstream::{Undecided, pause_before, step_back},
};

/// Requests of one entry.
const MOST: usize = 1000;

/// The server's clock may have been put back a little, so that times in the log are not quite in their order.
const SLACK: TimeDelta = TimeDelta::minutes(10);

/// Requests that may wait before callers have to.
const QUEUE: usize = 4096;

/// Takes requests for stages, and answers each when it is on disk.
pub struct Allocator(mpsc::Sender<Waiting>);

/// What a request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub stage: i32,
    /// The request was answered before, or a twin of it is answered now.
    pub repeated: bool,
}

struct Waiting {
    request: Uuid,
    reply: oneshot::Sender<Result<Answer>>,
}

impl Allocator {
    /// Starts to take requests. Each is tried for as long as the deadline says.
    pub fn start(
        allocations: Allocations,
        events: Events,
        stages: &config::Stages,
        deadline: Duration,
        clock: Clock,
    ) -> Self {
        let (sender, waiting) = mpsc::channel(QUEUE);
        let window = TimeDelta::from_std(stages.idempotency_window).unwrap_or(TimeDelta::MAX);
        let book = Book::new(window, stages.first_id);
        tokio::spawn(Desk { allocations, book, is_behind: true, events, deadline, clock }.serve(waiting));
        Self(sender)
    }

    /// The stage of a request: a new one, or the one that it got before.
    pub async fn allocate(&self, request: Uuid) -> Result<Answer> {
        let (reply, answer) = oneshot::channel();
        let stopped = || Error::unavailable("the request was not answered; ask again with the same request id");
        self.0.send(Waiting { request, reply }).await.map_err(|_| stopped())?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }
}

struct Desk {
    allocations: Allocations,
    book: Book,
    /// Whether there is more in the log than in the book.
    is_behind: bool,
    events: Events,
    deadline: Duration,
    clock: Clock,
}

impl Desk {
    async fn serve(mut self, waiting: mpsc::Receiver<Waiting>) {
        let mut waiting = Gathering::new(waiting, MOST);
        // Whoever comes first need not wait for it.
        if let Err(error) = self.catch_up(Instant::now() + self.deadline).await {
            error.log("stages.read");
        }
        let mut asked = Vec::with_capacity(MOST);
        while waiting.first(&mut asked).await > 0 {
            waiting.rest(&mut asked).await;
            self.answer(Group::of(asked.drain(..))).await;
        }
    }

    /// Answers a group, however many rounds it takes.
    async fn answer(&mut self, mut group: Group) {
        let deadline = Instant::now() + self.deadline;
        metrics::histogram!("tidemark_stage_batch_size").record(group.asked.len() as f64);
        let mut conflicts = 0;
        while !group.asked.is_empty() {
            if let Err(error) = self.round(&mut group, deadline).await {
                error.log("stages.allocate");
                group.asked.drain(..).for_each(|asked| asked.fail(&error));
            } else if self.is_behind {
                conflicts += 1;
                step_back(conflicts).await;
            }
        }
    }

    /// One attempt. Empties the group when it is decided; leaves it for another round if somebody else was first.
    async fn round(&mut self, group: &mut Group, deadline: Instant) -> Result<()> {
        if self.is_behind {
            self.catch_up(deadline).await?;
        }
        self.book.forget(self.clock.now());
        group.answer_known(&self.book);
        let left = i64::from(LAST_STAGE) + 1 - self.book.next;
        group.refuse_beyond(left.max(0) as usize);
        if group.asked.is_empty() {
            return Ok(());
        }
        let requests = group.asked.iter().map(|asked| asked.request).collect();
        let run = Run { first: self.book.next as i32, requests, skipped: 0 };
        let appended = self.allocations.append(self.book.last, &run, deadline).await;
        // Whatever else became of it, there may be more in the log by now.
        self.is_behind = !matches!(appended, Ok(Some(_)));
        match appended {
            Ok(Some(sequence)) => {
                let given: Vec<_> =
                    run.each().zip(group.asked.drain(..)).map(|((_, stage), asked)| asked.give(stage)).collect();
                self.book.add(sequence, self.clock.now(), run);
                self.tell(&given);
                Ok(())
            }
            Ok(None) => {
                metrics::counter!("tidemark_stage_conflicts_total").increment(1);
                match Instant::now() < deadline {
                    true => Ok(()),
                    false => Err(Error::unavailable("too many processes give stages at once; ask again")),
                }
            }
            Err(undecided) => Err(refused(undecided)),
        }
    }

    /// Reads what others have given. What was read stays read, whatever becomes of those who wait for it.
    async fn catch_up(&mut self, deadline: Instant) -> Result<()> {
        while self.is_behind {
            match self.read_on().await {
                Ok(()) if self.is_behind && Instant::now() >= deadline => {
                    return Err(Error::unavailable("what was given before is being read; ask again"));
                }
                Ok(()) => {}
                Err(error) if error.code == Code::Unavailable && pause_before(deadline).await => {
                    error.log("stages.read");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn read_on(&mut self) -> Result<()> {
        if self.book.last == 0 {
            let begins = self.book.horizon(self.clock.now()) - SLACK;
            let old = self.allocations.last_until(|given| given.at >= begins).await?;
            self.book.extend(old);
        }
        let (given, is_last) = self.allocations.read_after(self.book.last).await?;
        self.book.extend(given);
        self.is_behind = !is_last;
        Ok(())
    }

    fn tell(&self, given: &[Allocated]) {
        for allocated in given {
            let Allocated { stage_id, request_id } = allocated;
            tracing::info!(stage_id, %request_id, "stage allocated");
            self.events.tell(format_args!("stage.allocated"), allocated);
        }
    }
}

/// What is told of a new stage.
#[derive(Serialize)]
struct Allocated {
    stage_id: i32,
    request_id: Uuid,
}

/// Requests that are served together, in the order in which they came.
struct Group {
    asked: Vec<Asked>,
}

/// One request and all who wait for it.
struct Asked {
    request: Uuid,
    waiting: Vec<oneshot::Sender<Result<Answer>>>,
}

impl Group {
    fn of(all: impl ExactSizeIterator<Item = Waiting>) -> Self {
        let mut asked: Vec<Asked> = Vec::with_capacity(all.len());
        let mut places: HashMap<Uuid, usize> = HashMap::with_capacity(all.len());
        for Waiting { request, reply } in all {
            match places.entry(request) {
                Entry::Occupied(place) => asked[*place.get()].waiting.push(reply),
                Entry::Vacant(place) => {
                    place.insert(asked.len());
                    asked.push(Asked { request, waiting: vec![reply] });
                }
            }
        }
        Self { asked }
    }

    /// Answers those who have a stage already.
    fn answer_known(&mut self, book: &Book) {
        let known = self.asked.extract_if(.., |asked| book.stage_of(&asked.request).is_some());
        known.for_each(|asked| {
            let stage = book.stage_of(&asked.request).expect("it was looked up");
            asked.answer(stage, true);
        });
    }

    /// Refuses those for whom nothing is left.
    fn refuse_beyond(&mut self, left: usize) {
        let error =
            || Error::new(Code::Exhausted, format!("no stage ids are left: the last one, {LAST_STAGE}, was given"));
        self.asked.drain(left.min(self.asked.len())..).for_each(|asked| asked.fail(&error()));
    }
}

impl Asked {
    /// Answers all with a new stage, which is something to tell.
    fn give(self, stage: i32) -> Allocated {
        metrics::counter!("tidemark_stage_allocated_total").increment(1);
        let request_id = self.request;
        self.answer(stage, false);
        Allocated { stage_id: stage, request_id }
    }

    /// Answers all who wait. Only the first of them who is still there made the stage, unless it was there before.
    fn answer(self, stage: i32, found: bool) {
        let mut repeated = found;
        for waiting in self.waiting {
            if repeated {
                tracing::info!(stage_id = stage, request_id = %self.request, "stage allocated before");
                metrics::counter!("tidemark_stage_repeated_total").increment(1);
            }
            // A caller that went away wants no answer.
            repeated |= waiting.send(Ok(Answer { stage, repeated })).is_ok();
        }
    }

    fn fail(self, error: &Error) {
        tracing::warn!(request_id = %self.request, %error, "no stage was given");
        for waiting in self.waiting {
            let _ = waiting.send(Err(error.share()));
        }
    }
}

/// What a caller is told whose request could not be decided in time.
fn refused(Undecided { in_doubt, source }: Undecided) -> Error {
    match in_doubt {
        // It may be stored, or be on its way: the same request id finds out.
        true => {
            let text = "Another request with the same X-Request-ID is being processed. Please retry shortly.";
            Error::new(Code::Conflict, text).source(source)
        }
        false => Error::unavailable("stage ids can't be given right now").source(source),
    }
}
