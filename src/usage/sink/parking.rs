//! Which records wait, because a backfill works on their range.

use std::collections::HashSet;

use uuid::Uuid;

use super::reader::{Item, Read, Received};
use crate::{
    api::usage::MetricKind,
    usage::store::{Waiters, ranges::BusyRange},
};

/// The ranges that are closed to live records, and what waits already.
#[derive(Default)]
pub struct Barriers {
    pub ranges: Vec<BusyRange>,
    pub waiters: Waiters,
}

impl Barriers {
    /// Whether somebody works where one of these records is.
    pub fn concern<'a>(&self, mut items: impl Iterator<Item = (&'a Received, &'a Item)>) -> bool {
        !self.ranges.is_empty()
            && items.any(|(message, item)| {
                item.read.record().is_some_and(|record| {
                    let covers =
                        |range: &BusyRange| range.covers(&message.tenant, &record.usage_type, record.event_timestamp);
                    self.ranges.iter().any(covers)
                })
            })
    }
}

/// Decides on one record after the other.
pub struct Parking<'a> {
    barriers: &'a Barriers,
    /// The counters of which something was told to wait.
    series: HashSet<Uuid>,
}

impl<'a> Parking<'a> {
    pub fn new(barriers: &'a Barriers) -> Self {
        Self { barriers, series: HashSet::new() }
    }

    /// Whether a record waits: its range is closed, or an earlier reading of its counter waits.
    pub fn takes(&mut self, message: &Received, item: &Item) -> bool {
        let Barriers { ranges, waiters } = self.barriers;
        if ranges.is_empty() && !waiters.any {
            return false;
        }
        let Some(record) = item.read.record() else { return false };
        let closed = ranges
            .iter()
            .any(|range| range.blocking && range.covers(&message.tenant, &record.usage_type, record.event_timestamp));
        let series = series(item);
        let behind = series.is_some_and(|series| {
            // What has waited itself stands behind nobody but those of its own kind.
            self.series.contains(&series) || message.parked.is_none() && waiters.series.contains(&series)
        });
        if closed || behind {
            self.series.extend(series);
        }
        closed || behind
    }
}

/// The counter whose readings must not overtake each other.
pub fn series(item: &Item) -> Option<Uuid> {
    match &item.read {
        Read::Sound(record, of_type) if of_type.unit.metric_kind == MetricKind::Counter => Some(record.series),
        // Of what kind it is can't be told.
        Read::Unfit(record, _) => Some(record.series),
        Read::Sound(..) | Read::Unreadable { .. } => None,
    }
}
