//! Replacement records: checked, and kept aside until they are written.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc};

use chrono::{DateTime, Utc};
use governor::clock::{Clock as _, DefaultClock};
use uuid::Uuid;

use super::not_pending;
use crate::{
    api::{
        Call, Handle, Json, Name,
        usage::{BackfillEvents, BackfillReceived, MOST_EVENTS, MetricKind, Rejection, SendBackfillEvents},
    },
    error::{Code, Error, Result},
    usage::{
        Usage,
        identity::Origin,
        record::{self, Record, Sent, check_speaks_for_all, invalid_field},
        rules,
        store::{
            backfills::{self, NewEvent},
            ranges::renew_range,
            unavailable,
        },
        types::Type,
    },
};

/// Records of one backfill.
const MOST_RECORDS: i64 = 10_000_000;

impl Handle<SendBackfillEvents> for Usage {
    async fn handle(&self, call: Call<SendBackfillEvents>) -> Result<BackfillReceived> {
        let ((tenant, source), BackfillEvents { id, records }) = (&call.target, &call.request);
        if !(1..=MOST_EVENTS).contains(&records.len()) {
            return Err(invalid_field("records", format_args!("must have 1 to {MOST_EVENTS}")));
        }
        check_speaks_for_all(&call.context)?;
        let operation = self.operation(tenant, *id).await?;
        if operation.status != "pending" {
            return Err(not_pending(&operation));
        }
        if operation.received() + records.len() as i64 > MOST_RECORDS {
            return Err(invalid_field("records", format_args!("a backfill has {MOST_RECORDS} records at most")));
        }
        self.admit_events(tenant, records.len())?;
        let of_type = self.known_type(&operation.usage_type).await?;
        let range = (operation.range_start, operation.range_end);
        let (events, mut rejected) = self.read_events(*id, (tenant, source), &of_type, range, records)?;
        let (accepted, conflicts) = self.keep_events(*id, &events).await?;
        rejected.extend(conflicts);
        rejected.sort_by_key(|rejection| rejection.index);
        Ok(BackfillReceived { accepted, duplicates: records.len() - rejected.len() - accepted, rejected })
    }
}

impl Usage {
    /// A type that there is.
    pub(in crate::usage) async fn known_type(&self, name: &str) -> Result<Arc<Type>> {
        if self.types.known(name)?.is_none() {
            self.types.catch_up().await?;
        }
        self.types.known(name)?.ok_or_else(|| {
            let message = format!("usage_type: no unit {name:?} is registered");
            Error::new(Code::TypeNotFound, message).about("usage_type")
        })
    }

    /// Backfills have a pace of their own, so that live records have theirs.
    pub(super) fn admit_events(&self, tenant: &Name, records: usize) -> Result<()> {
        let Some(records) = NonZeroU32::new(records as u32) else { return Ok(()) };
        match self.backfill_pace.check_key_n(tenant, records) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(wait)) => {
                let wait = wait.wait_time_from(DefaultClock::default().now());
                Err(Error::new(Code::RateLimited, "too many replacement records per second").retry_after(wait))
            }
            Err(error) => Err(Error::internal(error)),
        }
    }

    /// Reads replacement records: each of the type, in the range, and sound. Repeats among them count once.
    pub(super) fn read_events(
        &self,
        id: Uuid,
        (tenant, source): (&Name, &Name),
        of_type: &Type,
        range: (DateTime<Utc>, DateTime<Utc>),
        events: &[Json],
    ) -> Result<(Vec<NewEvent>, Vec<Rejection>)> {
        let namespace = id.to_string();
        let most_bytes = self.limits.of(tenant.as_str(), source.as_str()).max_record_bytes();
        let read = |index: usize, event: &Json| {
            let sent = Sent::parse(event.as_str(), most_bytes)?;
            let source = sent.source_id().unwrap_or(source.as_str());
            let source: Name = source.parse().map_err(|_| invalid_field("source_id", "is no name of a source"))?;
            sent.check_digits()?;
            let origin = Origin { tenant: tenant.as_str(), source: source.as_str() };
            let record = sent.read(&namespace, origin, None)?;
            if record.usage_type != of_type.unit.name {
                return Err(invalid_field("usage_type", "is not the backfill's"));
            }
            rules::check_type(&record, event.as_str(), source.as_str(), Some(of_type))?;
            if record.event_timestamp < range.0 || record.event_timestamp >= range.1 {
                return Err(invalid_field("event_timestamp", "lies outside of the backfill's range"));
            }
            if of_type.unit.metric_kind == MetricKind::Counter {
                rules::check_reading(record.value)?;
            }
            Ok(NewEvent { index, source: source.to_string(), record, kind: of_type.unit.metric_kind })
        };
        let (mut sound, mut rejected): (Vec<NewEvent>, Vec<Rejection>) = (Vec::new(), Vec::new());
        let mut places: HashMap<Uuid, usize> = HashMap::new();
        for (index, event) in events.iter().enumerate() {
            match read(index, event) {
                Ok(event) => match places.get(&event.record.id) {
                    Some(first) if is_same(&sound[*first].record, &event.record.body_hash) => {}
                    Some(_) => rejected.push(rejection(index, &event.record, other_body())),
                    None => {
                        places.insert(event.record.id, sound.len());
                        sound.push(event);
                    }
                },
                Err(error) => {
                    let idempotency_key = record::idempotency_key(event.as_str());
                    rejected.push(Rejection { index, idempotency_key, reason: error.into() });
                }
            }
        }
        Ok((sound, rejected))
    }

    /// Keeps records aside: how many were new, and those that were there with another body.
    pub(super) async fn keep_events(&self, id: Uuid, events: &[NewEvent]) -> Result<(usize, Vec<Rejection>)> {
        let keep = async {
            let mut transaction = self.database.begin().await?;
            // Whoever carries it out waits for us, or we come too late.
            if !backfills::is_pending(&mut transaction, id).await? {
                return Ok(None);
            }
            let there = backfills::stage(&mut transaction, id, events).await?;
            let new = events.len() - there.len();
            // Last, because parts that come at the same time wait for each other here.
            if !renew_range(&mut transaction, id, self.lease, new as i64).await? {
                return Ok(None);
            }
            transaction.commit().await?;
            Ok(Some((new, there)))
        };
        let kept = keep.await.map_err(unavailable)?;
        let (new, there) =
            kept.ok_or_else(|| Error::new(Code::BackfillConflict, "the backfill takes no more records"))?;
        let conflict =
            |event: &&NewEvent| there.get(&event.record.id).is_some_and(|body| !is_same(&event.record, body));
        let conflicts = events.iter().filter(conflict);
        Ok((new, conflicts.map(|event| rejection(event.index, &event.record, other_body())).collect()))
    }
}

fn is_same(record: &Record, body_hash: &[u8]) -> bool {
    record.body_hash[..] == *body_hash
}

fn other_body() -> Error {
    Error::new(Code::DuplicateRecord, "idempotency_key: used before with another body")
}

fn rejection(index: usize, record: &Record, error: Error) -> Rejection {
    Rejection { index, idempotency_key: Some(record.idempotency_key.clone()), reason: error.into() }
}
