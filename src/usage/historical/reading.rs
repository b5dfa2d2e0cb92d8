//! Both databases as one.

use std::collections::{BTreeMap, HashMap};

use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{Historical, away};
use crate::{
    error::Result,
    usage::store::{
        self, Row, Selection,
        moved::{moved, present},
        unavailable,
    },
};

impl Historical {
    /// Up to so many records in order.
    pub async fn page(&self, reading: &PgPool, selection: &Selection<'_>, most: usize) -> Result<Vec<Row>> {
        let mut connection = reading.acquire().await.map_err(unavailable)?;
        let here = store::page(&mut connection, selection, most).await.map_err(unavailable)?;
        // What moves from now on was found here.
        let moved = moved(&mut connection).await.map_err(unavailable)?;
        let to = here.get(most - 1).map(|last| last.event_timestamp).or(selection.to);
        if !moved.overlaps(selection.begin(), to) {
            return Ok(here);
        }
        // Whoever waits for the historical database must not keep others from reading here.
        drop(connection);
        let mut there = self.reader().await?;
        // All that is asked here is of one moment, and nothing moves before it ends.
        let snapshot = "begin isolation level repeatable read read only";
        let mut here = reading.begin_with(snapshot).await.map_err(unavailable)?;
        let mut rows = store::page(&mut here, selection, most).await.map_err(unavailable)?;
        rows.extend(page_of_the_rest(&mut there, &mut here, selection, most).await?);
        rows.sort_unstable_by_key(Row::place);
        rows.truncate(most);
        Ok(rows)
    }

    /// What the historical database has of feed entries that are not here.
    pub async fn found(&self, reading: &PgPool, wanted: &[(Uuid, i32)]) -> Result<HashMap<(Uuid, i32), Row>> {
        if wanted.is_empty() {
            return Ok(HashMap::new());
        }
        let moved = moved(&mut *reading.acquire().await.map_err(unavailable)?).await.map_err(unavailable)?;
        match wanted.iter().any(|(id, _)| moved.may_have(*id)) {
            true => store::find(&mut *self.reader().await?, wanted).await.map_err(away),
            false => Ok(HashMap::new()),
        }
    }

    /// All revisions of a tenant's record, oldest first.
    pub async fn versions(&self, connection: &mut PgConnection, tenant: &str, id: Uuid) -> Result<Vec<Row>> {
        let here = store::versions(connection, tenant, id).await.map_err(unavailable)?;
        if !moved(connection).await.map_err(unavailable)?.may_have(id) {
            return Ok(here);
        }
        let there = store::versions(&mut *self.reader().await?, tenant, id).await.map_err(away)?;
        let by_revision = |row: Row| (row.revision, row);
        let versions: BTreeMap<i32, Row> = there.into_iter().chain(here).map(by_revision).collect();
        Ok(versions.into_values().collect())
    }
}

/// Up to so many records, in order, that only the historical database has.
async fn page_of_the_rest(
    there: &mut PgConnection,
    here: &mut PgConnection,
    selection: &Selection<'_>,
    most: usize,
) -> Result<Vec<Row>> {
    let (mut rest, mut selection) = (Vec::new(), selection.clone());
    loop {
        let rows = store::page(there, &selection, most).await.map_err(away)?;
        let shadowed = present(here, rows.iter().map(|row| (row.id, row.revision))).await.map_err(unavailable)?;
        let is_last = rows.len() < most;
        selection.after = rows.last().map(Row::place);
        rest.extend(rows.into_iter().filter(|row| !shadowed.contains(&(row.id, row.revision))));
        if is_last || rest.len() >= most {
            return Ok(rest);
        }
    }
}
