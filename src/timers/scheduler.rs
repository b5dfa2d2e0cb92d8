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

pub struct Scheduler {
    queue: Mutex<Queue>,
    /// Something came, or room was made.
    changed: Notify,
    armer: Arc<Armer>,
    near_window: TimeDelta,
    /// How far our clock is ahead of PostgreSQL's, which decides.
    ahead: Mutex<TimeDelta>,
}

/// Clocks that differ by less are taken for equal: asking takes some milliseconds itself.
const EQUAL: TimeDelta = TimeDelta::milliseconds(20);

impl Scheduler {
    pub fn new(armer: Arc<Armer>, queue: Queue, near_window: Duration) -> Self {
        Self {
            queue: Mutex::new(queue),
            changed: Notify::new(),
            armer,
            near_window: TimeDelta::from_std(near_window).unwrap_or(TimeDelta::MAX),
            ahead: Mutex::default(),
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

    /// Seconds for which somebody shall be woken.
    pub fn arm(&self, seconds: Vec<i64>) {
        self.armer.arm(seconds, self.now());
    }

    pub fn near_window(&self) -> TimeDelta {
        self.near_window
    }

    /// Waits until something is due and has room, and takes it.
    pub async fn due(&self, most: usize, nats_is_up: impl Fn() -> bool) -> Vec<Entry> {
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
                return taken;
            }
            let changed = self.changed.notified();
            match next.map(|next| (next - self.now()).to_std().unwrap_or_default()) {
                Some(wait) => drop(tokio::time::timeout(wait, changed).await),
                None => changed.await,
            }
        }
    }

    pub fn release(&self, destination: &Arc<str>, count: usize) {
        self.queue().release(destination, count);
        self.changed.notify_one();
    }

    pub fn under_way(&self) -> usize {
        self.queue().under_way()
    }

    /// PostgreSQL's clock showed this a moment ago.
    pub fn compare_clocks(&self, theirs: DateTime<Utc>) {
        let ahead = Utc::now() - theirs;
        let ahead = if ahead.abs() < EQUAL { TimeDelta::zero() } else { ahead };
        let mut known = self.ahead.lock().expect(UNBROKEN);
        if (*known - ahead).abs() > EQUAL {
            tracing::warn!(
                milliseconds = ahead.num_milliseconds(),
                "our clock is ahead of PostgreSQL's, which decides"
            );
            *known = ahead;
        }
    }

    /// The time by PostgreSQL's clock, as far as we know it.
    fn now(&self) -> DateTime<Utc> {
        Utc::now() - *self.ahead.lock().expect(UNBROKEN)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect(UNBROKEN)
    }
}

const POLL: TimeDelta = TimeDelta::milliseconds(100);

const UNBROKEN: &str = "no panic while the queue is held";
