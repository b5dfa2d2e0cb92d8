//! Decisions on records that depend on what the ledger has: repeats, conflicts, and counters that go down.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use rust_decimal::Decimal;
use serde_json::json;
use uuid::Uuid;

use super::reader::{Item, Read};
use crate::{
    api::usage::MetricKind,
    error::{Code, Error},
    usage::{
        identity::time_of,
        record::{Record, invalid_field},
        store::{Head, Neighbours, Stored, moved::Moved},
    },
};

/// What becomes of a record.
#[derive(Debug)]
pub enum Decision {
    Accepted,
    Duplicate,
    Rejected(Error),
    /// It waits.
    Parked,
}

/// What the ledger has that bears on a batch.
#[derive(Default)]
pub struct Known {
    /// Those of its records that are there, as far as they were looked for.
    pub stored: HashMap<Uuid, Stored>,
    pub heads: HashMap<Uuid, Head>,
    /// For readings that are not newer than their series' head.
    pub neighbours: HashMap<(Uuid, DateTime<Utc>), Neighbours>,
    /// The weeks of the historical database, which is not asked.
    pub moved: Moved,
}

/// Whether a record is of a counter.
fn counter(item: &Item) -> Option<&Record> {
    match &item.read {
        Read::Sound(record, of_type) if of_type.unit.metric_kind == MetricKind::Counter => Some(record),
        _ => None,
    }
}

/// Whether a key is so old that its week may have moved. Keys that tell no time are of no week.
pub fn is_of_an_old_key(item: &Item) -> bool {
    // The least age of what moves, and some room for clocks that differ.
    const LEAST_AGE: TimeDelta = TimeDelta::days(6);
    const YEAR: TimeDelta = TimeDelta::days(365);
    let made = item.read.record().map(|record| time_of(record.id));
    made.is_some_and(|made| made < Utc::now() - LEAST_AGE && made > DateTime::UNIX_EPOCH + YEAR)
}

/// Nobody could tell whether it was used before.
fn too_old_a_key(id: Uuid) -> Error {
    let problem = format_args!(
        "is of {}, and the records of that week have moved to the historical database: use a new key",
        time_of(id).format("%F")
    );
    invalid_field("idempotency_key", problem)
}

/// The series whose heads a batch needs.
pub fn series<'a>(items: impl Iterator<Item = &'a Item>) -> Vec<Uuid> {
    let mut series: Vec<Uuid> = items.filter_map(counter).map(|record| record.series).collect();
    series.sort_unstable();
    series.dedup();
    series
}

/// Which records have to be looked for. Most are new and newer than all before, and need no look at the ledger: that they
/// are new will be seen when they are inserted. `all` looks for every one.
pub fn doubtful<'a>(items: impl Iterator<Item = &'a Item>, heads: &HashMap<Uuid, Head>, all: bool) -> Vec<Uuid> {
    let mut newest: HashMap<Uuid, DateTime<Utc>> = HashMap::new();
    let mut is_late = |record: &Record| {
        let at = record.event_timestamp;
        let newest = newest.entry(record.series).or_insert(at);
        *newest = at.max(*newest);
        at < *newest || heads.get(&record.series).is_some_and(|head| at <= head.event_timestamp)
    };
    let mut doubtful: Vec<Uuid> = items
        .filter_map(|item| {
            let record = item.read.record()?;
            let late = counter(item).is_some() && is_late(record);
            (all || late || matches!(item.read, Read::Unfit(..))).then_some(record.id)
        })
        .collect();
    doubtful.sort_unstable();
    doubtful.dedup();
    doubtful
}

/// The moments whose neighbours have to be looked for: of new readings that are not newer than their series' head.
pub fn late<'a>(items: impl Iterator<Item = &'a Item>, known: &Known) -> Vec<(Uuid, DateTime<Utc>)> {
    let is_late = |record: &&Record| {
        let head = known.heads.get(&record.series);
        head.is_some_and(|head| record.event_timestamp <= head.event_timestamp)
            && !known.stored.contains_key(&record.id)
    };
    let mut moments: Vec<_> =
        items.filter_map(counter).filter(is_late).map(|record| (record.series, record.event_timestamp)).collect();
    moments.sort_unstable();
    moments.dedup();
    moments
}

/// Decides on one record after the other.
pub struct Judge<'a> {
    known: &'a Known,
    /// Accepted in this batch.
    accepted: HashMap<Uuid, &'a Record>,
    /// Readings accepted in this batch, by series.
    readings: HashMap<Uuid, Vec<(DateTime<Utc>, Decimal)>>,
}

impl<'a> Judge<'a> {
    pub fn new(known: &'a Known) -> Self {
        Self { known, accepted: HashMap::new(), readings: HashMap::new() }
    }

    /// Identity first: the repeat of an old record is a duplicate, whatever else would be said of it today.
    pub fn decide(&mut self, item: &'a Item) -> Decision {
        let record = match &item.read {
            Read::Unreadable { error, .. } => return Decision::Rejected(error.share()),
            Read::Sound(record, _) | Read::Unfit(record, _) => record,
        };
        if let Some(stored) = self.known.stored.get(&record.id) {
            return repeated(stored, record);
        }
        if let Some(first) = self.accepted.get(&record.id) {
            return repeated(&Stored::of(first), record);
        }
        if let Read::Unfit(_, error) = &item.read {
            return Decision::Rejected(error.share());
        }
        if self.known.moved.may_have(record.id) {
            return Decision::Rejected(too_old_a_key(record.id));
        }
        if counter(item).is_some() {
            if let Some(violation) = self.violation(record) {
                return Decision::Rejected(violation);
            }
            self.readings.entry(record.series).or_default().push((record.event_timestamp, record.value));
        }
        self.accepted.insert(record.id, record);
        Decision::Accepted
    }

    /// A reading lies between those before and after it. Those of the same moment don't order each other.
    fn violation(&self, record: &Record) -> Option<Error> {
        let (at, value) = (record.event_timestamp, record.value);
        let mut around = match self.known.heads.get(&record.series) {
            Some(head) if head.event_timestamp < at => Neighbours { before: Some(head.value), ..Neighbours::default() },
            Some(_) => self.known.neighbours.get(&(record.series, at)).copied().unwrap_or_default(),
            None => Neighbours::default(),
        };
        if around.below_floor {
            let message = "event_timestamp: readings of that time have moved to the historical database";
            return Some(Error::new(Code::GracePeriodExceeded, message).about("event_timestamp"));
        }
        for (other, value) in self.readings.get(&record.series).into_iter().flatten() {
            if *other < at {
                around.before = around.before.max(Some(*value));
            } else if *other > at {
                around.after = Some(around.after.map_or(*value, |after| after.min(*value)));
            }
        }
        around.violation(value)
    }
}

fn repeated(first: &Stored, record: &Record) -> Decision {
    if first.is_same(record) {
        return Decision::Duplicate;
    }
    let fields = first.differences(record);
    let message = format!("idempotency_key: used before with another {}", fields.join(", "));
    Decision::Rejected(Error::new(Code::DuplicateRecord, message).details(json!({ "fields": fields })))
}
