//! Moments: as callers write them, and as clocks on walls show them.

use chrono::{DateTime, Days, Duration, NaiveDateTime, Offset, TimeZone, Utc};
use chrono_tz::Tz;

use crate::error::{Error, Result};

/// The zone of an IANA name.
pub fn zone(name: &str) -> Result<Tz> {
    name.parse().map_err(|_| Error::field("timezone", format!("{name:?} is no IANA time zone such as Europe/Berlin")))
}

/// Text with an offset, or a local time in a zone.
pub fn parse(text: &str, zone: Option<Tz>) -> Result<DateTime<Utc>> {
    let field = |problem: String| Err(Error::field("execute_at", problem));
    if let Ok(moment) = DateTime::parse_from_rfc3339(text) {
        return Ok(moment.to_utc());
    }
    let local = ["%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M"];
    let local = local.iter().find_map(|format| NaiveDateTime::parse_from_str(text, format).ok());
    match (local, zone) {
        (Some(local), Some(zone)) => instant(zone, local).map_or_else(|| field("is out of range".into()), Ok),
        (Some(_), None) => field("has no offset: add one (such as Z), or name a timezone".into()),
        (None, _) => field(format!("{text:?} is not ISO 8601, such as 2026-10-26T15:30:00Z")),
    }
}

/// The moment as PostgreSQL can keep it: in microseconds, without leap seconds, and never before the one that was meant.
pub fn kept(moment: DateTime<Utc>) -> DateTime<Utc> {
    let up = i64::from(!moment.timestamp_subsec_nanos().is_multiple_of(1000));
    DateTime::from_timestamp_micros(moment.timestamp_micros() + up).unwrap_or(moment)
}

/// When a clock on a wall shows a time: the first of two in an hour that is repeated, the end of an hour that is skipped.
pub fn instant(zone: Tz, local: NaiveDateTime) -> Option<DateTime<Utc>> {
    match zone.from_local_datetime(&local) {
        chrono::LocalResult::Single(one) => Some(one.to_utc()),
        chrono::LocalResult::Ambiguous(first, _) => Some(first.to_utc()),
        chrono::LocalResult::None => end_of_gap(zone, local),
    }
}

/// The moment at which the clock was set forward over a local time.
fn end_of_gap(zone: Tz, local: NaiveDateTime) -> Option<DateTime<Utc>> {
    let offset = |moment: DateTime<Utc>| zone.offset_from_utc_datetime(&moment.naive_utc()).fix();
    let mut before = local.checked_sub_days(Days::new(2))?.and_utc();
    let mut after = local.checked_add_days(Days::new(2))?.and_utc();
    let old = offset(before);
    while after - before > Duration::seconds(1) {
        let middle = before + (after - before) / 2;
        if offset(middle) == old { before = middle } else { after = middle }
    }
    // Clocks are set at whole seconds.
    DateTime::from_timestamp(after.timestamp(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_times_at_a_change_of_the_clock() {
        for (name, local, expected) in [
            ("Europe/Berlin", "2026-07-01T12:00:00", "2026-07-01T10:00:00Z"),
            // Skipped: 02:00 to 03:00 on March 29.
            ("Europe/Berlin", "2026-03-29T02:30:00", "2026-03-29T01:00:00Z"),
            ("Europe/Berlin", "2026-03-29T02:00", "2026-03-29T01:00:00Z"),
            // Twice: 02:00 to 03:00 on October 25.
            ("Europe/Berlin", "2026-10-25T02:30:00", "2026-10-25T00:30:00Z"),
            ("America/New_York", "2026-03-08T02:30:00", "2026-03-08T07:00:00Z"),
            ("America/New_York", "2026-11-01 01:30", "2026-11-01T05:30:00Z"),
            // Half an hour, on the other side of the world.
            ("Australia/Lord_Howe", "2026-10-04T02:15:00", "2026-10-03T15:30:00Z"),
            ("Australia/Lord_Howe", "2026-04-05T01:45:00", "2026-04-04T14:45:00Z"),
        ] {
            let found = parse(local, Some(zone(name).unwrap())).unwrap();
            assert_eq!(found, expected.parse::<DateTime<Utc>>().unwrap(), "{name} {local}");
        }
    }

    #[test]
    fn an_offset_wins_over_the_zone_and_nonsense_is_refused() {
        let berlin = Some(zone("Europe/Berlin").unwrap());
        assert_eq!(parse("2026-07-01T12:00:00Z", berlin).unwrap().to_rfc3339(), "2026-07-01T12:00:00+00:00");
        for text in ["", "tomorrow", "2026-13-01T00:00:00Z", "12:00", "2026-07-01"] {
            assert!(parse(text, berlin).unwrap_err().message.starts_with("execute_at"), "{text}");
        }
        assert!(parse("2026-07-01T12:00:00", None).unwrap_err().message.contains("timezone"));
        assert!(zone("Europe/Atlantis").is_err());
    }
}
