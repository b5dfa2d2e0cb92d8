//! How long usage is kept: policies, and the end of what is older.
//!
//! What no policy keeps goes as whole partitions, in an instant; the rest in small batches. Live records are written
//! meanwhile.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::json;
use sqlx::PgPool;
use tokio::time::sleep;

use super::{
    Usage,
    audit::Change,
    record::check_name,
    store::{
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
    database::is_passing,
    error::{Code, Error, Result},
};

const ALL: &str = "*";

/// Rows of one batch, and how long others have the table to themselves afterwards.
const BATCH: i64 = 2000;
const PAUSE: Duration = Duration::from_millis(20);

/// How often a partition that is in use is tried.
const TRIES: u32 = 5;

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
    pub types: std::sync::Arc<Types>,
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
        let old = retention::old_partitions(&self.database, self.oldest(&kept)).await.map_err(unavailable)?;
        let retired = |partition: retention::Partition| RetiredPartition {
            name: partition.name,
            latest_event: partition.greatest_event,
            records: None,
        };
        let mut report =
            RetentionReport { done: false, partitions: old.into_iter().map(retired).collect(), records: Vec::new() };
        for Kept { tenant, usage_type, days, older_than } in kept {
            let counted = retention::count_older(&self.database, &tenant, &usage_type, older_than, COUNTED);
            let records = counted.await.map_err(unavailable)?;
            if records > 0 {
                let retired =
                    RetiredRecords { tenant_id: tenant, usage_type, retention_days: days, older_than, records };
                report.records.push(retired);
            }
        }
        Ok(report)
    }

    async fn drop(&self, partition: &str, older_than: DateTime<Utc>) -> Result<i64, sqlx::Error> {
        let mut tries = 0;
        loop {
            match retention::drop_partition(&self.database, partition, older_than).await {
                Err(error) if is_passing(&error) && tries < TRIES => tries += 1,
                ended => return ended,
            }
            sleep(PAUSE * 10).await;
        }
    }

    /// Lets go what no policy keeps. Any number of processes may do it.
    pub async fn apply(&self) -> Result<RetentionReport> {
        let kept = self.kept().await?;
        let oldest = self.oldest(&kept);
        let mut report = RetentionReport { done: true, partitions: Vec::new(), records: Vec::new() };
        for partition in retention::old_partitions(&self.database, oldest).await.map_err(unavailable)? {
            // One that is in use right now has another hour.
            match self.drop(&partition.name, oldest).await {
                Ok(records) => report.partitions.push(RetiredPartition {
                    name: partition.name,
                    latest_event: partition.greatest_event,
                    records: Some(records),
                }),
                Err(error) => tracing::warn!(%error, partition = partition.name, "usage: a partition was not dropped"),
            }
        }
        for Kept { tenant, usage_type, days, older_than } in kept {
            let mut records = 0;
            loop {
                let gone = retention::delete_older(&self.database, &tenant, &usage_type, older_than, BATCH);
                let gone = gone.await.map_err(unavailable)?;
                records += gone;
                if gone < BATCH {
                    break;
                }
                sleep(PAUSE).await;
            }
            let mended = retention::mend_tallies(&self.database, &tenant, &usage_type, older_than);
            mended.await.map_err(unavailable)?;
            if records > 0 {
                let retired =
                    RetiredRecords { tenant_id: tenant, usage_type, retention_days: days, older_than, records };
                report.records.push(retired);
            }
        }
        retention::forget_feed(&self.database, oldest).await.map_err(unavailable)?;
        Ok(report)
    }
}
