//! Submitting a backfill.

use std::collections::BTreeMap;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use rust_decimal::Decimal;
use serde_json::json;
use uuid::Uuid;

use crate::{
    api::{
        Call, Context, Handle, Name,
        usage::{
            BACKFILL_DAYS, BackfillAnswer, BackfillMode, BackfillPreview, BackfillRequest, MOST_EVENTS,
            ResourcePreview, SubmitBackfill, SubmitElevatedBackfill, TimeRange,
        },
    },
    error::{Code, Error, Result},
    usage::{
        Usage,
        correct::check_reason,
        query::check_range,
        record::{check_name, check_speaks_for_all, invalid_field},
        store::{
            backfills::{self, NewEvent, NewOperation},
            historical::Span,
            ranges::{BusyRange, NewRange, begin_range, in_the_way, ranges_of},
            unavailable,
        },
    },
};

/// A tenant's backfills at a time: every live record is compared with all of them.
const MOST_AT_ONCE: i64 = 10;

/// Resources of a preview.
const SHOWN: usize = 100;

impl Handle<SubmitBackfill> for Usage {
    async fn handle(&self, call: Call<SubmitBackfill>) -> Result<BackfillAnswer> {
        self.check_window("time_range.from", call.request.time_range.from)?;
        self.submit(&call.target, kept(call.request), &call.context).await
    }
}

impl Handle<SubmitElevatedBackfill> for Usage {
    async fn handle(&self, call: Call<SubmitElevatedBackfill>) -> Result<BackfillAnswer> {
        self.submit(&call.target, kept(call.request), &call.context).await
    }
}

/// As the database keeps times.
fn kept(mut request: BackfillRequest) -> BackfillRequest {
    let TimeRange { from, to } = request.time_range;
    request.time_range = TimeRange { from: from.trunc_subsecs(6), to: to.trunc_subsecs(6) };
    request
}

impl Usage {
    /// Whether a range may be worked on that begins so far back.
    pub(super) fn check_window(&self, field: &str, from: DateTime<Utc>) -> Result<()> {
        match from < self.clock.now() - TimeDelta::days(BACKFILL_DAYS) {
            true => {
                let problem = format_args!("lies more than {BACKFILL_DAYS} days back, which needs the role elevated");
                Err(Error::field_as(Code::BackfillWindowExceeded, field, problem))
            }
            false => Ok(()),
        }
    }

    async fn submit(
        &self,
        (tenant, source): &(Name, Name),
        request: BackfillRequest,
        context: &Context,
    ) -> Result<BackfillAnswer> {
        let request = &request;
        check_speaks_for_all(context)?;
        check_reason(&request.reason)?;
        check_name("usage_type", Some(&request.usage_type))?;
        check_range("time_range.from", "time_range.to", Some(request.time_range.from), Some(request.time_range.to))?;
        let limits = self.limits.of(tenant.as_str(), source.as_str());
        let of_type = self.known_type(&request.usage_type).await?;
        let tolerance = of_type.unit.future_tolerance.unwrap_or(limits.future_tolerance);
        let latest = self.clock.now() + TimeDelta::from_std(tolerance).unwrap_or(TimeDelta::days(36_500));
        if request.time_range.to > latest {
            return Err(invalid_field("time_range.to", "lies in the future"));
        }
        if request.replacement_events.len() > MOST_EVENTS {
            let problem = format_args!("has {}, more than {MOST_EVENTS}", request.replacement_events.len());
            return Err(invalid_field("replacement_events", problem));
        }
        if request.dry_run && request.staged {
            return Err(invalid_field("dry_run", "can't be had of one whose records are yet to come"));
        }
        let id = Uuid::now_v7();
        let range = (request.time_range.from, request.time_range.to);
        let (events, rejected) =
            self.read_events(id, (tenant, source), &of_type, range, &request.replacement_events)?;
        if let Some(first) = rejected.into_iter().next() {
            let (index, error) = (first.index, Error::from(first.reason));
            let message = format!("replacement_events[{index}]: {}", error.message);
            let mut details = error.details.unwrap_or_else(|| json!({}));
            if details.is_object() {
                details["index"] = json!(index);
            }
            return Err(Error::new(error.code, message).details(details));
        }
        self.admit_events(tenant, events.len().max(1))?;
        if request.dry_run {
            return Ok(BackfillAnswer::Preview(Box::new(self.preview(tenant, request, &events).await?)));
        }
        self.begin(id, tenant, request, context).await?;
        let begun = async {
            self.keep_events(id, &events).await?;
            match request.staged {
                true => self.backfill(tenant, id).await,
                false => self.carry_out(tenant, self.operation(tenant, id).await?).await,
            }
        };
        match begun.await {
            Ok(backfill) => Ok(BackfillAnswer::Operation(Box::new(backfill))),
            Err(error) => {
                // Nobody would know its id. One that is at work, or has ended, is left alone.
                self.give_up_pending(id, &error).await.ok();
                Err(error)
            }
        }
    }

    /// Marks the range as worked on.
    async fn begin(&self, id: Uuid, tenant: &Name, request: &BackfillRequest, context: &Context) -> Result<()> {
        let TimeRange { from, to } = request.time_range;
        let request_id = context.request_id();
        let operation = NewOperation {
            id,
            tenant: tenant.as_str(),
            usage_type: &request.usage_type,
            from,
            to,
            mode: request.mode,
            operator: context.actor(),
            request_id: request_id.as_deref(),
            reason: &request.reason,
        };
        let range = NewRange {
            operation_id: id,
            span: Span { tenant: tenant.as_str(), usage_type: &request.usage_type, from, to },
            blocking: request.mode == BackfillMode::Blocking,
            phase: "receiving",
        };
        let begun = async {
            let mut transaction = self.changing_ranges().await?;
            if ranges_of(&mut transaction, tenant.as_str()).await? >= MOST_AT_ONCE {
                return Ok(Err(too_many()));
            }
            backfills::create_operation(&mut transaction, &operation).await?;
            match begin_range(&mut transaction, &range, self.lease).await? {
                Some(other) => Ok(Err(overlap(&other))),
                None => transaction.commit().await.map(Ok),
            }
        };
        begun.await.map_err(unavailable)??;
        self.ranges.changed(&self.database).await;
        Ok(())
    }

    /// What would change.
    async fn preview(&self, tenant: &Name, request: &BackfillRequest, events: &[NewEvent]) -> Result<BackfillPreview> {
        let TimeRange { from, to } = request.time_range;
        let span = Span { tenant: tenant.as_str(), usage_type: &request.usage_type, from, to };
        // What moved comes back to be looked at, and nothing of it stays.
        let mut transaction = self.database.begin().await.map_err(unavailable)?;
        if let Some(other) = in_the_way(&mut transaction, &span).await.map_err(unavailable)? {
            return Err(overlap(&other));
        }
        self.historical.thaw_span(&mut transaction, &span).await?;
        let read = async {
            let there = backfills::active_in_range(&mut transaction, &span, SHOWN as i64, events).await?;
            let is_invoiced = backfills::is_invoiced(&mut transaction, tenant.as_str(), from).await?;
            transaction.rollback().await?;
            Ok((there, is_invoiced))
        };
        let ((events_archived, there), affects_invoiced_period) = read.await.map_err(unavailable)?;
        let mut resources: BTreeMap<(String, String), ResourcePreview> =
            there.into_iter().map(|one| ((one.source_id.clone(), one.resource_id.clone()), one)).collect();
        let mut added: BTreeMap<(String, String), (i64, Decimal)> = BTreeMap::new();
        for event in events {
            let key = (event.source.clone(), event.record.resource_id.clone());
            let (count, sum) = added.entry(key).or_default();
            *count += 1;
            *sum = sum.checked_add(event.record.value).unwrap_or(Decimal::MAX);
        }
        for ((source_id, resource_id), (count, sum)) in added {
            let one = resources.entry((source_id.clone(), resource_id.clone())).or_insert(ResourcePreview {
                source_id,
                resource_id,
                events_archived: 0,
                value_archived: "0".to_owned(),
                events_added: 0,
                value_added: "0".to_owned(),
            });
            (one.events_added, one.value_added) = (count, sum.normalize().to_string());
        }
        let mut resources: Vec<ResourcePreview> = resources.into_values().collect();
        resources.sort_by_key(|one| std::cmp::Reverse(one.events_archived + one.events_added));
        resources.truncate(SHOWN);
        Ok(BackfillPreview {
            dry_run: true,
            events_archived,
            events_added: events.len() as i64,
            affects_invoiced_period,
            resources,
        })
    }
}

fn too_many() -> Error {
    let message = format!("the tenant has {MOST_AT_ONCE} backfills at work: wait until one is done");
    Error::new(Code::RateLimited, message).retry_after(std::time::Duration::from_secs(1))
}

/// Another backfill is in the way.
pub fn overlap(other: &BusyRange) -> Error {
    let message = "time_range: another backfill works on a part of this range";
    Error::new(Code::BackfillRangeOverlap, message).details(json!({
        "field": "time_range",
        "backfill_id": other.operation_id,
        "retry_after_ms": retry_after(other.lease_until),
        "locked_range": { "from": other.range_start, "to": other.range_end },
    }))
}

fn retry_after(lease_until: DateTime<Utc>) -> i64 {
    (lease_until - Utc::now()).num_milliseconds().clamp(1000, 5000)
}
