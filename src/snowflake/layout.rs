//! Which bits of an id are which.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// From the highest bit down: unused, timestamp, worker id, sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Timestamps count from here, in milliseconds since 1970.
    pub base: i64,
    pub skip_bits: u8,
    pub timestamp_bits: u8,
    pub worker_bits: u8,
    pub sequence_bits: u8,
}

impl Layout {
    /// Refuses layouts that could not mint.
    pub fn check(self, now: DateTime<Utc>) -> Result<()> {
        let Layout { base, skip_bits, timestamp_bits, worker_bits, sequence_bits } = self;
        let sizes = [skip_bits, timestamp_bits, worker_bits, sequence_bits].map(u32::from);
        let sum: u32 = sizes.iter().sum();
        if sum != 64 {
            let problem = format!("skip_size + ts_size + worker_id_size + seq_size must be 64, is {sum}");
            return Err(Error::invalid(problem).details(serde_json::json!({ "field": "ts_size" })));
        }
        for (field, bits, least, most) in [
            ("ts_size", timestamp_bits, 1, 63),
            ("worker_id_size", worker_bits, 0, 31),
            ("seq_size", sequence_bits, 0, 31),
        ] {
            if !(least..=most).contains(&bits) {
                return Err(Error::field(field, format!("must lie between {least} and {most}, is {bits}")));
            }
        }
        if !(0..=now.timestamp_millis()).contains(&base) {
            return Err(Error::field("base_ts", format!("must lie between 1970 and now, in milliseconds, is {base}")));
        }
        if now.timestamp_millis() - base > self.last_timestamp() {
            return Err(Error::field("ts_size", "is too small: the timestamp would be used up already"));
        }
        Ok(())
    }

    pub fn workers(self) -> u64 {
        1 << self.worker_bits
    }

    /// The largest timestamp, counted from the base.
    pub fn last_timestamp(self) -> i64 {
        i64::MAX >> (63 - self.timestamp_bits)
    }

    /// The last moment that can be minted. None if it lies beyond all calendars.
    pub fn expires_on(self) -> Option<DateTime<Utc>> {
        DateTime::from_timestamp_millis(self.base.checked_add(self.last_timestamp())?)
    }

    /// Puts an id together. All three must fit.
    pub fn compose(self, timestamp: u64, worker: u32, sequence: u64) -> u64 {
        let low = u32::from(self.worker_bits) + u32::from(self.sequence_bits);
        (timestamp << low) | (u64::from(worker) << self.sequence_bits) | sequence
    }

    /// Takes an id apart: timestamp counted from the base, worker, sequence.
    pub fn parse(self, id: u64) -> (u64, u32, u64) {
        let low = u32::from(self.worker_bits) + u32::from(self.sequence_bits);
        let timestamp = (id >> low) & self.last_timestamp() as u64;
        let worker = (id >> self.sequence_bits) & (self.workers() - 1);
        (timestamp, worker as u32, id & self.sequence_mask())
    }

    pub fn sequence_mask(self) -> u64 {
        (1 << self.sequence_bits) - 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const USUAL: Layout =
        Layout { base: 1_673_606_841_000, skip_bits: 1, timestamp_bits: 41, worker_bits: 10, sequence_bits: 12 };

    #[test]
    fn layouts_that_could_not_mint_are_refused() {
        let now = DateTime::from_timestamp_millis(1_700_000_000_000).unwrap();
        USUAL.check(now).unwrap();
        for (layout, mentions) in [
            (Layout { timestamp_bits: 40, ..USUAL }, "must be 64, is 63"),
            (Layout { skip_bits: 200, ..USUAL }, "is 263"),
            (Layout { timestamp_bits: 0, sequence_bits: 31, worker_bits: 31, skip_bits: 2, ..USUAL }, "ts_size"),
            (Layout { worker_bits: 32, sequence_bits: 0, timestamp_bits: 31, ..USUAL }, "worker_id_size"),
            (Layout { base: 1_700_000_000_001, ..USUAL }, "base_ts"),
            (Layout { base: -1, ..USUAL }, "base_ts"),
            (Layout { timestamp_bits: 20, worker_bits: 30, sequence_bits: 13, ..USUAL }, "used up already"),
        ] {
            let refused = layout.check(now).unwrap_err().message;
            assert!(refused.contains(mentions), "{layout:?}: {refused}");
        }
        assert_eq!(USUAL.expires_on().unwrap().to_rfc3339(), "2092-09-19T02:34:56.551+00:00");
        let endless = Layout { base: 0, skip_bits: 0, timestamp_bits: 63, worker_bits: 0, sequence_bits: 1 };
        endless.check(now).unwrap();
        assert_eq!(endless.expires_on(), None);
    }

    proptest! {
        #[test]
        fn what_is_put_together_can_be_taken_apart(timestamp in 0_u64..1 << 41, worker in 0_u32..1024, sequence in 0_u64..4096) {
            let id = USUAL.compose(timestamp, worker, sequence);
            prop_assert!(id <= i64::MAX as u64);
            prop_assert_eq!(USUAL.parse(id), (timestamp, worker, sequence));
        }
    }
}
