//! Keeping the catalog of partitions: from when to when the events of each are. Times are rounded to hours, so that it has
//! to be written about once an hour.

use std::collections::HashMap;

use chrono::{DateTime, DurationRound, TimeDelta, Utc};
use sqlx::PgConnection;

use crate::usage::{
    identity::time_of,
    record::Record,
    store::retention::{Extent, widen_partitions},
};

const DAY: i64 = 24 * 3600 * 1000;

/// The weeks that the catalog is known to cover, and how far.
#[derive(Default)]
pub struct Catalog {
    covered: HashMap<i64, Extent>,
}

impl Catalog {
    /// Widens the catalog where a batch reaches beyond it. What it covers then, once it is committed.
    pub async fn widen(
        &self,
        transaction: &mut PgConnection,
        accepted: impl Iterator<Item = &Record>,
    ) -> Result<Vec<(i64, Extent)>, sqlx::Error> {
        let now = Utc::now();
        let mut reached: HashMap<i64, Extent> = HashMap::new();
        for record in accepted {
            let (made, at) = (time_of(record.id), record.event_timestamp);
            let one = Extent { at: made, least: at, greatest: at, written: now };
            let week = reached.entry(week_of(made)).or_insert(one);
            week.least = week.least.min(at);
            week.greatest = week.greatest.max(at);
        }
        let is_beyond = |(week, extent): &(i64, Extent)| {
            self.covered.get(week).is_none_or(|known| {
                extent.least < known.least || extent.greatest > known.greatest || extent.written > known.written
            })
        };
        let beyond: Vec<(i64, Extent)> = reached
            .into_iter()
            .filter(is_beyond)
            .map(|(week, extent)| {
                let rounded = Extent {
                    least: hour(extent.least),
                    greatest: hour(extent.greatest) + TimeDelta::hours(1),
                    written: hour(extent.written) + TimeDelta::hours(1),
                    ..extent
                };
                (week, self.covered.get(&week).map_or(rounded, |known| known.joined(&rounded)))
            })
            .collect();
        if beyond.is_empty() {
            return Ok(beyond);
        }
        let extents: Vec<Extent> = beyond.iter().map(|(_, extent)| *extent).collect();
        match widen_partitions(transaction, &extents).await? {
            true => Ok(beyond),
            // What lies beyond all partitions is looked at when its partition is made, and until then each time.
            false => Ok(Vec::new()),
        }
    }

    pub fn note(&mut self, widened: Vec<(i64, Extent)>) {
        self.covered.extend(widened);
    }
}

impl Extent {
    fn joined(&self, other: &Self) -> Self {
        Self {
            at: other.at,
            least: self.least.min(other.least),
            greatest: self.greatest.max(other.greatest),
            written: self.written.max(other.written),
        }
    }
}

/// A week from Monday to Sunday. Partitions begin and end with one, so all of a week is in the same.
fn week_of(moment: DateTime<Utc>) -> i64 {
    // The clock began on a Thursday.
    (moment.timestamp_millis() + 3 * DAY) / (7 * DAY)
}

fn hour(at: DateTime<Utc>) -> DateTime<Utc> {
    at.duration_trunc(TimeDelta::hours(1)).unwrap_or(at)
}
