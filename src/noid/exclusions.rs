//! Numbers that a pool must never mint, wherever they stand in its order.
//!
//! There may be a million, and a pool's value is written with every mint, so the value has only the last few. The others
//! stand beside it in parts, each written once, together with the value that first needs it.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    watermark::Parts,
};

/// What a pool may have ahead of it, so that a process can hold them.
const MOST: usize = 1_000_000;

/// What the value itself holds.
const MOST_RECENT: usize = 100;

/// Numbers of one part: 20 bytes each, and a message has a megabyte.
const PART: usize = 20_000;

/// Beyond this, the parts are gathered into new ones, so that a process that knows nothing reads them in a moment.
const MOST_PARTS: u64 = 2_000;

/// Parts read at the same time.
const AT_ONCE: usize = 16;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Exclusions {
    /// How many excluded numbers are still to come.
    ahead: u64,
    /// Parts from `first` on and before `end` are needed.
    first: u64,
    end: u64,
    /// Numbers that are in no part yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    recent: Vec<u64>,
    /// All numbers still to come, in their order, and perhaps some that were passed.
    #[serde(skip)]
    numbers: Arc<Vec<u64>>,
}

impl Exclusions {
    pub fn ahead(&self) -> u64 {
        self.ahead
    }

    /// The excluded numbers from a position on, in their order.
    pub fn at_or_after(&self, position: u64) -> &[u64] {
        let start = self.numbers.partition_point(|number| *number < position);
        &self.numbers[start..]
    }

    /// Numbers from a position up to `end` that are not excluded.
    pub fn passing_over(&self, position: u64, end: u64) -> impl Iterator<Item = u64> {
        let mut excluded = self.at_or_after(position);
        let mut next = position;
        std::iter::from_fn(move || {
            if excluded.first() == Some(&next) {
                let run = run(excluded);
                excluded = &excluded[run..];
                next += run as u64;
            }
            let number = next;
            next += 1;
            (number < end).then_some(number)
        })
    }

    /// The pool has come to this position.
    pub fn pass(&mut self, position: u64) {
        if self.ahead == 0 {
            return;
        }
        let ahead = self.at_or_after(position).len();
        // Now and then, what was passed is forgotten.
        if self.numbers.len() > 2 * ahead {
            self.numbers = Arc::new(self.at_or_after(position).to_vec());
        }
        self.ahead = ahead as u64;
        self.recent.retain(|number| *number >= position);
        if self.ahead == 0 {
            self.first = self.end;
        }
    }

    /// Adds numbers that are still to come.
    pub fn add(&mut self, numbers: impl Iterator<Item = u64>) -> Result<()> {
        let mut new: Vec<u64> = numbers.filter(|number| self.numbers.binary_search(number).is_err()).collect();
        sort(&mut new);
        if new.is_empty() {
            return Ok(());
        }
        let ahead = self.ahead as usize + new.len();
        if ahead > MOST {
            let problem =
                format!("{ahead} ids of this pool would be excluded, and {MOST} is the most; advance past some");
            return Err(Error::field("ids", problem));
        }
        self.ahead = ahead as u64;
        let numbers = Arc::make_mut(&mut self.numbers);
        numbers.extend(&new);
        sort(numbers);
        self.recent.append(&mut new);
        Ok(())
    }

    /// Reads what an older state that we had does not have.
    pub async fn complete(&mut self, older: Option<&Self>, position: u64, parts: Parts<'_>) -> Result<()> {
        if self.ahead == 0 {
            return Ok(());
        }
        let first = older.map_or(self.first, |older| self.first.max(older.end));
        let read = async |part: u64| -> Result<Vec<u64>> {
            let value = parts.read(&name(part)).await?;
            serde_json::from_slice(&value).map_err(|error| Error::internal(format!("a part is broken: {error}")))
        };
        let unknown: Vec<Vec<u64>> = stream::iter(first..self.end).map(read).buffered(AT_ONCE).try_collect().await?;
        let mut numbers = older.map(|older| older.at_or_after(position).to_vec()).unwrap_or_default();
        numbers.extend(unknown.into_iter().flatten().chain(self.recent.iter().copied()));
        numbers.retain(|number| *number >= position);
        sort(&mut numbers);
        if numbers.len() as u64 != self.ahead {
            return Err(Error::internal(format!("{} excluded numbers were found, not {}", numbers.len(), self.ahead)));
        }
        self.numbers = Arc::new(numbers);
        Ok(())
    }

    /// Moves numbers out of the value when they become too many for it, and gathers parts when these do.
    pub fn take_new_parts(&mut self) -> Vec<(String, Bytes)> {
        if self.recent.len() <= MOST_RECENT {
            return Vec::new();
        }
        let recent = std::mem::take(&mut self.recent);
        let gathers = self.end - self.first >= MOST_PARTS;
        let numbers = if gathers { self.numbers.as_slice() } else { recent.as_slice() };
        let written = |(index, numbers): (u64, &[u64])| {
            (name(index), Bytes::from(serde_json::to_vec(numbers).expect("numbers are JSON")))
        };
        let parts: Vec<_> = (self.end..).zip(numbers.chunks(PART)).map(written).collect();
        if gathers {
            self.first = self.end;
        }
        self.end += parts.len() as u64;
        parts
    }
}

fn name(part: u64) -> String {
    format!("excluded.{part}")
}

/// Stable, because it sees what is in order already.
fn sort(numbers: &mut Vec<u64>) {
    numbers.sort();
    numbers.dedup();
}

/// How many numbers at the beginning of these follow directly on each other.
fn run(numbers: &[u64]) -> usize {
    let (mut run, mut beyond) = (0, numbers.len());
    while run < beyond {
        let middle = run.midpoint(beyond);
        match numbers[middle] - numbers[0] == middle as u64 {
            true => run = middle + 1,
            false => beyond = middle,
        }
    }
    run
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn many_small_exclusions_make_few_parts_and_none_that_is_passed() {
        let mut excluded = Exclusions::default();
        let mut written = Vec::new();
        for number in 0..5 * MOST_RECENT as u64 {
            excluded.add([2 * number].into_iter()).unwrap();
            written.extend(excluded.take_new_parts());
        }
        assert_eq!((written.len(), excluded.end, excluded.ahead), (4, 4, 500));
        excluded.pass(999);
        assert_eq!((excluded.first, excluded.ahead, excluded.numbers.len()), (4, 0, 0));
    }

    #[test]
    fn too_many_parts_are_gathered_into_few() {
        let mut excluded = Exclusions::default();
        let mut number = 0;
        let mut rounds = 0;
        while excluded.first == 0 {
            excluded.add(number..number + MOST_RECENT as u64 + 1).unwrap();
            number += MOST_RECENT as u64 + 1;
            excluded.take_new_parts();
            rounds += 1;
        }
        assert_eq!(rounds, MOST_PARTS + 1);
        assert_eq!(excluded.end - excluded.first, number.div_ceil(PART as u64));
    }

    #[test]
    fn a_pool_holds_so_many_and_no_more() {
        let mut excluded = Exclusions::default();
        excluded.add(0..MOST as u64).unwrap();
        assert!(excluded.add([MOST as u64].into_iter()).is_err());
        assert_eq!(excluded.passing_over(0, u64::MAX).next(), Some(MOST as u64));
        assert_eq!(excluded.ahead, MOST as u64);
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_is_not_excluded(
            numbers in prop::collection::btree_set(0_u64..60, 0..60),
            position in 0_u64..60,
        ) {
            let mut excluded = Exclusions::default();
            excluded.add(numbers.iter().copied()).unwrap();
            let left: Vec<u64> = excluded.passing_over(position, 60).collect();
            let expected: Vec<u64> = (position..60).filter(|number| !numbers.contains(number)).collect();
            prop_assert_eq!(left, expected);
        }
    }
}
