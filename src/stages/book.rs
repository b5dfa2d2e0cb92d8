//! What this process has read of the log: which request has which stage, as far back as repeats are known.

use std::collections::{HashMap, VecDeque};

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::allocations::{Given, Run};

pub struct Book {
    window: TimeDelta,
    /// The last entry that was read.
    pub last: u64,
    /// The number that comes next.
    pub next: i64,
    stages: HashMap<Uuid, i32>,
    runs: VecDeque<(DateTime<Utc>, Run)>,
}

impl Book {
    /// An empty one, in which the first number is the given one.
    pub fn new(window: TimeDelta, first: i64) -> Self {
        Self { window, last: 0, next: first, stages: HashMap::new(), runs: VecDeque::new() }
    }

    /// The oldest moment that counts.
    pub fn horizon(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        now.checked_sub_signed(self.window).unwrap_or(DateTime::UNIX_EPOCH)
    }

    /// The stage that a request has.
    pub fn stage_of(&self, request: &Uuid) -> Option<i32> {
        self.stages.get(request).copied()
    }

    /// Adds the entry that comes next.
    pub fn add(&mut self, sequence: u64, at: DateTime<Utc>, run: Run) {
        self.last = sequence;
        // The first number may have been set higher since.
        self.next = self.next.max(run.end());
        self.stages.extend(run.each());
        self.runs.push_back((at, run));
    }

    /// Forgets what is older than repeats are known.
    pub fn forget(&mut self, now: DateTime<Utc>) {
        let horizon = self.horizon(now);
        while let Some((_, run)) = self.runs.pop_front_if(|(at, _)| *at < horizon) {
            for (request, stage) in run.each() {
                // It may have asked again since, and have another one.
                if self.stages.get(&request) == Some(&stage) {
                    self.stages.remove(&request);
                }
            }
        }
    }
}

impl Extend<Given> for Book {
    fn extend<T: IntoIterator<Item = Given>>(&mut self, all: T) {
        all.into_iter().for_each(|Given { sequence, at, run, .. }| self.add(sequence, at, run));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_the_window_is_forgotten_and_nothing_else() {
        let mut book = Book::new(TimeDelta::hours(24), 101);
        let now = Utc::now();
        let (first, second) = (Uuid::new_v4(), Uuid::new_v4());
        let run = |first, requests: &[Uuid]| Run { first, requests: requests.to_vec(), skipped: 0 };
        book.add(1, now, run(101, &[first, second]));
        book.forget(now + TimeDelta::hours(24));
        assert_eq!((book.stage_of(&first), book.stage_of(&second)), (Some(101), Some(102)));
        // Another process forgot the first one sooner, and gave it another.
        book.add(2, now + TimeDelta::hours(24), run(103, &[first]));
        book.forget(now + TimeDelta::hours(25));
        assert_eq!((book.stage_of(&first), book.stage_of(&second)), (Some(103), None));
        assert_eq!((book.last, book.next, book.runs.len()), (2, 104, 1));
    }

    #[test]
    fn numbers_that_are_passed_over_are_given_to_nobody() {
        let mut book = Book::new(TimeDelta::hours(24), 1);
        book.add(1, Utc::now(), Run { first: 1, requests: Vec::new(), skipped: 50 });
        assert_eq!(book.next, 51);
        let mut raised = Book::new(TimeDelta::hours(24), 20_001);
        raised.add(1, Utc::now(), Run { first: 1, requests: vec![Uuid::new_v4()], skipped: 0 });
        assert_eq!(raised.next, 20_001, "nothing is given below what is configured");
    }
}
