//! Pages of records by event time.

use chrono::{DateTime, Datelike, TimeDelta, Utc};

use super::{
    Usage, identity,
    record::{check_name, invalid_field},
    store::{Row, Selection},
};
use crate::{
    api::{
        Call, Handle, Name,
        usage::{MOST_DAYS, MOST_OF_A_PAGE, PAGE, QueryRecords, RecordPage, RecordQuery, Status},
    },
    error::Result,
};

impl Handle<QueryRecords> for Usage {
    async fn handle(&self, call: Call<QueryRecords>) -> Result<RecordPage> {
        let (tenant, query) = (&call.target, &call.request);
        let size = within("page_size", query.page_size, PAGE, MOST_OF_A_PAGE)?;
        check_range("from", "to", query.from, query.to)?;
        for (field, text) in filters(query) {
            check_name(field, text)?;
        }
        let (now, fingerprint) = (self.clock.now(), fingerprint(tenant, query));
        let after = match &query.cursor {
            Some(cursor) => Some(self.cursors.open(&self.reading, fingerprint, cursor, now).await?),
            None => None,
        };
        let statuses = statuses(query);
        let selection = Selection {
            tenant: tenant.as_str(),
            equal: filters(query).into_iter().filter_map(|(column, text)| Some((column, text?.as_str()))).collect(),
            from: query.from,
            to: query.to,
            statuses: &statuses,
            after,
        };
        let _turn = self.turn_to_read(tenant).await?;
        let mut rows = self.historical.page(&self.reading, &selection, size + 1).await?;
        let fitting = fitting(rows.iter(), self.most_bytes()).min(size);
        let is_more = rows.len() > fitting;
        rows.truncate(fitting);
        let next_cursor = match rows.last().filter(|_| is_more) {
            Some(last) => Some(self.cursors.seal(&self.reading, fingerprint, last.place(), now).await?),
            None => None,
        };
        Ok(RecordPage { records: rows.into_iter().map(|row| row.record).collect(), next_cursor })
    }
}

/// A number that is given or not, and must lie between 1 and the most.
pub fn within(field: &str, given: Option<usize>, default: usize, most: usize) -> Result<usize> {
    match given.unwrap_or(default) {
        size if (1..=most).contains(&size) => Ok(size),
        size => Err(invalid_field(field, format_args!("must lie between 1 and {most}, is {size}"))),
    }
}

/// How many of the rows fit into one message. The first always does.
fn fitting<'a>(rows: impl Iterator<Item = &'a Row>, most_bytes: usize) -> usize {
    let mut bytes = 0;
    let fits = |row: &&Row| {
        bytes += row.size;
        bytes <= most_bytes
    };
    rows.take_while(fits).count().max(1)
}

/// Whether event times can lie between these.
pub fn check_range(
    from_field: &str,
    to_field: &str,
    from: Option<DateTime<Utc>>,
    to: Option<DateTime<Utc>>,
) -> Result<()> {
    for (field, moment) in [(from_field, from), (to_field, to)] {
        moment.map_or(Ok(()), |moment| check_year(field, moment))?;
    }
    match (from, to) {
        (Some(from), Some(to)) if from >= to => {
            Err(invalid_field(to_field, format_args!("must lie after {from_field}")))
        }
        (Some(from), Some(to)) if to - from > TimeDelta::days(MOST_DAYS) => {
            let problem = format_args!("must not lie more than {MOST_DAYS} days before {to_field}");
            Err(invalid_field(from_field, problem))
        }
        _ => Ok(()),
    }
}

/// A moment that the database knows too.
pub fn check_year(field: &str, moment: DateTime<Utc>) -> Result<()> {
    match (1970..10_000).contains(&moment.year()) {
        true => Ok(()),
        false => Err(invalid_field(field, "must lie between 1970 and 9999")),
    }
}

/// The filters by the columns that they are about.
fn filters(query: &RecordQuery) -> [(&'static str, Option<&String>); 5] {
    [
        ("usage_type", query.usage_type.as_ref()),
        ("source_id", query.source_id.as_ref()),
        ("resource_id", query.resource_id.as_ref()),
        ("resource_type", query.resource_type.as_ref()),
        ("user_id", query.user_id.as_ref()),
    ]
}

fn statuses(query: &RecordQuery) -> Vec<Status> {
    let wanted = |status: &Status| match status {
        Status::Active => true,
        Status::Deprecated => query.include_deprecated,
        Status::Archived => query.include_archived,
    };
    Status::ALL.into_iter().filter(wanted).collect()
}

/// The same for the same tenant and filters.
fn fingerprint(tenant: &Name, query: &RecordQuery) -> [u8; 16] {
    let mut parts = vec![tenant.to_string()];
    // What is given is marked, so that an empty one is not as none.
    parts.extend(filters(query).map(|(_, text)| text.map(|text| format!("={text}")).unwrap_or_default()));
    let micros = |moment: DateTime<Utc>| moment.timestamp_micros().to_string();
    parts.extend([query.from, query.to].map(|moment| moment.map(micros).unwrap_or_default()));
    parts.extend(statuses(query).iter().map(|status| status.as_str().to_owned()));
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    identity::hash(&parts)[..16].try_into().expect("half of a hash")
}

impl Usage {
    /// Lasts as long as what is returned.
    pub(super) async fn turn_to_read(&self, tenant: &Name) -> Result<impl Sized + use<>> {
        Ok((self.reading_turns.take(tenant.as_str()).await?, self.courtesy.turn().await))
    }

    /// An answer goes in one message, also over NATS.
    pub(super) fn most_bytes(&self) -> usize {
        const ROOM_FOR_THE_REST: usize = 64 * 1024;
        const LEAST: usize = 32 * 1024;
        self.nats.server_info().max_payload.saturating_sub(ROOM_FOR_THE_REST).max(LEAST)
    }
}
