//! Carrying a backfill out.

use std::time::Duration;

use serde_json::json;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::not_pending;
use crate::{
    api::{Name, usage::Backfill},
    error::{Code, Error, Result},
    usage::{
        Usage, feed,
        store::{
            self,
            backfills::{self, Changed, Descent, Operation},
            ranges::show_progress,
            unavailable,
        },
    },
};

/// Records of one statement.
const CHUNK: i64 = 10_000;

/// How long live records that are behind are let go first, with each chunk.
const COURTESY: Duration = Duration::from_secs(1);

impl Usage {
    /// Carries a backfill out, and waits for a while until it is done.
    pub(super) async fn carry_out(&self, tenant: &Name, operation: Operation) -> Result<Backfill> {
        let id = operation.id;
        let start = async { backfills::start_operation(&mut *self.database.acquire().await?, id).await };
        if !start.await.map_err(unavailable)? {
            return Err(not_pending(&self.operation(tenant, id).await?));
        }
        let usage = self.me.upgrade().ok_or_else(|| Error::unavailable("we are stopping"))?;
        // It goes on without whoever asked for it.
        let done = self.tracker.spawn(async move { usage.work(operation).await });
        timeout(self.answer_within, done).await.ok();
        let backfill = self.backfill(tenant, id).await?;
        match backfill.error {
            Some(reason) => {
                let mut error = Error::from(reason);
                let details = error.details.take().unwrap_or_else(|| json!({}));
                Err(error.details(json!({ "backfill_id": id, "cause": details })))
            }
            None => Ok(backfill),
        }
    }

    async fn work(&self, operation: Operation) {
        let id = operation.id;
        let ended = match self.leased(id, self.write_backfill(&operation)).await {
            Ok(()) => self.finish(id).await,
            Err(error) => {
                error.log("usage.backfill");
                self.give_up(id, &error).await
            }
        };
        if let Err(error) = ended {
            tracing::warn!(%error, %id, "the end of a backfill is left to whoever finds it");
        }
        feed::tell(&self.events, &operation.tenant_id).await;
        self.tell_of_backfill(&operation).await;
    }

    /// `tm.event.usage.<tenant>.backfill`: one is done, has failed, or was taken back.
    pub(super) async fn tell_of_backfill(&self, operation: &Operation) {
        let found = async {
            let mut connection = self.database.acquire().await.map_err(unavailable)?;
            super::find(&mut connection, &operation.tenant_id, operation.id).await?.shown()
        };
        match found.await {
            Ok(backfill) => self.events.send(format!("usage.{}.backfill", operation.tenant_id), &backfill).await,
            Err(error) => tracing::warn!(%error, id = %operation.id, "the end of a backfill was not told"),
        }
    }

    /// Everything in one transaction. What others wait for is taken last: heads, tallies, the feed.
    async fn write_backfill(&self, operation: &Operation) -> Result<()> {
        let _turn = self.backfills_at_once.acquire().await.map_err(Error::internal)?;
        let total = self.received(operation).await?;
        self.show(operation.id, "archiving", 0, total).await;
        let mut transaction = self.database.begin().await.map_err(unavailable)?;
        self.historical.thaw_span(&mut transaction, &operation.span()).await?;
        let mut changed = backfills::archive_range(&mut transaction, operation).await.map_err(unavailable)?;
        let (archived, first_written) = (records_of(&changed), changed.len());
        let (mut added, mut last) = (0, Uuid::nil());
        while let Some(end) =
            backfills::chunk_end(&mut transaction, operation.id, last, CHUNK).await.map_err(unavailable)?
        {
            self.let_live_records_go_first().await;
            let written = backfills::write_chunk(&mut transaction, operation, last, end).await.map_err(unavailable)?;
            added += records_of(&written);
            changed.extend(written);
            last = end;
            self.show(operation.id, "writing", added, total).await;
        }
        if added != total {
            let message =
                format!("of {total} records {added} are there, the rest was lost with the server: send them again");
            return Err(Error::new(Code::BackfillConflict, message));
        }
        self.show(operation.id, "closing", added, total).await;
        self.settle(&mut transaction, operation, &changed).await?;
        backfills::widen_changed(&mut transaction, &changed).await.map_err(unavailable)?;
        let written = &changed[first_written..];
        backfills::tally_written(&mut transaction, operation, written).await.map_err(unavailable)?;
        backfills::feed_touched(&mut transaction, operation).await.map_err(unavailable)?;
        let ours =
            backfills::note_written(&mut transaction, operation.id, added, archived).await.map_err(unavailable)?;
        if !ours {
            return Err(Error::new(Code::BackfillConflict, "the backfill was given up meanwhile"));
        }
        transaction.commit().await.map_err(unavailable)
    }

    /// Counters stay counters, and their heads are what the ledger has.
    pub(super) async fn settle(
        &self,
        transaction: &mut sqlx::PgConnection,
        operation: &Operation,
        changed: &[Changed],
    ) -> Result<()> {
        if changed.iter().all(|one| one.readings == 0) {
            return Ok(());
        }
        let series = backfills::touched_series(transaction, operation).await.map_err(unavailable)?;
        self.historical.thaw_beside(transaction, &series, operation.range_start, operation.range_end).await?;
        let settled = async {
            // Those that are there first, as everyone does.
            store::heads(transaction, &series).await?;
            backfills::make_heads(transaction, operation).await?;
            store::mend_heads(transaction, &series).await?;
            backfills::descent(transaction, operation, &series).await
        };
        match settled.await.map_err(unavailable)? {
            Some(descent) => Err(goes_down(&descent)),
            None => Ok(()),
        }
    }

    /// How many records were received.
    async fn received(&self, operation: &Operation) -> Result<i64> {
        let mut connection = self.database.acquire().await.map_err(unavailable)?;
        let current = super::find(&mut connection, &operation.tenant_id, operation.id).await?;
        Ok(current.received())
    }

    /// For whoever looks; nothing depends on it.
    async fn show(&self, id: Uuid, phase: &str, done: i64, total: i64) {
        let show = async { show_progress(&mut *self.database.acquire().await?, id, phase, done, total).await };
        if let Err(error) = show.await {
            tracing::debug!(%error, "the progress of a backfill is not shown");
        }
    }

    async fn let_live_records_go_first(&self) {
        let quiet = async {
            while self.backlog.is_behind() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(COURTESY, quiet).await.ok();
    }
}

fn records_of(changed: &[Changed]) -> i64 {
    changed.iter().map(|one| one.records).sum()
}

fn goes_down(descent: &Descent) -> Error {
    let Descent { source_id, resource_id, event_timestamp, value, before } = descent;
    let message = format!(
        "replacement_events: the counter {resource_id} of {source_id} would go down at {event_timestamp}: {value} is less \
         than {before} before it"
    );
    Error::new(Code::CounterViolation, message).details(json!({
        "source_id": source_id, "resource_id": resource_id, "event_timestamp": event_timestamp,
        "value": value.to_string(), "before": before.to_string(),
    }))
}
