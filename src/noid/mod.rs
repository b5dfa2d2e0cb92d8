//! Noid pools: minters of short ids with a check character, in an order that their template fixes.
//!
//! A [`pool`] is one value of the counters' bucket; whatever happens to it is one compare-and-set, shared with everybody
//! who waits. [`template`] is arithmetic alone, and all that `noid-tool` needs.

mod announce;
mod exclusions;
mod jump;
mod list;
mod meters;
mod mint;
mod move_pool;
mod pool;
mod template;
mod tend;

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};

pub use template::{BadTemplate, CheckScope, Template};

use crate::{
    api::{
        self, Name,
        noid::{
            AdvancePool, ClosePool, CreatePool, ExcludeNoids, ExportPool, GetPool, ImportPool, ListPools, MintNoids,
            NoidStats, OpenPool, PeekNoids, SetLowWater, ValidateNoid,
        },
    },
    clock::Clock,
    config::Config,
    error::{Code, Error, Result},
    events::Events,
    gateway::Hosted,
    jetstream::Bucket,
    watermark::{Cells, RequestId},
};
use announce::Announcer;
use list::Births;
use meters::Meters;
use pool::Pool;

/// Answers the operations on pools.
pub struct Pools {
    cells: Cells<Pool>,
    announcer: Announcer,
    births: Births,
    meters: Meters,
    idempotency_window: Duration,
    max_pools: usize,
    clock: Clock,
    started: DateTime<Utc>,
}

impl Pools {
    pub fn new(counters: Bucket, events: Events, config: &Config, clock: Clock, instance: Arc<str>) -> Self {
        let cells = Cells::new(counters, instance, config.watermark.deadline);
        Self {
            announcer: Announcer::new(cells.clone(), events),
            cells,
            births: Births::default(),
            meters: Meters::default(),
            idempotency_window: config.watermark.idempotency_window,
            max_pools: config.noid.max_pools,
            started: clock.now(),
            clock,
        }
    }

    pub fn host(self: &Arc<Self>, hosted: &mut Hosted) {
        hosted.add::<ListPools>(self);
        hosted.add::<CreatePool>(self);
        hosted.add::<GetPool>(self);
        hosted.add::<OpenPool>(self);
        hosted.add::<ClosePool>(self);
        hosted.add::<MintNoids>(self);
        hosted.add::<PeekNoids>(self);
        hosted.add::<AdvancePool>(self);
        hosted.add::<ExcludeNoids>(self);
        hosted.add::<ValidateNoid>(self);
        hosted.add::<SetLowWater>(self);
        hosted.add::<ExportPool>(self);
        hosted.add::<ImportPool>(self);
        hosted.add::<NoidStats>(self);
    }

    /// Changes a pool that must exist, tells its level if that is news, and describes it.
    async fn change(
        &self,
        name: Name,
        request: RequestId,
        mut apply: impl FnMut(&mut Pool) -> Result<()> + Send + 'static,
    ) -> Result<api::noid::Pool> {
        let described = name.clone();
        let change = move |state: &mut Option<Pool>| {
            let pool = existing(state)?;
            apply(pool)?;
            Ok((describe(described.clone(), pool), pool.has_news()))
        };
        let (pool, has_news) = self.cells.change(&key(&name), request, change).await?.answer;
        if has_news {
            self.announcer.announce(&name);
        }
        Ok(pool)
    }

    /// Makes a pool of a name that is free.
    async fn create(&self, name: Name, request: RequestId, pool: Pool) -> Result<api::noid::Pool> {
        if name.as_str() == RESERVED {
            return Err(Error::field("name", format!("{RESERVED} is a word of its own at this place")));
        }
        let pools = self.names().await?.len();
        if pools >= self.max_pools {
            return Err(Error::new(Code::Conflict, format!("there are {pools} pools, and noid.max_pools is the most")));
        }
        let created = pool.clone();
        let create = move |state: &mut Option<Pool>| match state {
            Some(_) => Err(taken()),
            None => {
                *state = Some(created.clone());
                Ok(())
            }
        };
        self.cells.change(&key(&name), request, create).await?;
        if pool.has_news() {
            self.announcer.announce(&name);
        }
        Ok(describe(name, &pool))
    }

    async fn read(&self, name: &Name) -> Result<Pool> {
        read(&self.cells, name).await
    }
}

/// A pool without the numbers that are excluded: for looking only.
async fn read(cells: &Cells<Pool>, name: &Name) -> Result<Pool> {
    existing(&mut cells.read(&key(name)).await?).cloned()
}

/// `/pools/import` is no pool.
const RESERVED: &str = "import";

/// Where a pool stands in the bucket.
fn key(name: &Name) -> String {
    [KEYS, name.as_str()].concat()
}

const KEYS: &str = "noid.";

fn existing(state: &mut Option<Pool>) -> Result<&mut Pool> {
    match state {
        Some(pool) if pool.is_sound() => Ok(pool),
        Some(_) => Err(Error::internal("a pool whose counter lies beyond its end")),
        None => Err(not_found()),
    }
}

fn not_found() -> Error {
    Error::new(Code::NotFound, "Pool could not be found")
}

fn taken() -> Error {
    Error::new(Code::Conflict, "name already exists")
}

fn describe(name: Name, pool: &Pool) -> api::noid::Pool {
    let size = pool.template.size();
    api::noid::Pool {
        name,
        template: pool.written(),
        used: pool.position,
        max: size.map_or(-1, |size| size as i64),
        closed: pool.closed,
        last_mint: pool.last_mint,
        created: pool.created,
        remaining: size.map(|_| pool.remaining()),
        excluded: Some(pool.excluded.ahead()).filter(|excluded| *excluded > 0),
        low_water: pool.low_water,
        check_scope: pool.template.check_scope().filter(|scope| *scope != CheckScope::Whole),
    }
}
