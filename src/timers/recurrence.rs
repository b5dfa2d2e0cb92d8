//! When a recurring timer runs next.
//!
//! Cron is by the clock on the wall: a time in an hour that is skipped runs once, at the end of it, and one in an hour that
//! is repeated runs once, the first time. A pattern for every hour is about time that passes, and goes on through both.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use chrono_tz::Tz;
use croner::{
    Cron,
    parser::{CronParser, Seconds, Year},
};

use super::moment;
use crate::{
    api::timers::Recurrence,
    error::{Error, Result},
};

/// Nothing repeats more often.
const SHORTEST: Duration = Duration::from_secs(1);

/// Nothing is planned farther ahead.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 86_400);

pub enum Rhythm {
    /// At the times of a pattern, as a clock on the wall shows them.
    Wall(Box<Cron>, Tz),
    /// A pattern for every hour.
    Passing(Box<Cron>, Tz),
    Every(TimeDelta),
}

impl Rhythm {
    /// What is wrong with a recurrence names its field.
    pub fn of(recurrence: &Recurrence, zone: Option<Tz>) -> Result<Self> {
        let field = |field: &str, problem: String| Err(Error::field(&format!("recurrence.{field}"), problem));
        if recurrence.count == Some(0) {
            return field("count", "must be 1 at least".into());
        }
        match (&recurrence.cron, recurrence.every) {
            (Some(text), None) => {
                let zone = zone.unwrap_or(Tz::UTC);
                let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
                let cron = match parser.parse(text) {
                    Ok(cron) => Box::new(cron),
                    Err(error) => return field("cron", error.to_string()),
                };
                let fields: Vec<&str> = text.split_whitespace().collect();
                let hours = fields.len().checked_sub(4).and_then(|hours| fields.get(hours)).copied();
                Ok(if hours == Some("*") || text.trim().eq_ignore_ascii_case("@hourly") {
                    Self::Passing(cron, zone)
                } else {
                    Self::Wall(cron, zone)
                })
            }
            (None, Some(every)) if every < SHORTEST => field("every", "must be 1s at least".into()),
            (None, Some(every)) if every > LONGEST => field("every", "must not be above a hundred years".into()),
            (None, Some(every)) => Ok(Self::Every(TimeDelta::from_std(every).expect("below a hundred years"))),
            (None, None) => field("cron", "or every must be given".into()),
            (Some(_), Some(_)) => field("every", "and cron can't both be given".into()),
        }
    }

    /// The first time at or after a moment, if there is one.
    pub fn first(&self, from: DateTime<Utc>) -> Option<DateTime<Utc>> {
        match self {
            Self::Every(_) => Some(from),
            Self::Wall(..) | Self::Passing(..) => self.next(DateTime::<Utc>::MIN_UTC, from - TimeDelta::nanoseconds(1)),
        }
    }

    /// The first time after a moment, if there is one. `began` is the first run.
    pub fn next(&self, began: DateTime<Utc>, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        if after < began {
            return Some(began);
        }
        match self {
            Self::Every(every) => {
                let every = every.num_microseconds()?;
                let steps = (after - began).num_microseconds()?.div_euclid(every) + 1;
                began.checked_add_signed(TimeDelta::microseconds(every.checked_mul(steps)?))
            }
            Self::Passing(cron, zone) => {
                let next = cron.find_next_occurrence(&whole_second(after).with_timezone(zone), false).ok()?;
                Some(next.to_utc())
            }
            Self::Wall(cron, zone) => {
                // Days have no gaps in UTC, so the pattern is asked in terms of it, and the wall says when that is.
                let mut shown = whole_second(after).with_timezone(zone).naive_local().and_utc();
                loop {
                    shown = cron.find_next_occurrence(&shown, false).ok()?;
                    let next = moment::instant(*zone, shown.naive_utc())?;
                    if next > after {
                        return Some(next);
                    }
                }
            }
        }
    }
}

fn whole_second(moment: DateTime<Utc>) -> DateTime<Utc> {
    DateTime::from_timestamp(moment.timestamp(), 0).expect("the same moment, less its fraction")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    fn cron(text: &str, zone: &str) -> Result<Rhythm> {
        let recurrence = Recurrence { cron: Some(text.to_owned()), ..Default::default() };
        Rhythm::of(&recurrence, Some(zone.parse().unwrap()))
    }

    fn runs(text: &str, zone: &str, after: &str, count: usize) -> Vec<String> {
        let rhythm = cron(text, zone).unwrap();
        let mut after = time(after);
        let next = |_| {
            after = rhythm.next(DateTime::<Utc>::MIN_UTC, after).unwrap();
            after.format("%m-%d %H:%M:%S").to_string()
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn a_skipped_hour_fires_once_at_its_end_in_three_zones() {
        // 02:30 does not exist on March 29; the clock goes from 02:00 to 03:00 at 01:00 UTC.
        assert_eq!(
            runs("0 30 2 * * *", "Europe/Berlin", "2026-03-27T12:00:00Z", 3),
            ["03-28 01:30:00", "03-29 01:00:00", "03-30 00:30:00"]
        );
        assert_eq!(
            runs("0 30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", 2),
            ["03-08 07:00:00", "03-09 06:30:00"]
        );
        // Half an hour: 02:00 to 02:30 on October 4 at 15:30 UTC of the day before.
        assert_eq!(
            runs("0 15 2 * * *", "Australia/Lord_Howe", "2026-10-02T16:00:00Z", 2),
            ["10-03 15:30:00", "10-04 15:15:00"]
        );
        // Several times within the hour are one at its end.
        assert_eq!(
            runs("0 */20 2 * * *", "Europe/Berlin", "2026-03-28T02:00:00Z", 2),
            ["03-29 01:00:00", "03-30 00:00:00"]
        );
        // And one that is due at that very moment is the same.
        assert_eq!(
            runs("0 30 2,3 * * *", "Europe/Berlin", "2026-03-28T03:00:00Z", 3),
            ["03-29 01:00:00", "03-29 01:30:00", "03-30 00:30:00"]
        );
    }

    #[test]
    fn a_repeated_hour_fires_once_in_three_zones() {
        // 02:30 comes twice on October 25, at 00:30 and 01:30 UTC.
        assert_eq!(
            runs("0 30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 2),
            ["10-25 00:30:00", "10-26 01:30:00"]
        );
        assert_eq!(
            runs("0 30 1 * * *", "America/New_York", "2026-10-31T12:00:00Z", 2),
            ["11-01 05:30:00", "11-02 06:30:00"]
        );
        assert_eq!(
            runs("0 45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00:00Z", 2),
            ["04-04 14:45:00", "04-05 15:15:00"]
        );
        assert_eq!(
            runs("0 0,30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 3),
            ["10-25 00:00:00", "10-25 00:30:00", "10-26 01:00:00"]
        );
        // Asked in the middle of the second time, it is over.
        assert_eq!(runs("0 30 2 * * *", "Europe/Berlin", "2026-10-25T01:10:00Z", 1), ["10-26 01:30:00"]);
    }

    #[test]
    fn a_pattern_for_every_hour_goes_on_through_both() {
        assert_eq!(
            runs("0 30 * * * *", "Europe/Berlin", "2026-10-24T23:40:00Z", 3),
            ["10-25 00:30:00", "10-25 01:30:00", "10-25 02:30:00"]
        );
        assert_eq!(
            runs("30 * * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", 3),
            ["03-29 00:30:00", "03-29 01:30:00", "03-29 02:30:00"]
        );
    }

    #[test]
    fn intervals_keep_their_beat_and_skip_what_was_missed() {
        let recurrence = Recurrence { every: Some(Duration::from_secs(90)), ..Default::default() };
        let rhythm = Rhythm::of(&recurrence, None).unwrap();
        let began = time("2026-01-01T00:00:00.250Z");
        assert_eq!(rhythm.first(began), Some(began));
        assert_eq!(rhythm.next(began, began), Some(time("2026-01-01T00:01:30.250Z")));
        assert_eq!(rhythm.next(began, time("2026-01-01T01:00:00.249Z")), Some(time("2026-01-01T01:00:00.250Z")));
        assert_eq!(rhythm.next(began, time("2026-01-01T01:00:00.250Z")), Some(time("2026-01-01T01:01:30.250Z")));
        // Fired by hand long before, it begins when it was to begin.
        assert_eq!(rhythm.next(began, time("2025-12-31T12:00:00Z")), Some(began));
    }

    #[test]
    fn the_first_time_may_be_the_moment_itself() {
        let noon = time("2026-05-01T12:00:00Z");
        let rhythm = cron("0 0 12 * * *", "UTC").unwrap();
        assert_eq!(rhythm.first(noon), Some(noon));
        assert_eq!(rhythm.first(noon + TimeDelta::milliseconds(1)), Some(noon + TimeDelta::days(1)));
        assert_eq!(rhythm.next(noon, noon + TimeDelta::milliseconds(500)), Some(noon + TimeDelta::days(1)));
        assert_eq!(rhythm.next(noon, noon - TimeDelta::days(9)), Some(noon));
    }

    #[test]
    fn nonsense_is_refused_and_named() {
        for text in ["", "* * *", "61 * * * * *", "0 0 25 * * *", "every day", "0 0 0 0 1 1 2026 1"] {
            let error = cron(text, "UTC").err().unwrap_or_else(|| panic!("{text} was taken"));
            assert!(error.message.starts_with("recurrence.cron"), "{text}: {error}");
        }
        assert_eq!(cron("0 0 0 30 2 *", "UTC").unwrap().first(time("2026-01-01T00:00:00Z")), None);
        for (recurrence, field) in [
            (Recurrence::default(), "recurrence.cron"),
            (Recurrence { every: Some(Duration::from_millis(999)), ..Default::default() }, "recurrence.every"),
            (Recurrence { every: Some(SHORTEST), count: Some(0), ..Default::default() }, "recurrence.count"),
            (
                Recurrence { every: Some(SHORTEST), cron: Some("* * * * *".into()), ..Default::default() },
                "recurrence.every",
            ),
        ] {
            assert!(Rhythm::of(&recurrence, None).err().unwrap().message.starts_with(field), "{recurrence:?}");
        }
    }
}
