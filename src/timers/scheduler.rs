//! The scheduler: holds what is due soon, and fires it at its time.
//!
//! Everything that it does may be done twice, by two instances or by two wake-ups: the claim in PostgreSQL makes a timer
//! fire once.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use tokio::sync::Notify;

use super::{
    arm::{Armer, FIRM},
    queue::Queue,
    store::Entry,
};
use crate::clock::Clock;

pub struct Scheduler {
    queue: Mutex<Queue>,
    /// Something came, or room was made.
    changed: Notify,
    armer: Arc<Armer>,
    near_window: TimeDelta,
    /// How far our clock is ahead of PostgreSQL's, which decides.
    ahead: Mutex<TimeDelta>,
    clock: Clock,
}

/// Clocks that move apart by more are worth a word.
const NOTABLE: TimeDelta = TimeDelta::milliseconds(50);

/// Room for one callback, from when it is taken until it is dropped.
pub struct Slot {
    scheduler: Arc<Scheduler>,
    destination: Arc<str>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.scheduler.queue().release(&self.destination);
        self.scheduler.changed.notify_one();
    }
}

impl Scheduler {
    pub fn new(armer: Arc<Armer>, queue: Queue, near_window: Duration, clock: Clock) -> Self {
        Self {
            queue: Mutex::new(queue),
            changed: Notify::new(),
            armer,
            near_window: TimeDelta::from_std(near_window).unwrap_or(TimeDelta::MAX),
            ahead: Mutex::default(),
            clock,
        }
    }

    /// Timers that were set or changed here: somebody shall be woken for them, and what is due in a moment is kept here.
    pub fn expect(&self, entries: Vec<Entry>) {
        let now = self.now();
        let near = entries.iter().filter(|entry| entry.due_at - now < self.near_window);
        self.armer.arm(near.map(|entry| entry.due_at.timestamp()), now);
        self.hold(entries.into_iter().filter(|entry| (entry.due_at - now).num_seconds() <= FIRM));
    }

    /// Timers that are to be fired here.
    pub fn hold(&self, entries: impl IntoIterator<Item = Entry>) {
        let mut queue = self.queue();
        entries.into_iter().for_each(|entry| queue.push(entry));
        drop(queue);
        self.changed.notify_one();
    }

    /// Destinations that have more to do than they are soon done with.
    pub fn crowded(&self) -> Vec<Arc<str>> {
        self.queue().crowded(CROWD)
    }

    /// Seconds for which somebody shall be woken.
    pub fn arm(&self, seconds: Vec<i64>) {
        self.armer.arm(seconds, self.now());
    }

    pub fn near_window(&self) -> TimeDelta {
        self.near_window
    }

    /// Waits until something is due and has room, and takes it.
    pub async fn due(self: &Arc<Self>, most: usize, nats_is_up: impl Fn() -> bool) -> Vec<(Entry, Slot)> {
        loop {
            let nats_is_up = nats_is_up();
            let (taken, next) = {
                let mut queue = self.queue();
                let taken = queue.take_due(self.now(), most, nats_is_up);
                let next = queue.next_due();
                // While the connection is lost nobody tells us that it is back.
                let next = if queue.holds_back() && !nats_is_up { Some(self.now() + POLL) } else { next };
                (taken, next)
            };
            if !taken.is_empty() {
                let slot = |entry: Entry| {
                    let slot = Slot { scheduler: self.clone(), destination: entry.destination.clone() };
                    (entry, slot)
                };
                return taken.into_iter().map(slot).collect();
            }
            let changed = self.changed.notified();
            match next.map(|next| (next - self.now()).to_std().unwrap_or_default()) {
                Some(wait) => drop(tokio::time::timeout(wait, changed).await),
                None => changed.await,
            }
        }
    }

    /// By our own clock, whatever PostgreSQL's says.
    pub fn own_time(&self) -> DateTime<Utc> {
        self.clock.now()
    }

    pub fn under_way(&self) -> usize {
        self.queue().under_way()
    }

    /// PostgreSQL's clock showed `theirs` at some moment between `before` and now, which are by our own. What we know of the
    /// difference is moved no farther than that proves.
    pub fn compare_clocks(&self, before: DateTime<Utc>, theirs: DateTime<Utc>) {
        let after = self.clock.now();
        let mut ahead = self.ahead.lock().expect(UNBROKEN);
        let proven = (*ahead).clamp((before - theirs).min(after - theirs), after - theirs);
        if (proven - *ahead).abs() > NOTABLE {
            tracing::warn!(
                milliseconds = proven.num_milliseconds(),
                "our clock is ahead of PostgreSQL's, which decides"
            );
        }
        *ahead = proven;
    }

    /// The time by PostgreSQL's clock, as far as we know it.
    pub fn now(&self) -> DateTime<Utc> {
        self.clock.now() - *self.ahead.lock().expect(UNBROKEN)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect(UNBROKEN)
    }
}

/// As much stands aside for a destination, and no more is read for it.
const CROWD: usize = 10_000;

const POLL: TimeDelta = TimeDelta::milliseconds(100);

const UNBROKEN: &str = "no panic while the queue is held";
