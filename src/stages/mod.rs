//! Stages of a game's levels: their ids, and the props and acts inside them.
//!
//! Stages are given in a log ([`allocations`]) that every process reads ([`book`]), many with one write ([`allocator`]). What is
//! inside a stage ([`contents`]) is one state with group commit, so that ids of props and acts come in strict order, and two who edit one stage see each
//! other's changes.

mod acts;
mod allocate;
mod allocations;
mod allocator;
mod book;
mod contents;
mod jump;
mod key;
mod props;

use std::{
    collections::HashSet,
    sync::{Arc, RwLock},
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub use key::Key;

use crate::{
    api::{
        Call, Name, Operation,
        stages::{
            AllocateStage, CreateAct, GetAct, GetProp, GetStage, ListActs, ListProps, RegisterProp, ResolveAct,
            UnregisterProp, UpdateAct,
        },
    },
    clock::Clock,
    config::Config,
    error::{Code, Error, Result},
    events::Events,
    gateway::Hosted,
    jetstream::Bucket,
    watermark::{Cells, Once, RequestId},
};
use allocations::{Allocation, Allocations};
use allocator::Allocator;
use contents::Contents;

/// Answers the operations on stages.
pub struct Stages {
    allocations: Allocations,
    allocator: Allocator,
    contents: Cells<Contents>,
    /// Stages that exist, as far as this process has met them.
    met: RwLock<HashSet<i32>>,
    events: Events,
    idempotency_window: Duration,
    first_id: i64,
    deadline: Duration,
}

impl Stages {
    pub fn new(
        jetstream: async_nats::jetstream::Context,
        events: Events,
        config: &Config,
        clock: Clock,
        instance: Arc<str>,
    ) -> Self {
        let (prefix, deadline) = (&config.nats.prefix, config.watermark.deadline);
        let allocations = Allocations::new(jetstream.clone(), prefix, instance.clone());
        let bucket = Bucket::new(jetstream, format!("{prefix}_stage_contents"));
        Self {
            allocator: Allocator::start(allocations.clone(), events.clone(), &config.stages, deadline, clock),
            allocations,
            contents: Cells::new(bucket, instance, deadline),
            met: RwLock::default(),
            events,
            idempotency_window: config.watermark.idempotency_window,
            first_id: config.stages.first_id,
            deadline,
        }
    }

    pub fn host(self: &Arc<Self>, hosted: &mut Hosted) {
        hosted.add::<AllocateStage>(self);
        hosted.add::<GetStage>(self);
        hosted.add::<RegisterProp>(self);
        hosted.add::<ListProps>(self);
        hosted.add::<GetProp>(self);
        hosted.add::<UnregisterProp>(self);
        hosted.add::<CreateAct>(self);
        hosted.add::<ListActs>(self);
        hosted.add::<GetAct>(self);
        hosted.add::<UpdateAct>(self);
        hosted.add::<ResolveAct>(self);
    }

    /// Looks into a stage, as it is now.
    async fn look<A: Send + 'static>(
        &self,
        stage: &Name,
        mut look: impl FnMut(&mut Contents) -> Result<A> + Send + 'static,
    ) -> Result<A> {
        let stage = self.existing(stage).await?;
        // A change that changes nothing is answered from a fresh read.
        let look = move |state: &mut Option<Contents>| match state {
            Some(contents) => look(contents),
            None => look(&mut Contents::of(stage)),
        };
        Ok(self.contents.change(&stage.to_string(), None, look).await?.answer)
    }

    /// Changes what is inside a stage, and tells it. With an `Idempotency-Key` it happens once.
    async fn change<
        O: Operation<Target = Name, Request: Serialize>,
        A: Serialize + DeserializeOwned + Send + 'static,
    >(
        &self,
        call: &Call<O>,
        event: &'static str,
        mut change: impl FnMut(&mut Contents) -> Result<Edit<A>> + Send + 'static,
    ) -> Result<Edit<A>> {
        let stage_id = self.existing(&call.target).await?;
        let change = move |state: &mut Option<Contents>| match state {
            Some(contents) => change(contents),
            None => {
                let mut contents = Contents::of(stage_id);
                let edit = change(&mut contents)?;
                *state = Some(contents);
                Ok(edit)
            }
        };
        let once = Once::of(call, self.idempotency_window)?;
        let (contents, events, request_id) = (self.contents.clone(), self.events.clone(), call.context.request_id());
        // Goes on if the caller leaves: what has happened is told.
        let changed = tokio::spawn(async move {
            let key = stage_id.to_string();
            let committed = match once {
                Some(once) => contents.change_once(&key, request_id.clone(), once, change).await?,
                None => contents.change(&key, request_id.clone(), change).await?,
            };
            let mut edit = committed.answer;
            edit.is_news &= committed.revision != 0;
            if edit.is_news {
                let told = Told { stage_id, request_id, what: &edit.answer };
                events.tell(format_args!("stage.{event}.{stage_id}"), &told);
            }
            Ok(edit)
        });
        changed.await.map_err(Error::internal)?
    }

    /// The id of a stage that was allocated.
    async fn existing(&self, name: &Name) -> Result<i32> {
        let stage = number(name)?;
        if !self.met.read().expect(UNBROKEN).contains(&stage) {
            self.allocation(stage).await?;
        }
        Ok(stage)
    }

    async fn allocation(&self, stage: i32) -> Result<Allocation> {
        let unknown = || Error::new(Code::NotFound, format!("stage {stage} was never allocated"));
        let allocation = self.allocations.find(stage).await?.ok_or_else(unknown)?;
        self.met.write().expect(UNBROKEN).insert(stage);
        Ok(allocation)
    }
}

/// What a change has made of the inside of a stage.
#[derive(Serialize, Deserialize)]
struct Edit<A> {
    answer: A,
    /// Whether anything is new.
    is_news: bool,
}

/// What is told of a change.
#[derive(Serialize)]
struct Told<'a, A> {
    stage_id: i32,
    request_id: RequestId,
    #[serde(flatten)]
    what: &'a A,
}

const UNBROKEN: &str = "no panic while the stages are held";

/// Each stage has one spelling: rights are granted on subjects.
fn number(name: &Name) -> Result<i32> {
    let number = name.as_str().parse().ok().filter(|number: &i32| *number > 0 && number.to_string() == name.as_str());
    number.ok_or_else(|| Error::field("stage", format!("must be a whole number from 1 to {}", i32::MAX)))
}
