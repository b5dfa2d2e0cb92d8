//! Tells the world when a pool is low or exhausted.
//!
//! The pool remembers what was told, and only after it was. Whoever changes or reads a pool whose level is news tells it, and
//! so does every process that starts: one that is killed in between costs a delay or a repeat, never the event.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use serde::Serialize;

use super::{
    existing, key,
    pool::{Level, Pool},
    read,
};
use crate::{api::Name, error::Result, events::Events, watermark::Cells};

#[derive(Clone)]
pub struct Announcer {
    cells: Cells<Pool>,
    events: Events,
    /// Pools that this process is telling about, and whether there was more news meanwhile.
    telling: Arc<Mutex<HashMap<Name, bool>>>,
}

/// What is told.
#[derive(Serialize)]
struct News<'a> {
    pool: &'a Name,
    level: Level,
    remaining: u64,
    low_water: Option<u64>,
    template: String,
}

impl Announcer {
    pub fn new(cells: Cells<Pool>, events: Events) -> Self {
        Self { cells, events, telling: Arc::default() }
    }

    /// Tells a pool's level in the background. If that fails, whoever looks at the pool next tries again.
    pub fn announce(&self, pool: &Name) {
        if self.telling().insert(pool.clone(), true).is_some() {
            return;
        }
        let (this, pool) = (self.clone(), pool.clone());
        tokio::spawn(async move {
            while this.has_more(&pool) {
                if let Err(error) = this.tell(&pool).await {
                    error.log("noid.announce");
                }
            }
        });
    }

    /// Whether there is something to tell. If not, the telling ends here.
    fn has_more(&self, pool: &Name) -> bool {
        let mut telling = self.telling();
        let more = telling.get_mut(pool).is_some_and(std::mem::take);
        if !more {
            telling.remove(pool);
        }
        more
    }

    async fn tell(&self, name: &Name) -> Result<()> {
        loop {
            let pool = read(&self.cells, name).await?;
            if !pool.has_news() {
                return Ok(());
            }
            let (level, low_water) = (pool.level(), pool.low_water);
            let news = News { pool: name, level, remaining: pool.remaining(), low_water, template: pool.written() };
            self.events.publish("noid", level.as_str(), name, &news).await?;
            let remember = move |state: &mut Option<Pool>| {
                let pool = existing(state)?;
                // Unless it is another question by now.
                if pool.low_water == low_water {
                    pool.announced = pool.announced.max(level);
                }
                Ok(())
            };
            self.cells.change(&key(name), None, remember).await?;
        }
    }

    fn telling(&self) -> std::sync::MutexGuard<'_, HashMap<Name, bool>> {
        self.telling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
