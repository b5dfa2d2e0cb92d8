//! Looking at single records, and correcting them.

use rust_decimal::Decimal;
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    Usage, feed,
    identity::{self, Origin},
    ranges,
    record::{self, check_name, invalid, invalid_field},
    rules,
    store::{
        self, Entry, Lane, NewChange, Next, Row, Tally,
        moved::note_written,
        ranges::{BusyRange, busy_ranges, hold_ranges},
        unavailable,
    },
};
use crate::{
    api::{
        Call, Context, Handle, Json, Name,
        usage::{
            AmendRecord, Amendment, DeprecateRecord, GetHistory, GetRecord, History, LedgerRecord, MetricKind, Status,
        },
    },
    error::{Code, Error, Result},
};

/// Characters of a reason.
const MOST_REASON: usize = 1000;

impl Handle<GetRecord> for Usage {
    async fn handle(&self, call: Call<GetRecord>) -> Result<LedgerRecord> {
        let (tenant, id) = (&call.target, call.request.id);
        last(shown(id, self.historical.versions(&self.reading, tenant.as_str(), id).await?)?)
    }
}

impl Handle<GetHistory> for Usage {
    async fn handle(&self, call: Call<GetHistory>) -> Result<History> {
        let (tenant, id) = (&call.target, call.request.id);
        let versions = shown(id, self.historical.versions(&self.reading, tenant.as_str(), id).await?)?;
        let mut connection = self.reading.acquire().await.map_err(unavailable)?;
        let changes = store::changes(&mut connection, id).await.map_err(unavailable)?;
        Ok(History { versions, changes })
    }
}

impl Handle<AmendRecord> for Usage {
    async fn handle(&self, call: Call<AmendRecord>) -> Result<LedgerRecord> {
        let (tenant, amendment, context) = (&call.target, &call.request, &call.context);
        check_reason(&amendment.reason)?;
        check_amendment(amendment, context)?;
        let mut transaction = self.database.begin().await.map_err(unavailable)?;
        let current = self.hold(&mut transaction, tenant, amendment.id, amendment.revision, context).await?;
        let next = amended(&current, amendment)?;
        self.check_schema(&next, amendment.value.as_ref()).await?;
        let value = record::value(&json!(next.value))?;
        let metadata = next.metadata.as_ref().map(metadata).transpose()?;
        let next = Next {
            value,
            user_id: next.user_id.as_deref(),
            resource_type: next.resource_type.as_deref(),
            metadata: metadata.as_deref(),
        };
        let series = series(&current);
        check_counter(&mut transaction, &current, value, series).await?;
        let (id, revision) = (current.id, current.revision);
        store::deprecate(&mut transaction, id, revision).await.map_err(unavailable)?;
        store::revise(&mut transaction, id, revision, &next).await.map_err(unavailable)?;
        let change = Correction { action: "amended", reason: &amendment.reason, revisions: &[revision, revision + 1] };
        self.correct(&mut transaction, &current, series, change, context).await?;
        let amended = latest(&mut transaction, tenant, id).await?;
        transaction.commit().await.map_err(unavailable)?;
        feed::tell(&self.events, tenant.as_str()).await;
        Ok(amended)
    }
}

impl Handle<DeprecateRecord> for Usage {
    async fn handle(&self, call: Call<DeprecateRecord>) -> Result<LedgerRecord> {
        let (tenant, request, context) = (&call.target, &call.request, &call.context);
        check_reason(&request.reason)?;
        let mut transaction = self.database.begin().await.map_err(unavailable)?;
        let current = self.hold(&mut transaction, tenant, request.id, request.revision, context).await?;
        let series = series(&current);
        if let Some(series) = series {
            store::heads(&mut transaction, &[series]).await.map_err(unavailable)?;
        }
        store::deprecate(&mut transaction, current.id, current.revision).await.map_err(unavailable)?;
        let change = Correction { action: "deprecated", reason: &request.reason, revisions: &[current.revision] };
        self.correct(&mut transaction, &current, series, change, context).await?;
        let deprecated = latest(&mut transaction, tenant, current.id).await?;
        transaction.commit().await.map_err(unavailable)?;
        feed::tell(&self.events, tenant.as_str()).await;
        Ok(deprecated)
    }
}

/// What is done to a record.
struct Correction<'a> {
    action: &'static str,
    reason: &'a str,
    /// Those that are another now. The last is the one that the change is about.
    revisions: &'a [i32],
}

impl Usage {
    /// What goes with every correction: heads, who and why, tallies and the feed. In the same order as everyone.
    async fn correct(
        &self,
        transaction: &mut PgConnection,
        current: &LedgerRecord,
        series: Option<Uuid>,
        correction: Correction<'_>,
        context: &Context,
    ) -> Result<()> {
        let corrected = async {
            note_written(transaction, current.id).await?;
            store::mend_heads(transaction, series.as_slice()).await?;
            let request_id = context.request_id();
            let change = NewChange {
                id: current.id,
                revision: correction.revisions.last().copied().unwrap_or(current.revision),
                action: correction.action,
                reason: correction.reason,
                actor: context.actor(),
                request_id: request_id.as_deref(),
            };
            store::note_change(transaction, &change).await?;
            let more = correction.revisions.len() as i64 - 1;
            if more > 0 {
                let key = (current.tenant_id.as_str(), current.source_id.as_str(), current.usage_type.as_str());
                let tally = Tally { records: more, ..Tally::one(current.event_timestamp) };
                store::add_tallies(transaction, &[(key, tally)].into()).await?;
            }
            let entry = |revision: &i32| Entry { tenant: &current.tenant_id, id: current.id, revision: *revision };
            let entries: Vec<Entry<'_>> = correction.revisions.iter().map(entry).collect();
            store::append_feed(transaction, Lane::Corrections, self.clock.now(), &entries).await
        };
        corrected.await.map_err(unavailable)
    }

    /// Whether what the record would be now is as its unit wants it. A value may be a number or text there.
    async fn check_schema(&self, next: &LedgerRecord, value: Option<&Value>) -> Result<()> {
        let Some(of_type) = self.types.known(&next.usage_type)? else { return Ok(()) };
        let as_sent = |value: Value| {
            let mut sent = json!({
                "usage_type": next.usage_type, "resource_id": next.resource_id, "value": value,
                "event_timestamp": next.event_timestamp, "idempotency_key": next.idempotency_key,
            });
            let optional = [
                ("user_id", json!(next.user_id)),
                ("resource_type", json!(next.resource_type)),
                ("lineage", json!(next.lineage)),
                ("metadata", json!(next.metadata)),
            ];
            for (member, value) in optional.into_iter().filter(|(_, value)| !value.is_null()) {
                sent[member] = value;
            }
            sent
        };
        match value {
            Some(value) => rules::check_schema(&of_type, &as_sent(value.clone())),
            // How it was sent first is not known any more.
            None => {
                let number = serde_json::from_str(&next.value).unwrap_or(Value::Null);
                rules::check_schema(&of_type, &as_sent(number))
                    .or_else(|_| rules::check_schema(&of_type, &as_sent(json!(next.value))))
            }
        }
    }
}

impl Usage {
    /// The record that is to be changed, which nobody else changes meanwhile.
    async fn hold(
        &self,
        transaction: &mut PgConnection,
        tenant: &Name,
        id: Uuid,
        revision: Option<i32>,
        context: &Context,
    ) -> Result<LedgerRecord> {
        store::hold_record(transaction, id).await.map_err(unavailable)?;
        // Before anything that writers wait for.
        self.historical.thaw_record(transaction, tenant.as_str(), id).await?;
        hold_ranges(transaction).await.map_err(unavailable)?;
        let current = latest(transaction, tenant, id).await?;
        if context.user.is_some() && context.user.as_deref() != current.user_id.as_deref() {
            return Err(record::foreign_user());
        }
        let busy = busy_ranges(transaction).await.map_err(unavailable)?;
        let covers =
            |range: &&BusyRange| range.covers(&current.tenant_id, &current.usage_type, current.event_timestamp);
        if let Some(range) = busy.iter().find(covers) {
            return Err(ranges::closed(range));
        }
        if let Some(meant) = revision
            && meant != current.revision
        {
            let message = format!("revision: {meant} is not the record's latest, which is {}", current.revision);
            let details = json!({ "field": "revision", "revision": current.revision });
            return Err(Error::new(Code::Conflict, message).details(details));
        }
        if current.status != Status::Active {
            let message = format!("the record is {}", current.status.as_str());
            return Err(Error::new(Code::Conflict, message).details(json!({ "status": current.status })));
        }
        Ok(current)
    }
}

/// All revisions of a record, or that there is none.
fn shown(id: Uuid, versions: Vec<Row>) -> Result<Vec<LedgerRecord>> {
    match versions.is_empty() {
        true => Err(Error::new(Code::NotFound, format!("no record has the id {id}"))),
        false => Ok(versions.into_iter().map(|row| row.record).collect()),
    }
}

fn last(versions: Vec<LedgerRecord>) -> Result<LedgerRecord> {
    versions.into_iter().next_back().ok_or_else(|| Error::internal("a record without a revision"))
}

/// A record that is in the operational database, as it is.
async fn latest(connection: &mut PgConnection, tenant: &Name, id: Uuid) -> Result<LedgerRecord> {
    last(shown(id, store::versions(connection, tenant.as_str(), id).await.map_err(unavailable)?)?)
}

fn series(record: &LedgerRecord) -> Option<Uuid> {
    let origin = Origin { tenant: &record.tenant_id, source: &record.source_id };
    (record.metric_kind == MetricKind::Counter)
        .then(|| identity::series(origin, &record.usage_type, &record.resource_id))
}

pub fn check_reason(reason: &str) -> Result<()> {
    if !(1..=MOST_REASON).contains(&reason.trim().chars().count()) {
        return Err(invalid_field("reason", format_args!("must have 1 to {MOST_REASON} characters")));
    }
    match reason.contains('\0') {
        true => Err(invalid_field("reason", "must not contain NUL")),
        false => Ok(()),
    }
}

fn check_amendment(amendment: &Amendment, context: &Context) -> Result<()> {
    let Amendment { value, metadata, resource_type, user_id, .. } = amendment;
    if value.is_none() && metadata.is_none() && resource_type.is_none() && user_id.is_none() {
        return Err(invalid("nothing is to be changed: give a value, metadata, resource_type or user_id"));
    }
    check_name("resource_type", resource_type.as_ref().and_then(Option::as_ref))?;
    let user = user_id.as_ref().and_then(Option::as_ref);
    check_name("user_id", user)?;
    match (&context.user, user_id) {
        (Some(own), Some(_)) if user.is_none_or(|user| **user != **own) => Err(record::foreign_user()),
        _ => Ok(()),
    }
}

/// The record as it is to be.
fn amended(current: &LedgerRecord, amendment: &Amendment) -> Result<LedgerRecord> {
    let mut next = current.clone();
    if let Some(value) = &amendment.value {
        next.value = record::value(value)?.to_string();
    }
    if let Some(metadata) = &amendment.metadata {
        next.metadata = metadata.as_ref().map(Json::from);
    }
    if let Some(resource_type) = &amendment.resource_type {
        next.resource_type.clone_from(resource_type);
    }
    if let Some(user_id) = &amendment.user_id {
        next.user_id.clone_from(user_id);
    }
    Ok(next)
}

fn metadata(json: &Json) -> Result<String> {
    record::metadata(&json.parse().map_err(Error::internal)?)
}

/// A reading lies between its neighbours, also one that is amended. The series is held from here on.
async fn check_counter(
    transaction: &mut PgConnection,
    current: &LedgerRecord,
    value: Decimal,
    series: Option<Uuid>,
) -> Result<()> {
    let Some(series) = series else { return Ok(()) };
    rules::check_reading(value)?;
    store::heads(transaction, &[series]).await.map_err(unavailable)?;
    let moment = (series, current.event_timestamp);
    let around = store::neighbours(transaction, &[moment]).await.map_err(unavailable)?;
    match around.get(&moment).copied().unwrap_or_default().violation(value) {
        Some(violation) => Err(violation),
        None => Ok(()),
    }
}
