//! Writing goes before reading: while usage is written, pages are read one at a time, and never more than two.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

/// How long after a batch writing is taken to go on.
const WHILE_WRITTEN: Duration = Duration::from_secs(1);

/// How long a reader stands back: one slow page must not hold up all others.
const PATIENCE: Duration = Duration::from_millis(50);

pub struct Courtesy {
    begun: Instant,
    /// Milliseconds after the beginning, plus one; 0 for never.
    last_batch: AtomicU64,
    alone: Arc<Semaphore>,
    /// For whoever has lost his patience.
    second: Arc<Semaphore>,
}

impl Default for Courtesy {
    fn default() -> Self {
        let place = || Arc::new(Semaphore::new(1));
        Self { begun: Instant::now(), last_batch: AtomicU64::new(0), alone: place(), second: place() }
    }
}

impl Courtesy {
    /// A batch is being written.
    pub fn writes(&self) {
        self.last_batch.store(self.begun.elapsed().as_millis() as u64 + 1, Ordering::Relaxed);
    }

    fn is_written(&self) -> bool {
        match self.last_batch.load(Ordering::Relaxed) {
            0 => false,
            last => self.begun.elapsed() < Duration::from_millis(last) + WHILE_WRITTEN,
        }
    }

    /// Waits until a page may be read, which lasts as long as what is returned.
    pub async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        if !self.is_written() {
            return None;
        }
        match timeout(PATIENCE, self.alone.clone().acquire_owned()).await {
            Ok(turn) => turn.ok(),
            Err(_) => self.second.clone().acquire_owned().await.ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn readers_stand_back_while_usage_is_written_but_not_for_long() {
        let courtesy = Courtesy::default();
        assert!(courtesy.turn().await.is_none(), "nothing is written");
        courtesy.writes();
        let first = courtesy.turn().await;
        assert!(first.is_some());
        assert!(courtesy.turn().now_or_never().is_none(), "the second waits");
        let (second, ()) = tokio::join!(courtesy.turn(), async { drop(first) });
        assert!(second.is_some(), "until the first has ended");
        let began = Instant::now();
        let third = courtesy.turn().await;
        assert_eq!((third.is_some(), began.elapsed()), (true, PATIENCE), "or until its patience has");
        assert!(timeout(10 * PATIENCE, courtesy.turn()).await.is_err(), "which is for one more");
        tokio::time::advance(WHILE_WRITTEN).await;
        assert!(courtesy.turn().now_or_never().is_some(), "nothing is written any more");
    }
}
