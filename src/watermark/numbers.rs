//! Numbers, and how they are taken: marks, bounds, steps and the ranges between them. Arithmetic only.

use serde::{Deserialize, Serialize};

use super::State;
use crate::error::{Code, Error, Result};

/// A mark: every number up to it is spent or reserved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub mark: i64,
    /// Where counting began or was moved to. Numbers that the mark passed by jumping there were given to nobody.
    #[serde(default)]
    pub base: i64,
}

impl State for Mark {}

impl Mark {
    pub fn at(base: i64) -> Self {
        Self { mark: base, base }
    }

    /// Passes over numbers that may have been given without our knowing.
    pub fn jump(&mut self, margin: i64) {
        self.mark = self.mark.saturating_add(margin);
        self.base = self.mark;
    }

    /// Takes numbers one by one behind the mark: all of them, or an error and none.
    pub fn advance(&mut self, steps: Steps, bounds: Bounds) -> Result<Vec<i64>> {
        let mut range = Range { used: self.mark.max(bounds.base), end: bounds.max };
        let mut numbers = Vec::with_capacity(steps.count as usize);
        steps.draw(&mut range, &mut numbers);
        if numbers.len() < steps.count as usize {
            return Err(exhausted());
        }
        self.mark = range.used;
        Ok(numbers)
    }
}

/// What a counter without a mark means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// It was made with its key, and must be there.
    IsLost,
    /// It begins with its first use.
    Begins,
}

impl Absent {
    /// The mark that is there, or the one that it begins with.
    pub fn or_begin(self, state: &Option<Mark>, base: i64) -> Result<Mark> {
        match (state, self) {
            (Some(mark), _) => Ok(mark.clone()),
            (None, Absent::Begins) => Ok(Mark::at(base)),
            (None, Absent::IsLost) => Err(lost()),
        }
    }
}

/// How a caller's numbers follow each other.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub count: u32,
    /// From one number to the next.
    pub step: i64,
    /// Each step is a random one from 1 to `step`.
    pub random: bool,
}

impl Steps {
    /// The next numbers, each one above the last.
    pub fn single(count: u32) -> Self {
        Self { count, step: 1, random: false }
    }

    /// How much they take at most.
    pub(super) fn span(self) -> i64 {
        i64::from(self.count).saturating_mul(self.step)
    }

    /// Takes from the range until there are enough numbers, or none fits any more.
    pub(super) fn draw(self, range: &mut Range, numbers: &mut Vec<i64>) {
        while numbers.len() < self.count as usize && range.left() > 0 {
            let step = match self.random {
                true => rand::random_range(1..=self.step.min(range.left())),
                false if self.step > range.left() => return,
                false => self.step,
            };
            range.used += step;
            numbers.push(range.used);
        }
    }
}

/// Which numbers may be given now.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Only numbers above this.
    pub base: i64,
    /// The last one there is.
    pub max: i64,
}

impl Bounds {
    pub fn above(base: i64) -> Self {
        Self { base, max: i64::MAX }
    }
}

/// The numbers above `used`, up to and including `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub used: i64,
    pub end: i64,
}

impl Range {
    /// How many; none if it lies wholly beyond a maximum.
    pub fn left(self) -> i64 {
        self.end.saturating_sub(self.used).max(0)
    }

    /// The part of it that is not beyond a maximum.
    pub fn up_to(self, max: i64) -> Self {
        Self { end: self.end.min(max), ..self }
    }

    pub fn skip_to(&mut self, floor: i64) {
        self.used = self.used.max(floor.min(self.end));
    }
}

/// The key is configured, but its mark is gone: going on from anywhere could give numbers again.
pub fn lost() -> Error {
    let message = "the counter of this key is lost; restore it, or start once with --fresh if repeating ids is meant";
    Error::new(Code::Internal, message)
}

pub(super) fn exhausted() -> Error {
    Error::new(Code::Exhausted, "sequence exhausted: fewer numbers are left than asked for")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_end_is_an_error_that_spends_nothing() {
        let mut mark = Mark::at(i64::MAX - 2);
        let bounds = Bounds::above(0);
        assert_eq!(mark.advance(Steps::single(3), bounds).unwrap_err().code, Code::Exhausted);
        assert_eq!(mark.advance(Steps::single(2), bounds).unwrap(), [i64::MAX - 1, i64::MAX]);
        assert_eq!(mark.advance(Steps::single(1), bounds).unwrap_err().code, Code::Exhausted);
        let mut mark = Mark::at(5);
        assert!(mark.advance(Steps::single(1), Bounds { base: 0, max: 3 }).is_err(), "a maximum below the mark");
        assert_eq!(mark.mark, 5);
    }

    proptest! {
        #[test]
        fn random_steps_stay_in_bounds_and_grow(step in 1_i64..1000, count in 1_u32..200, base in 0_i64..1_000_000) {
            let mut mark = Mark::at(base);
            let numbers = mark.advance(Steps { count, step, random: true }, Bounds::above(base)).unwrap();
            let mut last = base;
            for number in numbers {
                prop_assert!((1..=step).contains(&(number - last)));
                last = number;
            }
            prop_assert_eq!(mark.mark, last);
        }
    }
}
