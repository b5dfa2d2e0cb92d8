//! Looking at what was refused, and sending it again.

use std::collections::BTreeMap;

use async_nats::HeaderMap;
use futures::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{
    Usage,
    audit::Change,
    record::check_name,
    store::{self, unavailable},
    verdicts::Verdict,
};
use crate::{
    api::{
        Call, Handle, Name,
        usage::{
            LISTED, ListQuarantine, MOST_LISTED, MOST_RECORDS, Quarantine, Quarantined, Reason, Rejection, Replay,
            ReplayQuarantine, Replayed,
        },
    },
    error::{Code, Error, Result},
};

/// The header of a message that asks for entries of quarantine instead of bringing records. It grants nothing: entries
/// are looked for among those of the message's own tenant and source.
pub const REPLAY_HEADER: &str = "Tidemark-Replay";

/// An entry that is asked for, and its place in the request.
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry {
    pub id: Uuid,
    pub index: usize,
}

/// Entries, and bytes of them, that one message asks for.
pub const MOST_ENTRIES: usize = 100;
pub const MOST_BYTES: usize = 4 << 20;

/// Messages of one replay that are under way at once.
const AT_ONCE: usize = 8;

impl Handle<ListQuarantine> for Usage {
    async fn handle(&self, call: Call<ListQuarantine>) -> Result<Quarantine> {
        let filter = call.request;
        let limit = filter.limit.unwrap_or(LISTED);
        if !(1..=MOST_LISTED).contains(&limit) {
            let problem = format_args!("must lie between 1 and {MOST_LISTED}");
            return Err(Error::field_as(Code::ValidationError, "limit", problem));
        }
        let before = filter.cursor.as_deref().map(str::parse::<Uuid>).transpose();
        let before = before.map_err(|_| Error::field_as(Code::ValidationError, "cursor", "is none of ours"))?;
        check_name("source_id", filter.source_id.as_ref())?;
        check_name("code", filter.code.as_ref())?;
        let (source, code) = (filter.source_id.as_deref(), filter.code.as_deref());
        let tenant = call.target.as_str();
        let found =
            store::quarantined(&self.database, tenant, source, code, filter.include_replayed, before, limit + 1);
        let mut found = found.await.map_err(unavailable)?;
        let is_more = found.len() as i64 > limit;
        found.truncate(limit as usize);
        let next_cursor = found.last().filter(|_| is_more).map(|last| last.id.to_string());
        Ok(Quarantine { records: found.into_iter().map(show).collect(), next_cursor })
    }
}

fn show(entry: store::Reviewed) -> Quarantined {
    let code = Code::ALL.iter().copied().find(|code| code.as_str() == entry.code).unwrap_or(Code::Internal);
    let details = entry.details.and_then(|details| serde_json::from_str(&details).ok());
    let record = serde_json::from_slice(&entry.payload)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&entry.payload).into_owned()));
    Quarantined {
        id: entry.id,
        source_id: entry.source_id,
        received_at: entry.received_at,
        idempotency_key: entry.idempotency_key,
        reason: Reason { code, message: entry.message.into(), details },
        record,
        replayed_at: entry.replayed_at,
    }
}

impl Handle<ReplayQuarantine> for Usage {
    async fn handle(&self, call: Call<ReplayQuarantine>) -> Result<Replayed> {
        let (tenant, Replay { ids }) = (&call.target, &call.request);
        if !(1..=MOST_RECORDS).contains(&ids.len()) {
            let problem = format_args!("must have 1 to {MOST_RECORDS}");
            return Err(Error::field_as(Code::ValidationError, "ids", problem));
        }
        let waiting = store::waiting_sizes(&self.database, tenant.as_str(), ids).await.map_err(unavailable)?;
        let mut answer = Replayed { accepted: 0, duplicates: 0, rejected: Vec::new(), buffered: 0 };
        for (index, id) in ids.iter().enumerate().filter(|(_, id)| waiting.iter().all(|entry| entry.id != **id)) {
            let error = Error::new(Code::NotFound, format!("nothing in quarantine has the id {id}"));
            answer.rejected.push(Rejection { index, idempotency_key: None, reason: error.into() });
        }
        let replay = async {
            let requests =
                messages(&waiting, ids).into_iter().map(|(source, entries)| self.replay(tenant, source, entries));
            let verdicts: Vec<Replayed> = stream::iter(requests).buffer_unordered(AT_ONCE).collect().await;
            verdicts.into_iter().for_each(|verdict| answer.add(verdict));
            Ok(())
        };
        let change = Change { operation: "quarantine-replay", tenant: Some(tenant), details: json!({ "ids": ids }) };
        self.audited(change, &call.context, replay).await?;
        answer.rejected.sort_by_key(|rejection| rejection.index);
        // One that fails alone has an error of its own.
        match (ids.len(), answer.accepted + answer.duplicates + answer.buffered, answer.rejected.pop()) {
            (1, 0, Some(rejection)) => Err(rejection.reason.into()),
            (.., last) => {
                answer.rejected.extend(last);
                Ok(answer)
            }
        }
    }
}

/// Entries by source, as many together as one message may ask for.
fn messages(waiting: &[store::Size], ids: &[Uuid]) -> Vec<(String, Vec<Entry>)> {
    let mut by_source: BTreeMap<&str, Vec<Vec<Entry>>> = BTreeMap::new();
    let mut bytes = BTreeMap::new();
    for store::Size { id, source_id, bytes: size } in waiting {
        let messages = by_source.entry(source_id).or_default();
        let (total, size) = (bytes.entry(source_id).or_insert(0), size.unsigned_abs() as usize);
        *total += size;
        if messages.last().is_none_or(|entries| entries.len() == MOST_ENTRIES || *total > MOST_BYTES) {
            messages.push(Vec::new());
            *total = size;
        }
        let index = ids.iter().position(|one| one == id).unwrap_or_default();
        messages.last_mut().expect("just made").push(Entry { id: *id, index });
    }
    let named = |source: &str, entries| (source.to_owned(), entries);
    by_source
        .into_iter()
        .flat_map(|(source, messages)| messages.into_iter().map(move |one| named(source, one)))
        .collect()
}

impl Replayed {
    fn add(&mut self, other: Self) {
        self.accepted += other.accepted;
        self.duplicates += other.duplicates;
        self.buffered += other.buffered;
        self.rejected.extend(other.rejected);
    }
}

impl Usage {
    /// Asks a sink for entries of one source. What can't be asked for is rejected.
    async fn replay(&self, tenant: &Name, source: String, entries: Vec<Entry>) -> Replayed {
        let sent = async {
            // What came under a strange name can't be sent again under it.
            let source: Name = source.parse()?;
            let payload = serde_json::to_vec(&entries).map_err(Error::internal)?;
            let mut headers = HeaderMap::new();
            headers.insert(REPLAY_HEADER, "true");
            self.send(tenant, &source, payload.into(), headers, false).await.map_err(|(error, _)| error)
        };
        match sent.await {
            Ok(Some(Verdict { accepted, duplicates, rejected })) => {
                Replayed { accepted, duplicates, rejected, buffered: 0 }
            }
            Ok(None) => Replayed { accepted: 0, duplicates: 0, rejected: Vec::new(), buffered: entries.len() },
            Err(error) => {
                let reject = |entry: &Entry| Rejection {
                    index: entry.index,
                    idempotency_key: None,
                    reason: error.share().into(),
                };
                Replayed { accepted: 0, duplicates: 0, rejected: entries.iter().map(reject).collect(), buffered: 0 }
            }
        }
    }
}
