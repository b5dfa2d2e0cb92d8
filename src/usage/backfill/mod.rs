//! Backfills: what the ledger has of one type in a range of time is archived and replaced, all of it or nothing.
//!
//! 1. *Begun.* The range is marked as worked on, with a lease; from then on nobody else corrects it, and in blocking mode
//!    nothing is written into it ([`begin`]).
//! 2. *Received.* Replacement records are checked and kept aside ([`receive`]).
//! 3. *Written.* One transaction archives, writes, and mends heads, tallies and the feed ([`write`]).
//! 4. *Ended.* The range is open again; what waited for it is written by its shard's sink. Whoever dies on the way loses the
//!    lease, and another instance ends it: as failed if nothing was written, as completed if it was ([`lease`]).

mod begin;
mod lease;
mod receive;
mod revert;
mod write;

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    Usage,
    store::{
        backfills::{self, Operation},
        unavailable,
    },
};
use crate::{
    api::{
        Call, Handle, Name,
        usage::{Backfill, CancelBackfill, CommitBackfill, GetBackfill, GetInvoiced, Invoiced, MarkInvoiced},
    },
    error::{Code, Error, Result},
    usage::{audit::Change, record::check_speaks_for_all},
};

impl Handle<GetBackfill> for Usage {
    async fn handle(&self, call: Call<GetBackfill>) -> Result<Backfill> {
        self.backfill(&call.target, call.request.id).await
    }
}

impl Handle<CommitBackfill> for Usage {
    async fn handle(&self, call: Call<CommitBackfill>) -> Result<Backfill> {
        check_speaks_for_all(&call.context)?;
        let operation = self.operation(&call.target, call.request.id).await?;
        self.carry_out(&call.target, operation).await
    }
}

impl Handle<CancelBackfill> for Usage {
    async fn handle(&self, call: Call<CancelBackfill>) -> Result<Backfill> {
        let (tenant, id) = (&call.target, call.request.id);
        check_speaks_for_all(&call.context)?;
        // Of another tenant's, nothing is ended.
        self.operation(tenant, id).await?;
        let canceled = self.give_up_pending(id, &Error::new(Code::BackfillConflict, "it was canceled")).await?;
        let operation = self.operation(tenant, id).await?;
        if canceled { operation.shown() } else { Err(not_pending(&operation)) }
    }
}

impl Handle<GetInvoiced> for Usage {
    async fn handle(&self, call: Call<GetInvoiced>) -> Result<Invoiced> {
        let mut connection = self.database.acquire().await.map_err(unavailable)?;
        let until = backfills::invoiced_until(&mut connection, call.target.as_str()).await.map_err(unavailable)?;
        Ok(Invoiced { tenant_id: call.target.to_string(), until })
    }
}

impl Handle<MarkInvoiced> for Usage {
    async fn handle(&self, call: Call<MarkInvoiced>) -> Result<Invoiced> {
        let (tenant, until) = (&call.target, call.request.until);
        super::query::check_year("until", until)?;
        let change = Change { operation: "invoiced-set", tenant: Some(tenant), details: json!({ "until": until }) };
        let mark = async {
            let mut connection = self.database.acquire().await.map_err(unavailable)?;
            backfills::set_invoiced_until(&mut connection, tenant.as_str(), until).await.map_err(unavailable)
        };
        self.audited(change, &call.context, mark).await?;
        Ok(Invoiced { tenant_id: tenant.to_string(), until: Some(until) })
    }
}

impl Usage {
    async fn operation(&self, tenant: &Name, id: Uuid) -> Result<Operation> {
        let mut connection = self.database.acquire().await.map_err(unavailable)?;
        find(&mut connection, tenant.as_str(), id).await
    }

    async fn backfill(&self, tenant: &Name, id: Uuid) -> Result<Backfill> {
        self.operation(tenant, id).await?.shown()
    }
}

async fn find(connection: &mut PgConnection, tenant: &str, id: Uuid) -> Result<Operation> {
    let found = backfills::operation(connection, tenant, id).await.map_err(unavailable)?;
    found.ok_or_else(|| Error::new(Code::NotFound, format!("no backfill has the id {id}")))
}

fn not_pending(operation: &Operation) -> Error {
    let message = format!("the backfill is {}", operation.status);
    Error::new(Code::BackfillConflict, message).details(json!({ "status": operation.status }))
}
