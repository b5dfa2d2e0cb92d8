//! A batch into the ledger, in one transaction.

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;
use sqlx::{Acquire, PgConnection};
use uuid::Uuid;

use super::{
    catalog::Catalog,
    judge::{self, Decision, Judge, Known},
    parking::{self, Barriers, Parking},
    reader::{Item, Read, Received},
};
use crate::{
    api::usage::{MetricKind, Reason, Rejection},
    error::{Code, Error},
    usage::{
        identity::Origin,
        record,
        store::{
            self, Count, Head, Lane, MinuteKey, NewParked, NewRow, Refused, Tally, TallyKey, moved::hold_moved,
            ranges::busy_ranges,
        },
        verdicts::Verdict,
    },
};

/// One shard's writer.
pub struct Writer {
    pub shard: i32,
    pub stream_created: String,
    /// The last message that is in the ledger.
    pub position: i64,
    /// Whether records of this shard wait for a range.
    pub something_waits: bool,
    /// The ranges that were closed when it was last seen that all of them must go on waiting.
    pub waits_for: Option<Vec<Uuid>>,
    /// Those that are closed.
    pub closed: Vec<Uuid>,
    catalog: Catalog,
}

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("another writer has moved on")]
    Fenced,
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

/// Messages that are written together, and what was decided on each of their records.
pub struct Batch {
    messages: Vec<Received>,
    decisions: Vec<Vec<Outcome>>,
}

/// What became of a record.
pub enum Outcome {
    Accepted,
    Duplicate,
    /// Under its id in quarantine.
    Rejected(Uuid, Reason),
    /// It waits, and is decided later.
    Parked,
}

/// What is told of a record that was refused.
#[derive(Serialize)]
pub struct Entry<'a> {
    id: Uuid,
    received_at: chrono::DateTime<chrono::Utc>,
    idempotency_key: Option<&'a str>,
    reason: &'a Reason,
}

impl Batch {
    pub fn new(messages: Vec<Received>) -> Self {
        Self { messages, decisions: Vec::new() }
    }

    pub fn into_messages(self) -> Vec<Received> {
        self.messages
    }

    /// Refuses everything in it.
    pub fn refuse(&mut self, error: &sqlx::Error) {
        tracing::error!(%error, "usage: a message that the database won't have goes to quarantine");
        for item in self.messages.iter_mut().flat_map(|message| &mut message.items) {
            let error = Error::new(Code::Internal, "the database would not keep the record");
            item.read = Read::Unreadable { idempotency_key: item.read.idempotency_key().map(str::to_owned), error };
        }
    }

    pub fn items(&self) -> impl Iterator<Item = &Item> {
        self.each_item().map(|(_, item)| item)
    }

    fn each_item(&self) -> impl Iterator<Item = (&Received, &Item)> {
        self.messages.iter().flat_map(|message| message.items.iter().map(move |item| (message, item)))
    }

    fn each(&self) -> impl Iterator<Item = (&Received, &Item, &Outcome)> {
        let both = self.messages.iter().zip(&self.decisions);
        both.flat_map(|(message, decisions)| {
            message.items.iter().zip(decisions).map(move |(item, outcome)| (message, item, outcome))
        })
    }

    /// The verdict on each message, and whether something of it waits.
    pub fn decided(&self) -> impl Iterator<Item = (&Received, Verdict, bool)> {
        self.messages.iter().zip(&self.decisions).map(|(message, decisions)| {
            let (mut verdict, mut waits) = (Verdict::default(), false);
            for (item, outcome) in message.items.iter().zip(decisions) {
                match outcome {
                    Outcome::Accepted => verdict.accepted += 1,
                    Outcome::Duplicate => verdict.duplicates += 1,
                    Outcome::Rejected(_, reason) => verdict.rejected.push(Rejection {
                        index: item.index,
                        idempotency_key: item.read.idempotency_key().map(str::to_owned),
                        reason: reason.clone(),
                    }),
                    Outcome::Parked => waits = true,
                }
            }
            (message, verdict, waits)
        })
    }

    fn accepted(&self) -> impl Iterator<Item = (&Received, &Item)> {
        let accepted = self.each().filter(|(_, _, outcome)| matches!(outcome, Outcome::Accepted));
        accepted.map(|(message, item, _)| (message, item))
    }

    fn accepted_records(&self) -> impl Iterator<Item = &record::Record> {
        self.accepted().filter_map(|(_, item)| item.read.record())
    }

    /// What the feed tells of it.
    fn entries(&self) -> Vec<store::Entry<'_>> {
        let id = |item: &Item| item.read.record().map(|record| record.id);
        let accepted = self.accepted().filter_map(|(message, item)| Some((message.tenant.as_str(), id(item)?)));
        accepted.map(|(tenant, id)| store::Entry { tenant, id, revision: 1 }).collect()
    }

    /// The tenants of whom something was accepted.
    pub fn fed(&self) -> BTreeSet<&str> {
        self.accepted().map(|(message, _)| message.tenant.as_str()).collect()
    }

    /// What was refused.
    pub fn refused(&self) -> impl Iterator<Item = (Origin<'_>, Entry<'_>)> {
        self.each().filter_map(|(message, item, outcome)| match outcome {
            Outcome::Rejected(id, reason) => Some((
                message.origin(),
                Entry {
                    id: item.replay_of.unwrap_or(*id),
                    received_at: item.came_at,
                    idempotency_key: item.read.idempotency_key(),
                    reason,
                },
            )),
            _ => None,
        })
    }
}

impl Writer {
    pub fn new(shard: i32, stream_created: String, position: i64) -> Self {
        Self {
            shard,
            stream_created,
            position,
            something_waits: true,
            waits_for: None,
            closed: Vec::new(),
            catalog: Catalog::default(),
        }
    }

    /// Whether something waits that may not have to.
    pub fn may_release(&self) -> bool {
        self.something_waits && self.waits_for.as_ref() != Some(&self.closed)
    }

    /// Writes a batch, and moves on. Either everything is written or nothing.
    pub async fn write(&mut self, connection: &mut PgConnection, batch: &mut Batch) -> Result<(), WriteError> {
        let Some((to, until)) = batch.messages.last().map(|message| (message.sequence, message.at)) else {
            return Ok(());
        };
        let mut transaction = connection.begin().await?;
        // First, so that a second writer waits here, and finds that he is second.
        let moved = store::move_position(&mut transaction, self.shard, &self.stream_created, self.position, to, until);
        if !moved.await? {
            return Err(WriteError::Fenced);
        }
        let barriers = Barriers {
            ranges: busy_ranges(&mut transaction).await?,
            waiters: store::waiters(&mut transaction, self.shard).await?,
        };
        batch.decisions = decide(&mut transaction, batch, &barriers).await?;
        let widened = self.catalog.widen(&mut transaction, batch.accepted_records()).await?;
        let parked = keep_waiting(&mut transaction, self.shard, batch).await?;
        keep_account(&mut transaction, batch).await?;
        keep_refused(&mut transaction, batch).await?;
        store::append_feed(&mut transaction, Lane::Live, until, &batch.entries()).await?;
        transaction.commit().await?;
        self.catalog.note(widened);
        let closed = barriers.ranges.iter().filter(|range| range.blocking);
        self.closed = closed.map(|range| range.operation_id).collect();
        self.something_waits = parked || barriers.waiters.any;
        self.position = to;
        Ok(())
    }
}

/// Decides on the records and inserts what is accepted. At first only what looks strange is looked up; if then a row that
/// was thought to be new is there already, it is decided again with all that is known.
async fn decide(
    transaction: &mut PgConnection,
    batch: &Batch,
    barriers: &Barriers,
) -> Result<Vec<Vec<Outcome>>, sqlx::Error> {
    let mut known = Known::default();
    if batch.items().any(judge::is_of_an_old_key) {
        known.moved = hold_moved(transaction).await?;
    }
    // A row that somebody is changing right now would be waited for, if it were inserted again.
    let careful = barriers.concern(batch.each_item()) || !known.moved.is_empty();
    for all in [careful, true] {
        known.heads = store::heads(transaction, &judge::series(batch.items())).await?;
        known.stored = store::stored(transaction, &judge::doubtful(batch.items(), &known.heads, all)).await?;
        known.neighbours = store::neighbours(transaction, &judge::late(batch.items(), &known)).await?;
        let (mut judge, mut parking) = (Judge::new(&known), Parking::new(barriers));
        let mut decide = |message, item| match parking.takes(message, item) {
            true => Decision::Parked,
            false => judge.decide(item),
        };
        let decisions: Vec<Vec<Decision>> = batch
            .messages
            .iter()
            .map(|message| message.items.iter().map(|item| decide(message, item)).collect())
            .collect();
        let accepted: Vec<NewRow<'_>> = accepted(batch, &decisions).collect();
        let mut attempt = transaction.begin().await?;
        if accepted.is_empty()
            || store::insert(&mut attempt, &accepted).await? == accepted.len()
                && move_heads(&mut attempt, &known.heads, &accepted).await?
        {
            attempt.commit().await?;
            return Ok(decisions.into_iter().map(|message| message.into_iter().map(outcome).collect()).collect());
        }
        attempt.rollback().await?;
    }
    // The position is ours, so nobody else inserts rows of these tenants meanwhile, and heads are made by backfills only.
    Err(sqlx::Error::Protocol("rows appeared that nobody could have written".into()))
}

fn outcome(decision: Decision) -> Outcome {
    match decision {
        Decision::Accepted => Outcome::Accepted,
        Decision::Duplicate => Outcome::Duplicate,
        Decision::Rejected(error) => Outcome::Rejected(Uuid::now_v7(), told(error)),
        Decision::Parked => Outcome::Parked,
    }
}

/// What is told of an error: as much as somebody reads, and a thousand of them in one verdict.
fn told(error: Error) -> Reason {
    let mut reason = Reason::from(error);
    if reason.message.len() > record::MOST_CHARACTERS {
        reason.message = format!("{}…", record::cut(&reason.message)).into();
    }
    reason.details = reason.details.filter(|details| details.to_string().len() <= record::MOST_CHARACTERS);
    reason
}

fn accepted<'a>(batch: &'a Batch, decisions: &'a [Vec<Decision>]) -> impl Iterator<Item = NewRow<'a>> {
    let both = batch.messages.iter().zip(decisions);
    both.flat_map(|(message, decisions)| {
        message.items.iter().zip(decisions).filter_map(move |(item, decision)| match (decision, &item.read) {
            (Decision::Accepted, Read::Sound(record, of_type)) => {
                Some(NewRow { origin: message.origin(), record, kind: of_type.unit.metric_kind })
            }
            _ => None,
        })
    })
}

/// Moves heads. False if one was made meanwhile that was thought to be new: its readings have not been looked at.
async fn move_heads(
    transaction: &mut PgConnection,
    heads: &HashMap<Uuid, Head>,
    accepted: &[NewRow<'_>],
) -> Result<bool, sqlx::Error> {
    let mut moved: HashMap<Uuid, (Origin<'_>, &record::Record, Head)> = HashMap::new();
    for NewRow { origin, record, .. } in accepted.iter().filter(|row| row.kind == MetricKind::Counter) {
        let reading = Head { event_timestamp: record.event_timestamp, value: record.value };
        let newer = |head: &Head| (reading.event_timestamp, reading.value) > (head.event_timestamp, head.value);
        if heads.get(&record.series).is_none_or(newer) {
            let head = moved.entry(record.series).or_insert((*origin, *record, reading));
            if newer(&head.2) {
                head.2 = reading;
            }
        }
    }
    let mut moved: Vec<_> = moved.into_values().collect();
    moved.sort_unstable_by_key(|(_, record, _)| record.series);
    let made = store::move_heads(transaction, &moved).await?;
    Ok(moved.iter().all(|(_, record, _)| heads.contains_key(&record.series) || made.contains(&record.series)))
}

/// Puts aside what waits, and takes out what has waited. True if something waits now.
async fn keep_waiting(transaction: &mut PgConnection, shard: i32, batch: &Batch) -> Result<bool, sqlx::Error> {
    let (mut parked, mut unparked) = (Vec::new(), Vec::new());
    for (message, item, outcome) in batch.each() {
        match (outcome, item.read.record(), message.parked) {
            (Outcome::Parked, Some(record), None) => parked.push(NewParked {
                origin: message.origin(),
                record,
                arrived_at: message.at,
                came_at: item.came_at,
                user: item.user.as_deref(),
                series: parking::series(item),
                replay_of: message.entry_of(item),
                payload: &item.payload,
            }),
            // It stays where it is.
            (Outcome::Parked, ..) => {}
            (_, _, Some(position)) => unparked.push(position),
            _ => {}
        }
    }
    store::park(transaction, shard, &parked).await?;
    store::unpark(transaction, &unparked).await?;
    Ok(!parked.is_empty())
}

/// Tallies, and the minutes' counts.
async fn keep_account(transaction: &mut PgConnection, batch: &Batch) -> Result<(), sqlx::Error> {
    let mut tallies: HashMap<TallyKey<'_>, Tally> = HashMap::new();
    let mut minutes: HashMap<MinuteKey, Count> = HashMap::new();
    for (message, decisions) in
        batch.messages.iter().zip(&batch.decisions).filter(|(message, _)| !message.items.is_empty())
    {
        if decisions.iter().all(|outcome| matches!(outcome, Outcome::Parked)) {
            continue;
        }
        let count = minutes.entry(MinuteKey::new(&message.tenant, &message.source, message.at)).or_default();
        for (item, outcome) in message.items.iter().zip(decisions) {
            match (outcome, item.read.record()) {
                (Outcome::Parked, _) => {}
                (Outcome::Accepted, Some(record)) => {
                    count.accepted += 1;
                    let one = Tally::one(record.event_timestamp);
                    let key = (message.tenant.as_str(), message.source.as_str(), record.usage_type.as_str());
                    tallies.entry(key).and_modify(|tally| tally.add(one)).or_insert(one);
                }
                (Outcome::Duplicate, _) => count.duplicates += 1,
                _ => count.rejected += 1,
            }
        }
    }
    store::add_tallies(transaction, &tallies).await?;
    store::add_minutes(transaction, &minutes).await
}

async fn keep_refused(transaction: &mut PgConnection, batch: &Batch) -> Result<(), sqlx::Error> {
    let (mut refused, mut again, mut taken) = (Vec::new(), Vec::new(), Vec::new());
    for (message, item, outcome) in batch.each() {
        match (outcome, item.replay_of) {
            (Outcome::Rejected(_, reason), Some(entry)) => again.push((entry, reason)),
            (Outcome::Rejected(id, reason), None) => refused.push(Refused {
                id: *id,
                origin: message.origin(),
                received_at: item.came_at,
                user: message.user.as_deref(),
                idempotency_key: item.read.idempotency_key(),
                reason,
                payload: &item.payload,
            }),
            (Outcome::Accepted | Outcome::Duplicate, Some(entry)) => taken.push(entry),
            // It goes its own way, and is an entry of its own should it be refused.
            (Outcome::Parked, Some(entry)) if message.entry_of(item).is_none() => taken.push(entry),
            (Outcome::Accepted | Outcome::Duplicate | Outcome::Parked, _) => {}
        }
    }
    // Of an entry with several records, one that is refused again keeps it there.
    taken.retain(|entry| !again.iter().any(|(refused, _)| refused == entry));
    store::quarantine(transaction, &refused).await?;
    store::refuse_again(transaction, &again).await?;
    store::mark_replayed(transaction, &taken).await
}
