//! Mints ids with one worker id. Shared by threads without a lock: the last id's timestamp and sequence are one atomic
//! number, and who moves it owns what lies between.

use std::{
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use super::Layout;
use crate::{
    clock::Clock,
    error::{Code, Error},
};

/// How far the clock may step back and be waited for.
const TOLERATED_STEP: Duration = Duration::from_secs(2);

/// Waits up to this long are spent turning, longer ones asleep.
const TURNING: Duration = Duration::from_millis(2);

/// The moments that a lease allows, in milliseconds since 1970: from `begins` on, before `ends`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    pub begins: i64,
    pub ends: i64,
}

/// Why no id was minted. Only the first passes by waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("every id of this millisecond is given, or the lease has not begun, for {0:?} to come")]
    Wait(Duration),
    #[error("the clock stepped back by {0:?}")]
    ClockWentBack(Duration),
    #[error("the lease has ended, or was given back")]
    LeaseEnded,
    #[error("the layout's timestamp is used up")]
    Exhausted,
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Exhausted => Error::new(Code::Exhausted, refusal.to_string()),
            _ => Error::unavailable(refusal.to_string()),
        }
    }
}

pub struct Generator {
    layout: Layout,
    worker: u32,
    clock: Clock,
    /// The last id given: timestamp counted from the base, above the sequence.
    last: AtomicU64,
    /// Both counted from the base. The end grows with every renewal.
    begins: i64,
    ends: AtomicI64,
}

/// In place of the last id: no more are given.
const STOPPED: u64 = u64::MAX;

impl Generator {
    pub fn new(layout: Layout, worker: u32, fence: Fence, clock: Clock) -> Self {
        let begins = (fence.begins - layout.base).max(0);
        // The last id before the first that may be given. At the very base there is none before, and zero is left out.
        let last = ((begins as u64) << layout.sequence_bits).saturating_sub(1);
        Self { layout, worker, clock, last: last.into(), begins, ends: (fence.ends - layout.base).into() }
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The lease was renewed.
    pub fn extend(&self, ends: i64) {
        self.ends.fetch_max(ends - self.layout.base, Ordering::Relaxed);
    }

    /// Mints nothing any more. Returns the last timestamp that was minted, or one before the lease began, in milliseconds
    /// since 1970: what a lease is given back with. None if it was stopped before.
    pub fn stop(&self) -> Option<i64> {
        let last = self.last.swap(STOPPED, Ordering::Relaxed);
        (last != STOPPED).then(|| self.layout.base + (last >> self.layout.sequence_bits) as i64)
    }

    /// One id, at once or not.
    pub fn try_next(&self) -> Result<u64, Refusal> {
        let (first, _) = self.claim(1)?;
        Ok(self.id(first))
    }

    /// One id, waiting as long as waiting helps.
    pub async fn next(&self) -> Result<u64, Refusal> {
        loop {
            match self.try_next() {
                Err(Refusal::Wait(pause)) => tokio::time::sleep(pause).await,
                outcome => return outcome,
            }
        }
    }

    /// The same for threads.
    pub fn next_blocking(&self) -> Result<u64, Refusal> {
        loop {
            match self.try_next() {
                Err(Refusal::Wait(pause)) if pause <= TURNING => std::hint::spin_loop(),
                Err(Refusal::Wait(pause)) => std::thread::sleep(pause),
                outcome => return outcome,
            }
        }
    }

    /// Many ids, in growing order.
    pub async fn take(&self, count: usize) -> Result<Vec<u64>, Refusal> {
        let mut ids = Vec::with_capacity(count);
        while ids.len() < count {
            match self.claim((count - ids.len()) as u64) {
                Ok((first, claimed)) => ids.extend((first..first + claimed).map(|position| self.id(position))),
                Err(Refusal::Wait(pause)) => tokio::time::sleep(pause).await,
                Err(refusal) => return Err(refusal),
            }
        }
        Ok(ids)
    }

    fn id(&self, position: u64) -> u64 {
        let (timestamp, sequence) = (position >> self.layout.sequence_bits, position & self.layout.sequence_mask());
        self.layout.compose(timestamp, self.worker, sequence)
    }

    /// Takes up to `wanted` neighbouring positions within one millisecond.
    fn claim(&self, wanted: u64) -> Result<(u64, u64), Refusal> {
        let (bits, mask) = (self.layout.sequence_bits, self.layout.sequence_mask());
        let mut last = self.last.load(Ordering::Relaxed);
        loop {
            if last == STOPPED {
                return Err(Refusal::LeaseEnded);
            }
            let now = self.clock.now().timestamp_millis() - self.layout.base;
            // Before anything is shifted: what does not fit would begin again at zero.
            if now > self.layout.last_timestamp() {
                return Err(Refusal::Exhausted);
            }
            let latest = (last >> bits) as i64;
            let first = if now > latest {
                (now as u64) << bits
            } else {
                let behind = Duration::from_millis((latest - now) as u64);
                if last & mask == mask || behind > TOLERATED_STEP {
                    return Err(self.refusal(latest, behind));
                }
                last + 1
            };
            let timestamp = (first >> bits) as i64;
            if timestamp >= self.ends.load(Ordering::Relaxed) {
                return Err(Refusal::LeaseEnded);
            }
            let claimed = wanted.min(mask - (first & mask) + 1);
            match self.last.compare_exchange_weak(last, first + claimed - 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok((first, claimed)),
                Err(moved) => last = moved,
            }
        }
    }

    /// The clock has not passed the last timestamp, whose ids are all given, or it is far behind.
    fn refusal(&self, latest: i64, behind: Duration) -> Refusal {
        match latest < self.begins || behind <= TOLERATED_STEP {
            true => Refusal::Wait(behind.max(Duration::from_micros(100))),
            false => Refusal::ClockWentBack(behind),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, sync::Arc};

    use chrono::{DateTime, Utc};

    use super::*;

    const BASE: i64 = 1_700_000_000_000;
    const LAYOUT: Layout = Layout { base: BASE, skip_bits: 1, timestamp_bits: 41, worker_bits: 20, sequence_bits: 2 };

    fn time(milliseconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(BASE + milliseconds).unwrap()
    }

    /// A generator with four ids a millisecond, and its clock.
    fn generator(begins: i64, ends: i64, now: i64) -> (Generator, Clock) {
        let clock = Clock::manual(time(now));
        let fence = Fence { begins: BASE + begins, ends: BASE + ends };
        (Generator::new(LAYOUT, 7, fence, clock.clone()), clock)
    }

    fn stamp(generator: &Generator) -> Result<(u64, u64), Refusal> {
        let (timestamp, worker, sequence) = LAYOUT.parse(generator.try_next()?);
        assert_eq!(worker, 7);
        Ok((timestamp, sequence))
    }

    #[test]
    fn a_millisecond_has_as_many_ids_as_the_sequence() {
        let (generator, clock) = generator(0, 1000, 10);
        let ids: Vec<_> = (0..4).map(|_| stamp(&generator).unwrap()).collect();
        assert_eq!(ids, [(10, 0), (10, 1), (10, 2), (10, 3)]);
        assert!(matches!(stamp(&generator), Err(Refusal::Wait(_))));
        clock.set(time(11));
        assert_eq!(stamp(&generator), Ok((11, 0)));
    }

    #[test]
    fn no_id_lies_outside_its_lease() {
        let (generator, clock) = generator(100, 200, 50);
        assert_eq!(stamp(&generator), Err(Refusal::Wait(Duration::from_millis(49))), "it has not begun");
        clock.set(time(100));
        assert_eq!(stamp(&generator), Ok((100, 0)));
        clock.set(time(199));
        assert_eq!(stamp(&generator), Ok((199, 0)));
        clock.set(time(200));
        assert_eq!(stamp(&generator), Err(Refusal::LeaseEnded));
        generator.extend(BASE + 300);
        assert_eq!(stamp(&generator), Ok((200, 0)));
        assert_eq!(generator.stop(), Some(BASE + 200));
        assert_eq!(stamp(&generator), Err(Refusal::LeaseEnded));
        assert_eq!(generator.stop(), None);
    }

    #[test]
    fn a_lease_that_minted_nothing_ends_before_it_began() {
        let (generator, _) = generator(100, 200, 150);
        assert_eq!(generator.stop(), Some(BASE + 99));
    }

    #[test]
    fn small_steps_back_are_waited_out_and_large_ones_refused() {
        let (generator, clock) = generator(0, 1_000_000, 100_000);
        assert_eq!(stamp(&generator), Ok((100_000, 0)));
        clock.set(time(99_000));
        assert_eq!(stamp(&generator), Ok((100_000, 1)), "never a timestamp that was passed");
        assert_eq!(stamp(&generator), Ok((100_000, 2)));
        assert_eq!(stamp(&generator), Ok((100_000, 3)));
        assert_eq!(stamp(&generator), Err(Refusal::Wait(Duration::from_secs(1))));
        clock.set(time(90_000));
        assert_eq!(stamp(&generator), Err(Refusal::ClockWentBack(Duration::from_secs(10))));
        clock.set(time(100_001));
        assert_eq!(stamp(&generator), Ok((100_001, 0)));
    }

    #[test]
    fn the_last_timestamp_of_the_layout_is_the_end() {
        let layout = Layout { timestamp_bits: 4, sequence_bits: 28, worker_bits: 31, ..LAYOUT };
        let clock = Clock::manual(time(15));
        let generator = Generator::new(layout, 0, Fence { begins: 0, ends: i64::MAX }, clock.clone());
        generator.try_next().unwrap();
        clock.set(time(16));
        assert_eq!(generator.try_next(), Err(Refusal::Exhausted));
        // A timestamp that takes all the bits there are does not begin again.
        let layout = Layout { skip_bits: 0, timestamp_bits: 33, worker_bits: 0, sequence_bits: 31, ..LAYOUT };
        let clock = Clock::manual(time((1 << 33) - 1));
        let generator = Generator::new(layout, 0, Fence { begins: 0, ends: i64::MAX }, clock.clone());
        assert_eq!(layout.parse(generator.try_next().unwrap()).0, (1 << 33) - 1);
        clock.set(time(1 << 33));
        assert_eq!(generator.try_next(), Err(Refusal::Exhausted));
    }

    #[test]
    fn threads_share_a_generator_and_no_id() {
        let layout = Layout { sequence_bits: 12, worker_bits: 10, ..LAYOUT };
        let fence = Fence { begins: 0, ends: i64::MAX };
        let generator = Arc::new(Generator::new(layout, 1, fence, Clock::system()));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let generator = generator.clone();
                std::thread::spawn(move || (0..20_000).map(|_| generator.next_blocking().unwrap()).collect::<Vec<_>>())
            })
            .collect();
        let mut all = HashSet::new();
        for thread in threads {
            let ids = thread.join().unwrap();
            assert!(ids.is_sorted_by(|a, b| a < b), "each thread's ids grow");
            ids.into_iter().for_each(|id| assert!(all.insert(id), "{id} came twice"));
        }
        assert_eq!(all.len(), 80_000);
    }

    #[tokio::test]
    async fn a_batch_spans_milliseconds() {
        let fence = Fence { begins: 0, ends: i64::MAX };
        let generator = Generator::new(LAYOUT, 1, fence, Clock::system());
        let ids = generator.take(20).await.unwrap();
        assert!(ids.len() == 20 && ids.is_sorted_by(|a, b| a < b));
    }
}
