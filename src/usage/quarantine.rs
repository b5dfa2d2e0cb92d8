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
        let waiting = store::waiting(&self.database, tenant.as_str(), ids).await.map_err(unavailable)?;
        let mut by_source: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
        let mut answer = Replayed { accepted: 0, duplicates: 0, rejected: Vec::new(), buffered: 0 };
        for (index, id) in ids.iter().enumerate() {
            let first = ids.iter().position(|one| one == id) == Some(index);
            match waiting.iter().find(|entry| entry.id == *id) {
                Some(entry) if first => {
                    by_source.entry(entry.source_id.clone()).or_default().push(Entry { id: *id, index });
                }
                Some(_) => {}
                None => answer.rejected.push(Rejection {
                    index,
                    idempotency_key: None,
                    reason: Error::new(Code::NotFound, format!("nothing in quarantine has the id {id}")).into(),
                }),
            }
        }
        let replay = self.replay(tenant, by_source, &mut answer);
        let change = Change { operation: "quarantine-replay", tenant: Some(tenant), details: json!({ "ids": ids }) };
        self.audited(change, &call.context, replay).await?;
        answer.rejected.sort_by_key(|rejection| rejection.index);
        match (ids.len(), answer.rejected.pop()) {
            (1, Some(rejection)) => Err(rejection.reason.into()),
            (_, last) => {
                answer.rejected.extend(last);
                Ok(answer)
            }
        }
    }
}

impl Usage {
    /// Asks the sinks for the entries, a message for each source.
    async fn replay(
        &self,
        tenant: &Name,
        by_source: BTreeMap<String, Vec<Entry>>,
        answer: &mut Replayed,
    ) -> Result<()> {
        let requests = by_source.into_iter().map(|(source, entries)| self.replay_source(tenant, source, entries));
        let mut sent = stream::iter(requests).buffer_unordered(AT_ONCE);
        while let Some(sent) = sent.next().await {
            match sent? {
                (_, Some(Verdict { accepted, duplicates, rejected })) => {
                    answer.accepted += accepted;
                    answer.duplicates += duplicates;
                    answer.rejected.extend(rejected);
                }
                (count, None) => answer.buffered += count,
            }
        }
        Ok(())
    }

    async fn replay_source(
        &self,
        tenant: &Name,
        source: String,
        entries: Vec<Entry>,
    ) -> Result<(usize, Option<Verdict>)> {
        // What came under a strange name can't be sent again under it.
        let source: Name = source.parse()?;
        let payload = serde_json::to_vec(&entries).map_err(Error::internal)?;
        let mut headers = HeaderMap::new();
        headers.insert(REPLAY_HEADER, "true");
        let sent = self.send_with(tenant, &source, payload.into(), headers, false).await;
        sent.map(|verdict| (entries.len(), verdict)).map_err(|(error, _)| error)
    }
}
