//! Both databases as one.

use std::collections::BTreeMap;

use chrono::TimeDelta;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{Historical, away};
use crate::{
    error::Result,
    usage::store::{
        self, Row, Selection,
        moved::{Moved, hold_moved, moved, present},
        unavailable,
    },
};

/// Many that were corrected may lie side by side.
const STEP: usize = 1000;

impl Historical {
    /// Up to so many records in order.
    pub async fn page(&self, reading: &PgPool, selection: &Selection<'_>, most: usize) -> Result<Vec<Row>> {
        let mut connection = reading.acquire().await.map_err(unavailable)?;
        let here = store::page(&mut connection, selection, most).await.map_err(unavailable)?;
        // What moves from now on was found here.
        let moved = moved(&mut connection).await.map_err(unavailable)?;
        let to = here.get(most - 1).map(|last| last.record.event_timestamp).or(selection.to);
        if !moved.overlaps(selection.begin(), to) {
            return Ok(here);
        }
        // Whoever waits for the historical database must not keep others from reading here.
        drop(connection);
        let mut there = self.reader().await?;
        // All that is asked here is of one moment, and nothing moves before it ends.
        let snapshot = "begin isolation level repeatable read read only";
        let mut here = reading.begin_with(snapshot).await.map_err(unavailable)?;
        let moved = hold_moved(&mut here).await.map_err(unavailable)?;
        let mut rows = store::page(&mut here, selection, most).await.map_err(unavailable)?;
        let mut selection = selection.clone();
        if let Some(last) = rows.get(most - 1) {
            // What comes after a full page is for the next.
            selection.to = Some(last.record.event_timestamp + TimeDelta::microseconds(1));
        }
        rows.extend(page_of_the_rest(&mut there, &mut here, &moved, selection, most).await?);
        rows.sort_unstable_by_key(Row::place);
        rows.truncate(most);
        Ok(rows)
    }

    /// Fills in what only the historical database has.
    pub async fn fill_in(&self, reading: &PgPool, wanted: &[(Uuid, i32)], rows: &mut [Option<Row>]) -> Result<()> {
        if rows.iter().all(Option::is_some) {
            return Ok(());
        }
        let moved = moved(&mut *reading.acquire().await.map_err(unavailable)?).await.map_err(unavailable)?;
        let is_there = |place: &usize| rows[*place].is_none() && moved.may_have(wanted[*place].0);
        let gaps: Vec<usize> = (0..rows.len()).filter(is_there).collect();
        if gaps.is_empty() {
            return Ok(());
        }
        let wanted: Vec<(Uuid, i32)> = gaps.iter().map(|place| wanted[*place]).collect();
        let found = store::find(&mut *self.reader().await?, &wanted).await.map_err(away)?;
        for (place, row) in gaps.into_iter().zip(found) {
            rows[place] = row;
        }
        Ok(())
    }

    /// All revisions of a tenant's record, oldest first.
    pub async fn versions(&self, reading: &PgPool, tenant: &str, id: Uuid) -> Result<Vec<Row>> {
        let mut connection = reading.acquire().await.map_err(unavailable)?;
        let here = store::versions(&mut connection, tenant, id).await.map_err(unavailable)?;
        if !moved(&mut connection).await.map_err(unavailable)?.may_have(id) {
            return Ok(here);
        }
        drop(connection);
        let there = store::versions(&mut *self.reader().await?, tenant, id).await.map_err(away)?;
        let by_revision = |row: Row| (row.record.revision, row);
        let versions: BTreeMap<i32, Row> = there.into_iter().chain(here).map(by_revision).collect();
        Ok(versions.into_values().collect())
    }
}

/// Up to so many records, in order, that only the historical database has.
async fn page_of_the_rest(
    there: &mut PgConnection,
    here: &mut PgConnection,
    moved: &Moved,
    mut selection: Selection<'_>,
    most: usize,
) -> Result<Vec<Row>> {
    let (mut rest, step) = (Vec::new(), most.max(STEP));
    loop {
        let rows = store::page(there, &selection, step).await.map_err(away)?;
        let shadowed = present(here, rows.iter().map(Row::key)).await.map_err(unavailable)?;
        let is_last = rows.len() < step;
        selection.after = rows.last().map(Row::place);
        let is_theirs = |row: &Row| moved.may_have(row.record.id) && !shadowed.contains(&row.key());
        rest.extend(rows.into_iter().filter(is_theirs));
        if is_last || rest.len() >= most {
            return Ok(rest);
        }
    }
}
