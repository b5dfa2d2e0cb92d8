//! What the ledger has of a tenant.

use chrono::TimeDelta;

use super::{
    Usage,
    query::{check_range, check_year},
    store::{minutes, tallies, unavailable},
};
use crate::{
    api::{
        Call, Handle,
        usage::{GetMetadata, Metadata},
    },
    error::Result,
};

/// Minutes of one answer.
const MOST_MINUTES: i64 = 10_000;

impl Handle<GetMetadata> for Usage {
    async fn handle(&self, call: Call<GetMetadata>) -> Result<Metadata> {
        let tenant = call.target.as_str();
        // The minute that has begun is told too.
        let to = call.request.to.unwrap_or_else(|| self.clock.now() + TimeDelta::minutes(1));
        check_year("to", to)?;
        let from = call.request.from.unwrap_or_else(|| to.checked_sub_signed(TimeDelta::minutes(61)).unwrap_or(to));
        check_range("from", "to", Some(from), Some(to))?;
        let tallies = tallies(&self.database, tenant).await.map_err(unavailable)?;
        let reconciliation = minutes(&self.database, tenant, from, to, MOST_MINUTES).await.map_err(unavailable)?;
        Ok(Metadata {
            earliest_event: tallies.values().map(|tally| tally.earliest).min(),
            latest_event: tallies.values().map(|tally| tally.latest).max(),
            total_records: tallies.values().map(|tally| tally.records).sum(),
            sources: tallies.iter().map(|(source, tally)| (source.clone(), tally.records)).collect(),
            watermarks: tallies.iter().map(|(source, tally)| (source.clone(), tally.latest)).collect(),
            storage_health: self.backlog.health(),
            reconciliation,
        })
    }
}
