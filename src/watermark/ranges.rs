//! Ranges: numbers reserved ahead and served from memory.
//!
//! A reservation moves the mark by many numbers with one synced write; then every caller is served from memory until the
//! next one. It is fetched in the background before the numbers run out, so callers rarely wait, and those who do wait
//! for the one reservation under way: a burst is never an error. Waiting callers are served in their order.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{sync::oneshot, time::Instant};

use super::{Cells, Committed};
use crate::error::{Code, Error, Result};

/// A mark: every number up to it is spent or reserved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub mark: i64,
}

#[derive(Debug, Clone)]
pub struct RangeSettings {
    /// The smallest and first reservation.
    pub default_size: u64,
    pub max_size: u64,
    /// The share of a reservation at which the next one is fetched.
    pub prefetch_threshold: f64,
}

/// A reservation that lasted less than this was too small,
const BUSY: Duration = Duration::from_secs(1);
/// and one that lasted longer than this too large.
const QUIET: Duration = Duration::from_secs(10);

/// How a caller's numbers follow each other: each is one step above the last.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub count: u32,
    pub step: u32,
}

impl Steps {
    fn span(self) -> u64 {
        u64::from(self.count) * u64::from(self.step)
    }
}

/// One key's numbers in this process. Shared by its callers.
pub struct Ranges {
    cells: Cells<Mark>,
    key: String,
    settings: RangeSettings,
    state: Mutex<State>,
}

struct State {
    /// Reserved and unused, in growing order; neighbours are joined.
    at_hand: VecDeque<Range>,
    waiting: VecDeque<Waiter>,
    refilling: bool,
    stopped: bool,
    size: u64,
    last_refill: Option<Instant>,
    /// Nothing up to this is given any more, also of reservations that are still under way.
    floor: i64,
    /// The mark that our newest reservation set, and its revision: what may be given back.
    newest: Option<(i64, u64)>,
}

/// The numbers above `used`, up to and including `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    used: i64,
    end: i64,
}

impl Range {
    fn left(self) -> u64 {
        self.end.abs_diff(self.used)
    }

    fn skip_to(&mut self, floor: i64) {
        self.used = self.used.max(floor.min(self.end));
    }
}

struct Waiter {
    steps: Steps,
    reply: oneshot::Sender<Result<Vec<i64>>>,
}

impl Ranges {
    /// `key` must hold a [`Mark`] already.
    pub fn new(cells: Cells<Mark>, key: String, settings: RangeSettings) -> Arc<Self> {
        let state = State {
            at_hand: VecDeque::new(),
            waiting: VecDeque::new(),
            refilling: false,
            stopped: false,
            size: settings.default_size,
            last_refill: None,
            floor: i64::MIN,
            newest: None,
        };
        Arc::new(Self { cells, key, settings, state: Mutex::new(state) })
    }

    /// The next numbers. All of them, or an error and none.
    pub async fn take(self: &Arc<Self>, steps: Steps) -> Result<Vec<i64>> {
        let answer = {
            let mut state = self.lock();
            if state.stopped {
                return Err(stopping());
            }
            let drawn = if state.waiting.is_empty() { state.draw(steps) } else { None };
            if state.left() < self.threshold(state.size) || drawn.is_none() {
                self.refill_in_background(&mut state);
            }
            match drawn {
                Some(numbers) => return Ok(numbers),
                None => {
                    let (reply, answer) = oneshot::channel();
                    state.waiting.push_back(Waiter { steps, reply });
                    answer
                }
            }
        };
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }

    /// Forgets reserved numbers up to the mark, which has jumped.
    pub fn skip_to(&self, mark: i64) {
        let mut state = self.lock();
        state.floor = state.floor.max(mark);
        let floor = state.floor;
        state.at_hand.iter_mut().for_each(|range| range.skip_to(floor));
        state.at_hand.retain(|range| range.left() > 0);
    }

    /// Numbers that can be served without a reservation.
    pub fn at_hand(&self) -> u64 {
        self.lock().left()
    }

    /// Ends the service. If nobody has reserved since we last did, the unused tail is given back: by one write on the
    /// revision of our own reservation, never repeated, because a second one could take back what others hold by then.
    pub async fn stop(&self) {
        let tail = {
            let mut state = self.lock();
            state.stopped = true;
            let last = state.at_hand.back().copied();
            state.at_hand.clear();
            state.waiting.clear();
            match (last, state.newest) {
                (Some(range), Some((mark, revision))) if range.end == mark => Some((range, revision)),
                _ => None,
            }
        };
        if let Some((range, revision)) = tail {
            let (from, to) = (Mark { mark: range.end }, Mark { mark: range.used });
            if let Err(error) = self.cells.try_replace(&self.key, revision, &from, &to).await {
                tracing::debug!(key = self.key, numbers = range.left(), %error, "an unused tail was not given back");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while ranges are held")
    }

    fn threshold(&self, size: u64) -> u64 {
        (size as f64 * self.settings.prefetch_threshold) as u64
    }

    fn refill_in_background(self: &Arc<Self>, state: &mut State) {
        if !std::mem::replace(&mut state.refilling, true) {
            let this = self.clone();
            tokio::spawn(async move { this.refill().await });
        }
    }

    /// Reserves until nobody waits.
    async fn refill(&self) {
        loop {
            let wanted = {
                let mut state = self.lock();
                state.adapt(&self.settings);
                let waiting: u64 = state.waiting.iter().map(|waiter| waiter.steps.span()).sum();
                waiting.saturating_add(state.size)
            };
            let reserved = self.reserve(wanted).await;
            let mut state = self.lock();
            let full = match reserved {
                Ok(Committed { answer: (range, full), revision }) => {
                    state.newest = Some((range.end, revision));
                    state.add(range);
                    full
                }
                Err(error) => {
                    state.refilling = false;
                    state.waiting.drain(..).for_each(|waiter| drop(waiter.reply.send(Err(error.share()))));
                    return;
                }
            };
            // Whoever has left wants no numbers any more.
            state.waiting.retain(|waiter| !waiter.reply.is_closed());
            while let Some(waiter) = state.waiting.pop_front() {
                match state.draw(waiter.steps) {
                    Some(numbers) => drop(waiter.reply.send(Ok(numbers))),
                    // No more can be reserved: this one asks for more than is left, but a smaller one may fit.
                    None if full => drop(waiter.reply.send(Err(exhausted()))),
                    None => {
                        state.waiting.push_front(waiter);
                        break;
                    }
                }
            }
            if state.waiting.is_empty() {
                state.refilling = false;
                return;
            }
        }
    }

    /// Moves the mark by as much as wanted, or to the last number there is. Tells whether it is the last.
    async fn reserve(&self, wanted: u64) -> Result<Committed<(Range, bool)>> {
        let began = Instant::now();
        let wanted = i64::try_from(wanted).unwrap_or(i64::MAX);
        let change = move |state: &mut Option<Mark>| {
            let mark = state.as_mut().ok_or_else(lost)?;
            let range = Range { used: mark.mark, end: mark.mark.saturating_add(wanted) };
            mark.mark = range.end;
            Ok((range, range.end == i64::MAX))
        };
        let reserved = self.cells.change(&self.key, change).await;
        metrics::histogram!("tidemark_range_refill_seconds").record(began.elapsed().as_secs_f64());
        reserved
    }
}

impl State {
    fn left(&self) -> u64 {
        self.at_hand.iter().map(|range| range.left()).sum()
    }

    fn add(&mut self, mut range: Range) {
        range.skip_to(self.floor);
        match self.at_hand.back_mut() {
            Some(last) if last.end == range.used => last.end = range.end,
            _ if range.left() > 0 => self.at_hand.push_back(range),
            _ => {}
        }
    }

    /// Takes all the numbers, or none.
    fn draw(&mut self, steps: Steps) -> Option<Vec<i64>> {
        let step = i64::from(steps.step);
        let mut numbers = Vec::with_capacity(steps.count as usize);
        let mut missing = i64::from(steps.count);
        let mut drained = 0;
        let mut cut = None;
        for range in &self.at_hand {
            // Where ranges are not neighbours, a rest smaller than the step is skipped.
            let fitting = ((range.left() / steps.step as u64) as i64).min(missing);
            numbers.extend((1..=fitting).map(|nth| range.used + nth * step));
            missing -= fitting;
            let used = range.used + fitting * step;
            if missing == 0 && used < range.end {
                cut = Some(used);
                break;
            }
            drained += 1;
            if missing == 0 {
                break;
            }
        }
        if missing > 0 {
            return None;
        }
        self.at_hand.drain(..drained);
        if let (Some(used), Some(first)) = (cut, self.at_hand.front_mut()) {
            first.used = used;
        }
        Some(numbers)
    }

    /// Larger reservations while they are used up quickly, smaller ones when it is quiet.
    fn adapt(&mut self, settings: &RangeSettings) {
        let now = Instant::now();
        if let Some(last) = self.last_refill.replace(now) {
            let lasted = now - last;
            if lasted < BUSY {
                self.size = self.size.saturating_mul(2).min(settings.max_size);
            } else if lasted > QUIET {
                self.size = (self.size / 2).max(settings.default_size);
            }
        }
    }
}

/// The key is configured, but its mark is gone: going on from anywhere could give numbers again.
pub fn lost() -> Error {
    let message = "the counter of this key is lost; restore it, or start once with --fresh if repeating ids is meant";
    Error::new(Code::Internal, message)
}

fn exhausted() -> Error {
    Error::new(Code::Exhausted, "sequence exhausted: fewer numbers are left than asked for")
}

fn stopping() -> Error {
    Error::unavailable("the process is stopping")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state(ranges: &[(i64, i64)]) -> State {
        let mut state = State {
            at_hand: VecDeque::new(),
            waiting: VecDeque::new(),
            refilling: false,
            stopped: false,
            size: 10,
            last_refill: None,
            floor: i64::MIN,
            newest: None,
        };
        ranges.iter().for_each(|&(used, end)| state.add(Range { used, end }));
        state
    }

    #[test]
    fn the_rest_of_the_old_range_is_used_before_the_new_one() {
        let mut state = state(&[(0, 3), (10, 20)]);
        assert_eq!(state.draw(Steps { count: 5, step: 1 }).unwrap(), [1, 2, 3, 11, 12]);
        assert_eq!(state.left(), 8);
        assert_eq!(state.draw(Steps { count: 9, step: 1 }), None);
        assert_eq!(state.left(), 8, "what was refused is not spent");
    }

    #[test]
    fn neighbours_are_joined_so_that_steps_cross_them() {
        let mut state = state(&[(0, 3), (3, 9)]);
        assert_eq!(state.draw(Steps { count: 2, step: 4 }).unwrap(), [4, 8]);
    }

    #[test]
    fn nothing_is_given_below_a_jump_even_if_it_was_reserved_before() {
        let mut state = state(&[(0, 3), (10, 20)]);
        state.floor = 15;
        state.at_hand.iter_mut().for_each(|range| range.skip_to(15));
        state.at_hand.retain(|range| range.left() > 0);
        state.add(Range { used: 12, end: 14 });
        state.add(Range { used: 30, end: 40 });
        assert_eq!(state.draw(Steps { count: 6, step: 1 }).unwrap(), [16, 17, 18, 19, 20, 31]);
    }

    #[test]
    fn the_last_numbers_there_are() {
        let mut state = state(&[(i64::MAX - 2, i64::MAX)]);
        assert_eq!(state.draw(Steps { count: 2, step: 1 }).unwrap(), [i64::MAX - 1, i64::MAX]);
        assert_eq!(state.draw(Steps { count: 1, step: 1 }), None);
    }

    #[tokio::test(start_paused = true)]
    async fn reservations_grow_while_it_is_busy_and_shrink_when_it_is_quiet() {
        let settings = RangeSettings { default_size: 10, max_size: 35, prefetch_threshold: 0.2 };
        let mut state = state(&[]);
        let mut sizes = Vec::new();
        for pause in [0, 100, 100, 100, 5_000, 20_000, 20_000, 20_000] {
            tokio::time::advance(Duration::from_millis(pause)).await;
            state.adapt(&settings);
            sizes.push(state.size);
        }
        assert_eq!(sizes, [10, 20, 35, 35, 35, 17, 10, 10]);
    }

    proptest! {
        /// Whatever is drawn in whatever sizes: numbers only grow, lie inside what was reserved, and none comes twice.
        #[test]
        fn drawn_numbers_grow_and_never_repeat(
            gaps in prop::collection::vec((0_i64..5, 1_i64..50), 1..20),
            draws in prop::collection::vec((1_u32..20, 1_u32..7), 1..60),
        ) {
            let mut state = state(&[]);
            let mut reserved = std::collections::BTreeSet::new();
            let mut end = 0;
            let mut gaps = gaps.into_iter();
            let mut last = 0;
            for (count, step) in draws {
                if let Some((gap, size)) = gaps.next() {
                    let used = end + gap;
                    end = used + size;
                    state.add(Range { used, end });
                    reserved.extend(used + 1..=end);
                }
                let before = state.left();
                match state.draw(Steps { count, step }) {
                    Some(numbers) => {
                        prop_assert_eq!(numbers.len(), count as usize);
                        for number in numbers {
                            prop_assert!(number > last && reserved.contains(&number));
                            last = number;
                        }
                    }
                    None => prop_assert_eq!(state.left(), before),
                }
            }
        }
    }
}
