//! Timers that are due soon, in the order of their time, and how many callbacks are under way.
//!
//! A timer leaves the queue when its time has come and there is room: in all, and at its destination. A slow receiver fills
//! its own share, and what waits for it stands aside.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{callback::NATS, store::Entry};

type Moment = DateTime<Utc>;

#[derive(Default)]
pub struct Queue {
    limit: usize,
    limit_per_destination: usize,
    under_way: usize,
    /// Ordered by time, then by id.
    waiting: BinaryHeap<Reverse<(Moment, Uuid, Arc<str>)>>,
    /// What waits, here or aside: nobody is queued twice for the same moment.
    known: HashSet<(Uuid, Moment)>,
    destinations: HashMap<Arc<str>, Destination>,
}

#[derive(Default)]
struct Destination {
    under_way: usize,
    /// Due, but there was no room.
    aside: VecDeque<(Moment, Uuid)>,
}

impl Queue {
    pub fn new(limit: usize, limit_per_destination: usize) -> Self {
        Self { limit, limit_per_destination, ..Self::default() }
    }

    pub fn push(&mut self, entry: Entry) {
        if self.known.insert((entry.id, entry.due_at)) {
            self.waiting.push(Reverse((entry.due_at, entry.id, entry.destination)));
        }
    }

    /// When the next one is due, not counting those that wait for room.
    pub fn next_due(&self) -> Option<Moment> {
        self.waiting.peek().map(|Reverse((due, ..))| *due)
    }

    /// Takes those that are due and have room, up to so many. They are under way until they are [released](Self::release).
    pub fn take_due(&mut self, now: Moment, most: usize, nats_is_up: bool) -> Vec<Entry> {
        while let Some(Reverse((due, ..))) = self.waiting.peek()
            && *due <= now
        {
            let Some(Reverse((due, id, destination))) = self.waiting.pop() else { break };
            self.destinations.entry(destination).or_default().aside.push_back((due, id));
        }
        let mut room = most.min(self.limit - self.under_way);
        let mut taken = Vec::new();
        for (name, destination) in &mut self.destinations {
            let own = match &**name {
                NATS if nats_is_up => usize::MAX,
                NATS => 0,
                _ => self.limit_per_destination.saturating_sub(destination.under_way),
            };
            let count = destination.aside.len().min(own).min(room);
            room -= count;
            destination.under_way += count;
            for (due_at, id) in destination.aside.drain(..count) {
                self.known.remove(&(id, due_at));
                taken.push(Entry { due_at, id, destination: name.clone() });
            }
        }
        self.under_way += taken.len();
        taken
    }

    /// Callbacks to a destination are over.
    pub fn release(&mut self, name: &Arc<str>, count: usize) {
        self.under_way -= count;
        if let Some(destination) = self.destinations.get_mut(name) {
            destination.under_way -= count;
            if destination.under_way == 0 && destination.aside.is_empty() {
                self.destinations.remove(name);
            }
        }
    }

    /// Whether something is due and only lacks room.
    pub fn holds_back(&self) -> bool {
        self.destinations.values().any(|destination| !destination.aside.is_empty())
    }

    pub fn under_way(&self) -> usize {
        self.under_way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Moment {
        DateTime::from_timestamp(second, 0).unwrap()
    }

    fn entry(second: i64, number: u128, destination: &str) -> Entry {
        Entry { due_at: at(second), id: Uuid::from_u128(number), destination: destination.into() }
    }

    fn numbers(taken: &[Entry]) -> Vec<u128> {
        let mut numbers: Vec<u128> = taken.iter().map(|entry| entry.id.as_u128()).collect();
        numbers.sort();
        numbers
    }

    #[test]
    fn nothing_leaves_before_its_time_or_twice() {
        let mut queue = Queue::new(100, 100);
        for one in [entry(5, 1, "a:80"), entry(3, 2, "a:80"), entry(3, 2, "a:80"), entry(4, 3, "b:80")] {
            queue.push(one);
        }
        assert_eq!(queue.next_due(), Some(at(3)));
        assert!(queue.take_due(at(2), 10, true).is_empty());
        assert_eq!(numbers(&queue.take_due(at(4), 10, true)), [2, 3]);
        assert_eq!(numbers(&queue.take_due(at(4), 10, true)), [] as [u128; 0]);
        assert_eq!(queue.next_due(), Some(at(5)));
        // A timer that was changed may stand for two moments; both are asked, and the claim decides.
        queue.push(entry(6, 1, "a:80"));
        assert_eq!(numbers(&queue.take_due(at(9), 10, true)), [1, 1]);
    }

    #[test]
    fn a_slow_receiver_fills_its_own_share_and_delays_nobody() {
        let mut queue = Queue::new(5, 2);
        for number in 0..10 {
            queue.push(entry(1, number, "slow:80"));
        }
        queue.push(entry(2, 10, "quick:80"));
        assert_eq!(numbers(&queue.take_due(at(2), 10, true)), [0, 1, 10]);
        assert!(queue.take_due(at(2), 10, true).is_empty() && queue.holds_back());
        queue.release(&"slow:80".into(), 1);
        assert_eq!(numbers(&queue.take_due(at(2), 10, true)), [2]);
        // Nor does anybody get more than there is in all.
        for number in 20..30 {
            queue.push(entry(1, number, &format!("other{number}:80")));
        }
        assert_eq!(queue.take_due(at(2), 10, true).len(), 2);
        assert_eq!(queue.under_way(), 5);
    }

    #[test]
    fn nats_has_no_share_and_waits_while_it_is_away() {
        let mut queue = Queue::new(100, 2);
        for number in 0..10 {
            queue.push(entry(1, number, NATS));
        }
        assert!(queue.take_due(at(2), 100, false).is_empty());
        assert_eq!(queue.take_due(at(2), 100, true).len(), 10);
        queue.release(&NATS.into(), 10);
        assert!(!queue.holds_back() && queue.under_way() == 0 && queue.destinations.is_empty());
    }
}
