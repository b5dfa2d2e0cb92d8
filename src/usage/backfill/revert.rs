//! Taking a backfill back.

use serde_json::json;
use tokio::time::timeout;

use super::begin::overlap;
use crate::{
    api::{
        Call, Context, Handle, Name,
        usage::{Backfill, RevertBackfill, RevertElevatedBackfill},
    },
    error::{Code, Error, Result},
    usage::{
        Usage,
        correct::check_reason,
        feed,
        record::check_speaks_for_all,
        store::{
            backfills::{self, Operation},
            ranges::{NewRange, begin_range, keep_range},
            unavailable,
        },
    },
};

impl Handle<RevertBackfill> for Usage {
    async fn handle(&self, call: Call<RevertBackfill>) -> Result<Backfill> {
        let Call { target: tenant, request, context } = call;
        let operation = self.operation(&tenant, request.id).await?;
        self.check_window("id", operation.range_start)?;
        self.take_back(&tenant, operation, request.reason, context).await
    }
}

impl Handle<RevertElevatedBackfill> for Usage {
    async fn handle(&self, call: Call<RevertElevatedBackfill>) -> Result<Backfill> {
        let Call { target: tenant, request, context } = call;
        let operation = self.operation(&tenant, request.id).await?;
        self.take_back(&tenant, operation, request.reason, context).await
    }
}

fn reverted_before() -> Error {
    Error::new(Code::BackfillConflict, "the backfill was reverted before")
}

impl Usage {
    async fn take_back(
        &self,
        tenant: &Name,
        operation: Operation,
        reason: String,
        context: Context,
    ) -> Result<Backfill> {
        check_speaks_for_all(&context)?;
        check_reason(&reason)?;
        let id = operation.id;
        if operation.status != "completed" {
            let message = format!("the backfill is {}", operation.status);
            return Err(Error::new(Code::BackfillConflict, message).details(json!({ "status": operation.status })));
        }
        if operation.reverted_at.is_some() {
            return Err(reverted_before());
        }
        self.begin_revert(&operation).await?;
        let usage = self.me.upgrade().ok_or_else(|| Error::unavailable("we are stopping"))?;
        // Once begun it is ended, whether or not somebody waits for it.
        let done = self.tracker.spawn(async move {
            let reverted = usage.leased(id, usage.revert(&operation, &reason, &context)).await;
            let ended = usage.finish(id).await;
            feed::tell(&usage.events, &operation.tenant_id).await;
            let done = reverted.and(ended);
            if done.is_ok() {
                usage.tell_of_backfill(&operation).await;
            }
            done
        });
        if let Ok(done) = timeout(self.answer_within, done).await {
            done.map_err(Error::internal)??;
        }
        self.backfill(tenant, id).await
    }

    async fn begin_revert(&self, operation: &Operation) -> Result<()> {
        let range =
            NewRange { operation_id: operation.id, span: operation.span(), blocking: false, phase: "reverting" };
        let begun = async {
            let mut transaction = self.changing_ranges().await?;
            let overlap = begin_range(&mut transaction, &range, self.lease).await?;
            transaction.commit().await?;
            Ok(overlap)
        };
        match begun.await.map_err(unavailable)? {
            Some(other) => Err(overlap(&other)),
            None => Ok(()),
        }
    }

    async fn revert(&self, operation: &Operation, reason: &str, context: &Context) -> Result<()> {
        let _turn = self.backfills_at_once.acquire().await.map_err(Error::internal)?;
        let mut transaction = self.database.begin().await.map_err(unavailable)?;
        self.historical.thaw_span(&mut transaction, &operation.span()).await?;
        let (added, archived) = backfills::unchanged(&mut transaction, operation).await.map_err(unavailable)?;
        if (Some(added), Some(archived)) != (operation.events_added, operation.events_archived) {
            let message = "records of this backfill were corrected, replaced or dropped since";
            return Err(Error::new(Code::BackfillConflict, message));
        }
        let changed = backfills::swap_touched(&mut transaction, operation).await.map_err(unavailable)?;
        self.settle(&mut transaction, operation, &changed).await?;
        backfills::widen_changed(&mut transaction, &changed).await.map_err(unavailable)?;
        backfills::feed_touched(&mut transaction, operation).await.map_err(unavailable)?;
        let request_id = context.request_id();
        let noted =
            backfills::note_reverted(&mut transaction, operation.id, context.actor(), request_id.as_deref(), reason);
        if !noted.await.map_err(unavailable)? {
            return Err(reverted_before());
        }
        if !keep_range(&mut transaction, operation.id).await.map_err(unavailable)? {
            return Err(Error::new(Code::BackfillConflict, "it took longer than its lease"));
        }
        transaction.commit().await.map_err(unavailable)
    }
}
