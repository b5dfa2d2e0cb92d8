//! A pool: how far it has come, and what may change about it. Rules only; nothing here knows where it is kept.

use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{exclusions::Exclusions, template::Template};
use crate::{
    error::Result,
    watermark::{Older, Parts, State},
};

/// Everything about a pool but its name. It is one value of the bucket; only what is excluded stands beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    pub template: Arc<Template>,
    /// The number of the next id. Everything below is spent.
    pub position: u64,
    pub closed: bool,
    pub created: DateTime<Utc>,
    pub last_mint: DateTime<Utc>,
    pub excluded: Exclusions,
    /// The pool counts as low when no more ids than this are left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_water: Option<u64>,
    /// What was told about its level.
    #[serde(default)]
    pub announced: Level,
}

/// How full a pool is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    #[default]
    Plenty,
    Low,
    Exhausted,
}

impl Level {
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Plenty => "plenty",
            Level::Low => "low",
            Level::Exhausted => "exhausted",
        }
    }
}

impl Pool {
    /// An open pool; a closed one if there is nothing in it.
    pub fn new(template: Template, position: u64, low_water: Option<u64>, now: DateTime<Utc>) -> Self {
        let mut pool = Self {
            template: Arc::new(template),
            position,
            closed: false,
            created: now,
            last_mint: now,
            excluded: Exclusions::default(),
            low_water,
            announced: Level::Plenty,
        };
        pool.close_if_exhausted();
        pool
    }

    /// The template with its counter.
    pub fn written(&self) -> String {
        format!("{}+{}", self.template, self.position)
    }

    /// Whether it can be true. What was written by us always is.
    pub fn is_sound(&self) -> bool {
        let left = self.template.end().checked_sub(self.position);
        left.is_some_and(|left| self.excluded.ahead() <= left)
    }

    /// Ids that can still be minted.
    pub fn remaining(&self) -> u64 {
        self.template.end() - self.position - self.excluded.ahead()
    }

    pub fn level(&self) -> Level {
        match self.remaining() {
            0 => Level::Exhausted,
            left if self.low_water.is_some_and(|low| left <= low) => Level::Low,
            _ => Level::Plenty,
        }
    }

    /// Whether its level is lower than anybody was told.
    pub fn has_news(&self) -> bool {
        self.level() > self.announced
    }

    /// The numbers of the next ids, as many as there are. None if it is closed.
    pub fn peek(&self, count: usize) -> Vec<u64> {
        if self.closed {
            return Vec::new();
        }
        debug_assert_eq!(self.excluded.at_or_after(self.position).len() as u64, self.excluded.ahead(), "it is whole");
        self.excluded.passing_over(self.position, self.template.end()).take(count).collect()
    }

    /// The same, and spends them. The last one closes the pool.
    pub fn mint(&mut self, count: usize, now: DateTime<Utc>) -> Vec<u64> {
        let numbers = self.peek(count);
        if let Some(last) = numbers.last() {
            self.spend(*last, now);
        }
        numbers
    }

    /// Makes sure that a number is never minted, nor any before it.
    pub fn advance_past(&mut self, number: u64, now: DateTime<Utc>) {
        if number >= self.position {
            self.spend(number, now);
        }
    }

    /// Passes over so many ids that may have been minted without our knowing, up to the end.
    pub fn jump(&mut self, margin: usize, now: DateTime<Utc>) {
        let end = self.template.end();
        let last = self.excluded.passing_over(self.position, end).take(margin).last();
        if let Some(last) = last {
            self.advance_past(last, now);
        }
    }

    fn spend(&mut self, last: u64, now: DateTime<Utc>) {
        self.position = last + 1;
        self.excluded.pass(self.position);
        self.last_mint = now;
        self.close_if_exhausted();
    }

    /// Makes sure that these numbers are never minted. Whatever is spent already needs nothing.
    pub fn exclude(&mut self, numbers: &[u64]) -> Result<()> {
        self.excluded.add(numbers.iter().copied().filter(|number| *number >= self.position))?;
        self.close_if_exhausted();
        Ok(())
    }

    /// An exhausted pool stays as it is.
    pub fn open(&mut self) {
        self.closed = self.remaining() == 0;
    }

    pub fn set_low_water(&mut self, low_water: Option<u64>) {
        // Under another threshold, being low is news again.
        if std::mem::replace(&mut self.low_water, low_water) != low_water && self.level() < Level::Exhausted {
            self.announced = Level::Plenty;
        }
    }

    fn close_if_exhausted(&mut self) {
        self.closed |= self.remaining() == 0;
    }
}

impl State for Pool {
    async fn complete(&mut self, older: Option<Older<'_, Self>>, parts: Parts<'_>) -> Result<()> {
        self.excluded.complete(older.map(|older| &older.state.excluded), self.position, parts).await
    }

    fn take_new_parts(&mut self) -> Vec<(String, Bytes)> {
        self.excluded.take_new_parts()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pool(template: &str) -> Pool {
        let (template, position) = Template::parse(template).unwrap();
        Pool::new(template, position, Some(3), DateTime::UNIX_EPOCH)
    }

    const NOW: DateTime<Utc> = DateTime::UNIX_EPOCH;

    #[test]
    fn the_last_id_closes_the_pool_for_good() {
        let mut pool = pool(".sd+8");
        assert_eq!((pool.closed, pool.level()), (false, Level::Low));
        assert_eq!(pool.mint(5, NOW), [8, 9]);
        assert_eq!((pool.closed, pool.level()), (true, Level::Exhausted));
        assert!(pool.mint(1, NOW).is_empty());
        pool.open();
        assert!(pool.closed);
    }

    #[test]
    fn excluded_ids_count_as_gone() {
        let mut pool = pool(".sd");
        pool.exclude(&[9, 3, 3, 4]).unwrap();
        assert_eq!(pool.remaining(), 7);
        assert_eq!(pool.mint(4, NOW), [0, 1, 2, 5]);
        assert_eq!((pool.position, pool.remaining()), (6, 3));
        pool.exclude(&[0, 4, 9]).unwrap();
        assert_eq!(pool.remaining(), 3, "what is spent or excluded already changes nothing");
        pool.advance_past(7, NOW);
        assert_eq!(pool.mint(9, NOW), [8]);
        assert!(pool.closed && pool.remaining() == 0, "only an excluded one was left");
        let mut pool = super::tests::pool(".sd+9");
        pool.exclude(&[9]).unwrap();
        assert!(pool.closed);
    }

    #[test]
    fn a_jump_counts_ids_and_not_what_is_excluded_between() {
        let mut pool = pool(".sdd+8");
        pool.exclude(&(10..90).collect::<Vec<_>>()).unwrap();
        let mut put_back = pool.clone();
        let minted = pool.mint(4, NOW);
        put_back.jump(4, NOW);
        assert_eq!((minted, put_back.mint(1, NOW)), (vec![8, 9, 90, 91], vec![92]));
        put_back.jump(1000, NOW);
        assert!(put_back.closed && put_back.remaining() == 0);
    }

    #[test]
    fn an_unbounded_pool_closes_at_the_end_of_numbers() {
        let mut pool = pool(".zd+9223372036854775805");
        assert_eq!(pool.mint(9, NOW), [i64::MAX as u64 - 2, i64::MAX as u64 - 1]);
        assert!(pool.closed);
    }

    #[test]
    fn a_new_threshold_is_news_again() {
        let mut pool = pool(".sd+8");
        pool.announced = pool.level();
        assert!(!pool.has_news());
        pool.set_low_water(Some(1));
        assert_eq!((pool.level(), pool.has_news()), (Level::Plenty, false));
        pool.mint(1, NOW);
        assert!(pool.has_news());
        pool.announced = pool.level();
        pool.set_low_water(Some(1));
        assert!(!pool.has_news(), "the same one is not");
        pool.set_low_water(Some(5));
        assert!(pool.has_news());
    }

    proptest! {
        /// Whatever is done to it in whatever order, no number comes twice, and none that was excluded or passed.
        #[test]
        fn nothing_comes_twice_or_against_a_promise(steps in prop::collection::vec((0_u8..5, 0_u64..100, 1_usize..9), 1..60)) {
            let mut pool = pool(".sdd");
            let mut gone = BTreeSet::new();
            for (what, number, count) in steps {
                match what {
                    0 | 1 => for minted in pool.mint(count, NOW) {
                        prop_assert!(gone.insert(minted), "{minted} came again");
                    },
                    2 => {
                        pool.advance_past(number / 4, NOW);
                        gone.extend(0..=number / 4);
                    }
                    3 => {
                        pool.exclude(&[number, number / 2]).unwrap();
                        gone.extend([number, number / 2]);
                    }
                    _ => pool.open(),
                }
                prop_assert_eq!(pool.remaining(), 100 - gone.len() as u64);
                prop_assert_eq!(pool.closed, pool.remaining() == 0);
            }
        }
    }
}
