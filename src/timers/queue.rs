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
    /// Callbacks over HTTP. Those on NATS are over at once and have a limit of their own.
    under_way: usize,
    /// Ordered by time, then by id.
    waiting: BinaryHeap<Reverse<(Moment, Uuid, Arc<str>)>>,
    /// What waits, here or aside: nobody is queued twice for the same moment.
    known: HashSet<(Uuid, Moment)>,
    destinations: HashMap<Arc<str>, Destination>,
    /// Destinations that have something due and room for it, each once, in the order of their turns.
    turns: VecDeque<Arc<str>>,
}

#[derive(Default)]
struct Destination {
    under_way: usize,
    /// Due, in the order in which it came to be.
    aside: VecDeque<(Moment, Uuid)>,
    has_turn: bool,
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
            let Some(Reverse((due, id, name))) = self.waiting.pop() else { break };
            self.destinations.entry(name.clone()).or_default().aside.push_back((due, id));
            self.give_turn(&name);
        }
        let mut taken = Vec::new();
        for _ in 0..self.turns.len() {
            let Some(name) = self.turns.pop_front() else { break };
            let room = match &*name {
                NATS if nats_is_up => usize::MAX,
                NATS => 0,
                _ => self.limit - self.under_way,
            };
            let own = self.room_at(&name);
            let Some(destination) = self.destinations.get_mut(&name) else { continue };
            let count = destination.aside.len().min(own).min(room).min(most - taken.len());
            destination.under_way += count;
            destination.has_turn = false;
            for (due_at, id) in destination.aside.drain(..count) {
                self.known.remove(&(id, due_at));
                taken.push(Entry { due_at, id, destination: name.clone() });
            }
            self.under_way += if &*name == NATS { 0 } else { count };
            self.give_turn(&name);
        }
        taken
    }

    /// A callback to a destination is over.
    pub fn release(&mut self, name: &Arc<str>) {
        self.under_way -= usize::from(&**name != NATS);
        let Some(destination) = self.destinations.get_mut(name) else { return };
        destination.under_way -= 1;
        match destination.under_way == 0 && destination.aside.is_empty() {
            true => drop(self.destinations.remove(name)),
            false => self.give_turn(name),
        }
    }

    /// Destinations for which so much stands aside, or more.
    pub fn crowded(&self, much: usize) -> Vec<Arc<str>> {
        let crowded = self.destinations.iter().filter(|(_, destination)| destination.aside.len() >= much);
        crowded.map(|(name, _)| name.clone()).collect()
    }

    /// Whether something is due and only lacks room.
    pub fn holds_back(&self) -> bool {
        !self.turns.is_empty()
    }

    pub fn under_way(&self) -> usize {
        self.under_way + self.destinations.get(NATS).map_or(0, |nats| nats.under_way)
    }

    /// What a destination itself has room for.
    fn room_at(&self, name: &str) -> usize {
        let under_way = self.destinations.get(name).map_or(0, |destination| destination.under_way);
        let limit = if name == NATS { self.limit } else { self.limit_per_destination };
        limit.saturating_sub(under_way)
    }

    fn give_turn(&mut self, name: &Arc<str>) {
        let has_room = self.room_at(name) > 0;
        let Some(destination) = self.destinations.get_mut(name) else { return };
        if has_room && !destination.has_turn && !destination.aside.is_empty() {
            destination.has_turn = true;
            self.turns.push_back(name.clone());
        }
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
        assert!(queue.take_due(at(2), 10, true).is_empty());
        assert_eq!((queue.crowded(8), queue.crowded(9)), (vec!["slow:80".into()], vec![]));
        queue.release(&"slow:80".into());
        assert_eq!(numbers(&queue.take_due(at(2), 10, true)), [2]);
        // Nor does anybody get more than there is in all.
        for number in 20..30 {
            queue.push(entry(1, number, &format!("other{number}:80")));
        }
        assert_eq!(queue.take_due(at(2), 10, true).len(), 2);
        assert_eq!(queue.under_way(), 5);
    }

    #[test]
    fn destinations_take_turns() {
        let mut queue = Queue::new(2, 2);
        for number in 0..4 {
            queue.push(entry(1, number, "a:80"));
            queue.push(entry(1, 10 + number, "b:80"));
        }
        let mut order = Vec::new();
        for _ in 0..4 {
            let taken = queue.take_due(at(2), 10, true);
            taken.iter().for_each(|one| queue.release(&one.destination));
            order.push(taken[0].destination.to_string());
        }
        assert_eq!(order[0], order[2]);
        assert_ne!(order[0], order[1]);
        assert!(!queue.holds_back() && queue.destinations.is_empty());
    }

    #[test]
    fn nats_has_no_share_and_waits_while_it_is_away() {
        let mut queue = Queue::new(100, 2);
        for number in 0..10 {
            queue.push(entry(1, number, NATS));
        }
        assert!(queue.take_due(at(2), 100, false).is_empty() && queue.holds_back());
        assert_eq!(queue.take_due(at(2), 100, true).len(), 10);
        (0..10).for_each(|_| queue.release(&NATS.into()));
        assert!(!queue.holds_back() && queue.under_way() == 0 && queue.destinations.is_empty());
    }
}
