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

use tokio::{sync::oneshot, time::Instant};

use super::{
    Absent, Bounds, Cells, Committed, Mark, RequestId, Requester, Steps,
    numbers::{Range, exhausted},
};
use crate::error::{Error, Result};

#[derive(Debug, Clone)]
pub struct RangeSettings {
    /// The smallest and first reservation.
    pub default_size: i64,
    pub max_size: i64,
    /// The share of a reservation at which the next one is fetched.
    pub prefetch_threshold: f64,
}

/// A reservation that lasted less than this was too small,
const BUSY: Duration = Duration::from_secs(1);
/// and one that lasted longer than this too large.
const QUIET: Duration = Duration::from_secs(10);

/// One key's numbers in this process. Shared by its callers.
pub struct Ranges {
    cells: Cells<Mark>,
    key: String,
    absent: Absent,
    settings: RangeSettings,
    state: Mutex<State>,
}

struct State {
    /// Reserved and unused, in growing order; neighbours are joined.
    at_hand: VecDeque<Range>,
    waiting: VecDeque<Waiter>,
    refilling: bool,
    stopped: bool,
    /// The reservation to make next, as far as there is that much.
    size: i64,
    /// The last one made.
    reserved: i64,
    last_refill: Option<Instant>,
    /// As the newest caller knows them. Nothing up to the base is given any more, also of reservations under way.
    bounds: Bounds,
    /// The mark that our newest reservation set, and its revision: what may be given back.
    newest: Option<(Mark, u64)>,
}

struct Waiter {
    steps: Steps,
    request: RequestId,
    /// Its place in the reservation under way, if that was made for it too.
    considered: Option<usize>,
    reply: oneshot::Sender<Result<Vec<i64>>>,
}

impl Ranges {
    pub fn new(cells: Cells<Mark>, key: String, absent: Absent, settings: RangeSettings) -> Arc<Self> {
        let state = State {
            at_hand: VecDeque::new(),
            waiting: VecDeque::new(),
            refilling: false,
            stopped: false,
            size: settings.default_size,
            reserved: settings.default_size,
            last_refill: None,
            bounds: Bounds::above(i64::MIN),
            newest: None,
        };
        Arc::new(Self { cells, key, absent, settings, state: Mutex::new(state) })
    }

    /// The next numbers within the bounds. All of them, or an error and none.
    pub async fn take(self: &Arc<Self>, steps: Steps, bounds: Bounds, request: Requester<'_>) -> Result<Vec<i64>> {
        let answer = {
            let mut state = self.lock();
            if state.stopped {
                return Err(stopping());
            }
            state.obey(bounds);
            let drawn = if state.waiting.is_empty() { state.draw(steps) } else { None };
            if state.left() < self.threshold(state.reserved) || drawn.is_none() {
                self.refill_in_background(&mut state, request);
            }
            match drawn {
                Some(numbers) => return Ok(numbers),
                None => {
                    let (reply, answer) = oneshot::channel();
                    state.waiting.push_back(Waiter { steps, request: request(), considered: None, reply });
                    answer
                }
            }
        };
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }

    /// Numbers that can be served without a reservation.
    pub fn at_hand(&self) -> i64 {
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
            match (last, state.newest.take()) {
                (Some(range), Some((mark, revision))) if range.end == mark.mark => Some((range, mark, revision)),
                _ => None,
            }
        };
        if let Some((range, from, revision)) = tail {
            let to = Mark { mark: range.used, ..from };
            if let Err(error) = self.cells.try_replace(&self.key, revision, &from, &to).await {
                tracing::debug!(key = self.key, numbers = range.left(), %error, "an unused tail was not given back");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while ranges are held")
    }

    fn threshold(&self, size: i64) -> i64 {
        (size as f64 * self.settings.prefetch_threshold) as i64
    }

    fn refill_in_background(self: &Arc<Self>, state: &mut State, request: Requester<'_>) {
        if !std::mem::replace(&mut state.refilling, true) {
            let (this, request) = (self.clone(), request());
            tokio::spawn(async move { this.refill(request).await });
        }
    }

    /// Reserves until nobody waits. The first reservation is made for the request; later ones for whoever waits first.
    async fn refill(&self, mut request: RequestId) {
        let mut fragmented = false;
        loop {
            let reservation = {
                let mut state = self.lock();
                state.adapt(&self.settings);
                state.waiting.iter_mut().enumerate().for_each(|(index, waiter)| waiter.considered = Some(index));
                Reservation {
                    waiting: state.waiting.iter().map(|waiter| waiter.steps.span()).collect(),
                    at_hand: if fragmented { 0 } else { state.left() },
                    ahead: state.size,
                    bounds: state.bounds,
                    // What was there once is lost if it is missing.
                    absent: if state.newest.is_some() { Absent::IsLost } else { self.absent },
                }
            };
            let reserved = self.reserve(reservation, request.take()).await;
            let mut state = self.lock();
            let fits = match reserved {
                Ok(Committed { answer: Reserved { range, mark, fits }, revision }) => {
                    state.reserved = range.left();
                    state.newest = Some((mark, revision));
                    state.add(range);
                    fits
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
                    // This one asks for more than is left, but a smaller one behind it may fit.
                    None if waiter.considered.is_some_and(|index| !fits[index]) => {
                        drop(waiter.reply.send(Err(exhausted())));
                    }
                    None => {
                        // It came meanwhile, or what is at hand lies in pieces too small for its steps.
                        fragmented = waiter.considered.is_some();
                        request = waiter.request.clone();
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

    async fn reserve(&self, wanted: Reservation, request: RequestId) -> Result<Committed<Reserved>> {
        let began = Instant::now();
        let reserved = self.cells.change(&self.key, request, move |state| wanted.apply(state)).await;
        metrics::histogram!("tidemark_range_refill_seconds").record(began.elapsed().as_secs_f64());
        reserved
    }
}

/// What a refill wants.
#[derive(Debug, Clone)]
struct Reservation {
    /// For callers that wait, one by one,
    waiting: Vec<i64>,
    /// who have this much already,
    at_hand: i64,
    /// and for those that will come.
    ahead: i64,
    bounds: Bounds,
    absent: Absent,
}

/// What it got.
#[derive(Debug)]
struct Reserved {
    range: Range,
    mark: Mark,
    /// Who of those who waited can be served. Who can't asks for more than is left.
    fits: Vec<bool>,
}

impl Reservation {
    /// Moves the mark by as much as wanted. Towards the end, one instance should not sit on numbers that the others could
    /// give: less is reserved ahead, and nothing for a caller who can't be served.
    fn apply(&self, state: &mut Option<Mark>) -> Result<Reserved> {
        let mut mark = self.absent.or_begin(state, self.bounds.base)?;
        let used = mark.mark.max(self.bounds.base);
        let left = Range { used, end: self.bounds.max }.left();
        let supply = self.at_hand.saturating_add(left);
        let mut fitting = 0_i64;
        let fit = |span: &i64| {
            let sum = fitting.saturating_add(*span);
            let fits = sum <= supply;
            if fits {
                fitting = sum;
            }
            fits
        };
        let fits = self.waiting.iter().map(fit).collect();
        let ahead = self.ahead.min(left / 16);
        let wanted = (fitting - self.at_hand).max(0).saturating_add(ahead).min(left);
        let range = Range { used, end: used + wanted };
        if wanted > 0 {
            mark.mark = range.end;
        }
        *state = Some(mark.clone());
        Ok(Reserved { range, mark, fits })
    }
}

impl State {
    /// What can be given now.
    fn left(&self) -> i64 {
        self.at_hand.iter().fold(0, |sum, range| sum.saturating_add(range.up_to(self.bounds.max).left()))
    }

    /// Numbers at hand below a new base are forgotten; those above a new maximum are kept for when it is raised.
    fn obey(&mut self, bounds: Bounds) {
        let base = self.bounds.base.max(bounds.base);
        if self.bounds.base < base {
            self.at_hand.iter_mut().for_each(|range| range.skip_to(base));
            self.at_hand.retain(|range| range.left() > 0);
        }
        self.bounds = Bounds { base, max: bounds.max };
    }

    fn add(&mut self, mut range: Range) {
        range.skip_to(self.bounds.base);
        match self.at_hand.back_mut() {
            Some(last) if last.end == range.used => last.end = range.end,
            _ if range.left() > 0 => self.at_hand.push_back(range),
            _ => {}
        }
    }

    /// Takes all the numbers, or none. Where ranges are not neighbours, a rest smaller than the step is skipped.
    fn draw(&mut self, steps: Steps) -> Option<Vec<i64>> {
        let mut numbers = Vec::with_capacity(steps.count as usize);
        for (index, range) in self.at_hand.iter().enumerate() {
            let mut within = range.up_to(self.bounds.max);
            steps.draw(&mut within, &mut numbers);
            if numbers.len() == steps.count as usize {
                self.at_hand.drain(..index);
                let first = self.at_hand.front_mut().expect("the range that we drew from");
                first.used = within.used;
                if first.left() == 0 {
                    self.at_hand.pop_front();
                }
                return Some(numbers);
            }
        }
        None
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
            reserved: 10,
            last_refill: None,
            bounds: Bounds::above(i64::MIN),
            newest: None,
        };
        ranges.iter().for_each(|&(used, end)| state.add(Range { used, end }));
        state
    }

    fn steps(count: u32, step: i64) -> Steps {
        Steps { count, step, random: false }
    }

    #[test]
    fn the_rest_of_the_old_range_is_used_before_the_new_one() {
        let mut state = state(&[(0, 3), (10, 20)]);
        assert_eq!(state.draw(steps(5, 1)).unwrap(), [1, 2, 3, 11, 12]);
        assert_eq!(state.left(), 8);
        assert_eq!(state.draw(steps(9, 1)), None);
        assert_eq!(state.left(), 8, "what was refused is not spent");
    }

    #[test]
    fn neighbours_are_joined_so_that_steps_cross_them() {
        let mut state = state(&[(0, 3), (3, 9)]);
        assert_eq!(state.draw(steps(2, 4)).unwrap(), [4, 8]);
    }

    #[test]
    fn nothing_is_given_below_a_jump_even_if_it_was_reserved_before() {
        let mut state = state(&[(0, 3), (10, 20)]);
        state.obey(Bounds::above(15));
        state.add(Range { used: 12, end: 14 });
        state.add(Range { used: 30, end: 40 });
        assert_eq!(state.draw(steps(6, 1)).unwrap(), [16, 17, 18, 19, 20, 31]);
    }

    #[test]
    fn the_last_numbers_there_are() {
        let mut state = state(&[(i64::MAX - 2, i64::MAX)]);
        assert_eq!(state.draw(steps(2, 1)).unwrap(), [i64::MAX - 1, i64::MAX]);
        assert_eq!(state.draw(steps(1, 1)), None);
    }

    #[test]
    fn a_lower_maximum_holds_back_and_a_higher_one_lets_go() {
        let mut state = state(&[(0, 10)]);
        state.obey(Bounds { base: 0, max: 4 });
        assert_eq!(state.draw(steps(5, 1)), None);
        assert_eq!(state.draw(steps(4, 1)).unwrap(), [1, 2, 3, 4]);
        assert_eq!(state.draw(steps(1, 1)), None);
        state.obey(Bounds { base: 0, max: 6 });
        assert_eq!(state.draw(steps(2, 1)).unwrap(), [5, 6]);
    }

    #[test]
    fn little_is_reserved_ahead_where_little_is_left() {
        let reserve = |mark, at_hand, waiting: &[i64]| {
            let (bounds, absent) = (Bounds { base: 0, max: 100 }, Absent::IsLost);
            let wanted = Reservation { waiting: waiting.into(), at_hand, ahead: 1000, bounds, absent };
            let Reserved { range, fits, .. } = wanted.apply(&mut Some(Mark::at(mark))).unwrap();
            (range.used, range.end, fits)
        };
        assert_eq!(reserve(0, 0, &[1]), (0, 7, vec![true]));
        assert_eq!(reserve(90, 0, &[1]), (90, 91, vec![true]));
        assert_eq!(reserve(95, 3, &[8]), (95, 100, vec![true]));
        assert_eq!(
            reserve(95, 3, &[9]),
            (95, 95, vec![false]),
            "nothing is taken from others for one who can't be served"
        );
        assert_eq!(
            reserve(95, 3, &[9, 4, 5]),
            (95, 96, vec![false, true, false]),
            "but for the smaller one behind him"
        );
        assert_eq!(reserve(100, 0, &[1]), (100, 100, vec![false]));
        assert_eq!(reserve(200, 0, &[1]), (200, 200, vec![false]), "a maximum below the mark");
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
            draws in prop::collection::vec((1_u32..20, 1_i64..7, any::<bool>()), 1..60),
        ) {
            let mut state = state(&[]);
            let mut reserved = std::collections::BTreeSet::new();
            let mut end = 0;
            let mut gaps = gaps.into_iter();
            let mut last = 0;
            for (count, step, random) in draws {
                if let Some((gap, size)) = gaps.next() {
                    let used = end + gap;
                    end = used + size;
                    state.add(Range { used, end });
                    reserved.extend(used + 1..=end);
                }
                let before = state.left();
                match state.draw(Steps { count, step, random }) {
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
