//! Writing goes before reading: while usage is written, pages are read one at a time, and never more than two. Each is
//! followed by a pause as long as it took, up to 50 ms.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::{Instant, sleep_until, timeout},
};

/// How long after a batch writing is taken to go on.
const WHILE_WRITTEN: Duration = Duration::from_secs(1);

/// How long a reader stands back: one slow page must not hold up all others, neither while it is read nor afterwards.
const PATIENCE: Duration = Duration::from_millis(50);

pub struct Courtesy {
    begun: Instant,
    /// Milliseconds after the beginning, plus one; 0 for never.
    last_batch: AtomicU64,
    alone: Place,
    /// For whoever has lost his patience.
    second: Place,
}

/// Where one page is read at a time, and when the next may be.
type Place = Arc<Mutex<Instant>>;

/// A page may be read as long as this lasts.
pub struct Turn {
    place: OwnedMutexGuard<Instant>,
    began: Instant,
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.place = Instant::now() + self.began.elapsed().min(PATIENCE);
    }
}

impl Default for Courtesy {
    fn default() -> Self {
        let begun = Instant::now();
        let place = || Arc::new(Mutex::new(begun));
        Self { begun, last_batch: AtomicU64::new(0), alone: place(), second: place() }
    }
}

impl Courtesy {
    /// A batch of so many records is being written. Without any it only says that nothing has come.
    pub fn writes(&self, records: usize) {
        if records == 0 {
            return;
        }
        self.last_batch.store(self.begun.elapsed().as_millis() as u64 + 1, Ordering::Relaxed);
    }

    fn is_written(&self) -> bool {
        match self.last_batch.load(Ordering::Relaxed) {
            0 => false,
            last => self.begun.elapsed() < Duration::from_millis(last) + WHILE_WRITTEN,
        }
    }

    /// Waits until a page may be read, if that has to be waited for.
    pub async fn turn(&self) -> Option<Turn> {
        if !self.is_written() {
            return None;
        }
        let place = match timeout(PATIENCE, self.alone.clone().lock_owned()).await {
            Ok(place) => place,
            Err(_) => self.second.clone().lock_owned().await,
        };
        sleep_until(*place).await;
        Some(Turn { place, began: Instant::now() })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn readers_stand_back_while_usage_is_written_but_not_for_long() {
        let courtesy = Courtesy::default();
        courtesy.writes(0);
        assert!(courtesy.turn().await.is_none(), "nothing is written");
        courtesy.writes(1);
        let first = courtesy.turn().await;
        assert!(first.is_some());
        assert!(courtesy.turn().now_or_never().is_none(), "the second waits");
        const PAGE: Duration = Duration::from_millis(20);
        tokio::time::advance(PAGE).await;
        let began = Instant::now();
        let (second, ()) = tokio::join!(courtesy.turn(), async { drop(first) });
        assert!(second.is_some(), "until the first has ended");
        assert_eq!(began.elapsed(), PAGE, "and as long again");
        let began = Instant::now();
        let third = courtesy.turn().await;
        assert_eq!((third.is_some(), began.elapsed()), (true, PATIENCE), "or until its patience has");
        assert!(timeout(10 * PATIENCE, courtesy.turn()).await.is_err(), "which is for one more");
        tokio::time::advance(WHILE_WRITTEN).await;
        assert!(courtesy.turn().now_or_never().is_some(), "nothing is written any more");
    }
}
