//! How long usage is kept: policies, and the end of what is older.
//!
//! What no policy keeps goes as whole partitions, in an instant; the rest in small batches. Live records are written
//! meanwhile.

use std::{collections::HashMap, sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::json;
use sqlx::PgPool;
use tokio::time::sleep;

use super::{
    Usage,
    audit::Change,
    detaching::{detach, drop_leftovers},
    historical::{Historical, There},
    record::check_name,
    store::{
        partitions::drop_detached,
        retention::{self, Policy},
        unavailable,
    },
    types::Types,
};
use crate::{
    api::{
        Call, Handle, Name,
        usage::{
            ApplyRetention, ChangeRetention, GetRetention, LEAST_RETENTION, MOST_RETENTION, ReportRetention, Retention,
            RetentionReport, RetiredPartition, RetiredRecords,
        },
    },
    clock::Clock,
    error::{Code, Error, Result},
};

const ALL: &str = "*";

/// Rows of one batch, and how long others have the table to themselves afterwards.
const BATCH: i64 = 2000;
const PAUSE: Duration = Duration::from_millis(20);

/// What a report counts.
const COUNTED: i64 = 100_000;

impl Handle<GetRetention> for Usage {
    async fn handle(&self, call: Call<GetRetention>) -> Result<Retention> {
        check_scope(&call.request.tenant, &call.request.usage_type)?;
        self.retention.effective(call.request.tenant, call.request.usage_type).await
    }
}

impl Handle<ChangeRetention> for Usage {
    async fn handle(&self, call: Call<ChangeRetention>) -> Result<Retention> {
        let (tenant, usage_type, days) = (&call.request.tenant, &call.request.usage_type, call.request.retention_days);
        check_scope(tenant, usage_type)?;
        if !(LEAST_RETENTION..=MOST_RETENTION).contains(&days) {
            let problem = format_args!("must lie between {LEAST_RETENTION} and {MOST_RETENTION}, is {days}");
            return Err(Error::field_as(Code::RetentionOutOfBounds, "retention_days", problem));
        }
        if usage_type != ALL {
            self.known_type(usage_type).await?;
        }
        let details = json!({ "tenant": tenant, "usage_type": usage_type, "retention_days": days });
        let change = Change { operation: "retention-set", tenant: None, details };
        let set =
            async { retention::set_policy(&self.database, tenant, usage_type, days as i32).await.map_err(unavailable) };
        self.audited(change, &call.context, set).await?;
        self.retention.effective(call.request.tenant, call.request.usage_type).await
    }
}

impl Handle<ReportRetention> for Usage {
    async fn handle(&self, _: Call<ReportRetention>) -> Result<RetentionReport> {
        self.retention.report().await
    }
}

impl Handle<ApplyRetention> for Usage {
    async fn handle(&self, call: Call<ApplyRetention>) -> Result<RetentionReport> {
        let change = Change { operation: "retention-run", tenant: None, details: json!({}) };
        self.audited(change, &call.context, self.retention.apply()).await
    }
}

/// A tenant and a type, or all of them.
fn check_scope(tenant: &str, usage_type: &str) -> Result<()> {
    if tenant != ALL {
        tenant.parse::<Name>().map_err(|error| error.about("tenant"))?;
    }
    check_name("usage_type", Some(&usage_type.to_owned()))
}

/// What is kept for how long, and what ends it.
pub struct Retainer {
    pub database: PgPool,
    pub historical: Arc<Historical>,
    pub types: Arc<Types>,
    pub clock: Clock,
    /// Where nothing was set.
    pub default_days: i64,
}

/// All policies.
struct Policies<'a> {
    set: HashMap<(String, String), Policy>,
    retainer: &'a Retainer,
}

impl Policies<'_> {
    fn own(&self, tenant: &str, usage_type: &str) -> Option<&Policy> {
        self.set.get(&(tenant.to_owned(), usage_type.to_owned()))
    }

    /// Type over tenant over global.
    fn days(&self, tenant: &str, usage_type: &str) -> i64 {
        let set = |tenant: &str, usage_type: &str| self.own(tenant, usage_type).map(|policy| i64::from(policy.days));
        let of_unit = || self.retainer.types.known(usage_type).ok()??.unit.retention_days;
        set(tenant, usage_type)
            .or_else(|| set(ALL, usage_type))
            .or_else(of_unit)
            .or_else(|| set(tenant, ALL))
            .or_else(|| set(ALL, ALL))
            .unwrap_or(self.retainer.default_days)
    }
}

/// A tenant's type, and until when it is kept.
struct Kept {
    tenant: String,
    usage_type: String,
    days: i64,
    older_than: DateTime<Utc>,
}

impl Kept {
    /// What a report says of it.
    fn retired(self, records: i64) -> Option<RetiredRecords> {
        let Self { tenant: tenant_id, usage_type, days: retention_days, older_than } = self;
        (records > 0).then_some(RetiredRecords { tenant_id, usage_type, retention_days, older_than, records })
    }
}

impl Retainer {
    async fn policies(&self) -> Result<Policies<'_>> {
        let set = retention::policies(&self.database).await.map_err(unavailable)?;
        let set =
            set.into_iter().map(|policy| ((policy.tenant_id.clone(), policy.usage_type.clone()), policy)).collect();
        Ok(Policies { set, retainer: self })
    }

    /// What holds for a tenant and a type, and what was set for exactly these.
    async fn effective(&self, tenant: String, usage_type: String) -> Result<Retention> {
        let policies = self.policies().await?;
        let own = policies.own(&tenant, &usage_type);
        Ok(Retention {
            retention_days: policies.days(&tenant, &usage_type),
            set: own.map(|policy| policy.days.into()),
            updated_at: own.map(|policy| policy.updated_at),
            tenant_id: tenant,
            usage_type,
        })
    }

    async fn kept(&self) -> Result<Vec<Kept>> {
        let (policies, now) = (self.policies().await?, self.clock.now());
        let all = retention::tenants_and_types(&self.database).await.map_err(unavailable)?;
        let kept = |(tenant, usage_type): (String, String)| {
            let days = policies.days(&tenant, &usage_type);
            Kept { older_than: now - TimeDelta::days(days), tenant, usage_type, days }
        };
        Ok(all.into_iter().map(kept).collect())
    }

    /// What every policy lets go.
    fn oldest(&self, kept: &[Kept]) -> DateTime<Utc> {
        let most = kept.iter().map(|kept| kept.days).max().unwrap_or(self.default_days);
        self.clock.now() - TimeDelta::days(most)
    }

    /// What would go now.
    async fn report(&self) -> Result<RetentionReport> {
        let kept = self.kept().await?;
        let oldest = self.oldest(&kept);
        let there = self.historical.there().await?;
        let mut report =
            RetentionReport { done: false, moved: Vec::new(), partitions: Vec::new(), records: Vec::new() };
        for week in self.historical.movable().await? {
            report.moved.push(RetiredPartition::new(week.name, false, Some(week.greatest_event), None));
        }
        for partition in retention::old_partitions(&self.database, oldest).await.map_err(unavailable)? {
            report.partitions.push(RetiredPartition::new(partition.name, false, partition.greatest_event, None));
        }
        if let Some(there) = &there {
            for week in there.old_weeks(oldest).await? {
                report.partitions.push(RetiredPartition::new(week.name, true, week.greatest_event, None));
            }
        }
        for kept in kept {
            let Kept { tenant, usage_type, older_than, .. } = &kept;
            let here = retention::count_older(&self.database, tenant, usage_type, *older_than, COUNTED);
            let mut records = here.await.map_err(unavailable)?;
            if let Some(there) = &there {
                records += there.count_older(tenant, usage_type, *older_than, COUNTED - records).await?;
            }
            report.records.extend(kept.retired(records));
        }
        Ok(report)
    }

    /// Moves what is old and quiet, and lets go what no policy keeps. Any number of processes may try; one does it.
    pub async fn apply(&self) -> Result<RetentionReport> {
        // Held as long as the connection, which goes to nobody else.
        let mut turn = self.database.acquire().await.map_err(unavailable)?.detach();
        if !retention::take_turn(&mut turn).await.map_err(unavailable)? {
            return Err(Error::new(Code::Conflict, "retention is being applied already, by this process or another"));
        }
        drop_leftovers(&self.database).await.map_err(unavailable)?;
        let mut report = RetentionReport { done: true, moved: Vec::new(), partitions: Vec::new(), records: Vec::new() };
        // Whatever is wrong with the historical database, what is here is kept no longer than it should be.
        let moved = self.historical.move_weeks().await;
        for (week, records) in moved.iter().flatten() {
            let week = RetiredPartition::new(week.name.clone(), false, Some(week.greatest_event), Some(*records));
            report.moved.push(week);
        }
        let kept = self.kept().await?;
        let oldest = self.oldest(&kept);
        self.drop_partitions(oldest, &mut report).await?;
        // What came back from there must not be seen there again as it was: so there first.
        let there = self.historical.there().await;
        let retained = match &there {
            Ok(Some(there)) => self.drop_weeks(there, oldest, &mut report).await,
            _ => Ok(()),
        };
        for kept in kept {
            let records = self.delete_older(there.as_ref(), &kept).await?;
            if let Ok(there) = &there {
                self.mend_tallies(there.as_ref(), &kept).await?;
            }
            report.records.extend(kept.retired(records));
        }
        retention::forget_feed(&self.database, oldest).await.map_err(unavailable)?;
        moved.map(drop).and(retained).and(there.map(drop))?;
        Ok(report)
    }

    /// Whole weeks of the historical database.
    async fn drop_weeks(&self, there: &There<'_>, oldest: DateTime<Utc>, report: &mut RetentionReport) -> Result<()> {
        there.align().await?;
        for week in there.old_weeks(oldest).await? {
            if let Some(records) = there.drop_week(&week.name).await? {
                report.partitions.push(RetiredPartition::new(week.name, true, week.greatest_event, Some(records)));
            }
        }
        there.settle().await
    }

    async fn drop_partitions(&self, oldest: DateTime<Utc>, report: &mut RetentionReport) -> Result<()> {
        for partition in retention::old_partitions(&self.database, oldest).await.map_err(unavailable)? {
            let dropped = async {
                match detach(&self.database, &partition.name, oldest, None).await? {
                    true => drop_detached(&self.database, &partition.name).await,
                    false => Ok(None),
                }
            };
            match dropped.await {
                Ok(None) => {}
                Ok(records) => {
                    let dropped = RetiredPartition::new(partition.name, false, partition.greatest_event, records);
                    report.partitions.push(dropped);
                }
                // One that is in use right now has another hour.
                Err(error) => tracing::warn!(%error, partition = partition.name, "usage: a partition was not dropped"),
            }
        }
        Ok(())
    }

    /// In small batches, until nothing is left. How many records went.
    async fn delete_older(&self, there: Result<&Option<There<'_>>, &Error>, kept: &Kept) -> Result<i64> {
        let Kept { tenant, usage_type, older_than, .. } = kept;
        let mut records = 0;
        let (there, is_known) = (there.ok().and_then(Option::as_ref), there.is_ok());
        for place in there.map(Some).into_iter().chain([None]) {
            loop {
                let gone = match place {
                    Some(there) => there.delete_older(tenant, usage_type, *older_than, BATCH).await?,
                    None => {
                        let database = &self.database;
                        let gone = retention::delete_older(database, tenant, usage_type, *older_than, is_known, BATCH);
                        gone.await.map_err(unavailable)?
                    }
                };
                records += gone;
                if gone < BATCH {
                    break;
                }
                sleep(PAUSE).await;
            }
            if let Some(there) = place.filter(|_| records > 0) {
                there.settle().await?;
            }
        }
        Ok(records)
    }

    async fn mend_tallies(&self, there: Option<&There<'_>>, kept: &Kept) -> Result<()> {
        let Kept { tenant, usage_type, older_than, .. } = kept;
        let bereft = retention::bereft_sources(&self.database, tenant, usage_type, *older_than);
        let bereft = bereft.await.map_err(unavailable)?;
        let elsewhere = match there {
            Some(there) if !bereft.is_empty() => there.earliest(tenant, usage_type, &bereft).await?,
            _ => HashMap::new(),
        };
        let mend = retention::mend_tallies(&self.database, tenant, usage_type, &bereft, &elsewhere);
        mend.await.map_err(unavailable)
    }
}
