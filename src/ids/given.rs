//! Who was given a number: read out of the counter's own history.

use super::{Ids, formatted::Scope, keys::Kind, sequences::CounterName};
use crate::{
    api::{
        Call, Handle,
        ids::{Given, GivenTo},
    },
    error::{Code, Error, Result},
    watermark::{Mark, Past},
};

impl Handle<Given> for Ids {
    async fn handle(&self, call: Call<Given>) -> Result<GivenTo> {
        let (key, number) = (&call.target, call.request.number);
        let record = self.existing(key).await?;
        let counter = match (&record.kind, &call.request.scope) {
            (Kind::Increment(_), None) => CounterName::Increment(key).to_string(),
            (Kind::Formatted(known), scope) => match (known.scope_at(self.clock.now()), scope) {
                (None, _) => return Err(Error::invalid(format!("{key} has no counter"))),
                (Some(current), None) => CounterName::Formatted(key, current).to_string(),
                (Some(Scope::Whole), Some(_)) => {
                    return Err(Error::field("scope", format!("{key} never starts again, and has none")));
                }
                // A scope that never was has no history.
                (Some(current), Some(scope)) if shape(scope).eq(shape(&current.to_string())) => {
                    format!("formatted.{key}.{scope}")
                }
                (Some(current), Some(_)) => {
                    return Err(Error::field("scope", format!("must be written as that of now, {current}")));
                }
            },
            (Kind::Increment(_), Some(_)) => return Err(Error::field("scope", "increment keys have none")),
            (Kind::Snowflake(_), _) => {
                return Err(Error::invalid(format!(
                    "{key} has no counter: a snowflake tells its worker and time itself"
                )));
            }
        };
        let history = self.sequences.cells().history(&counter).await?;
        match find(&history, number) {
            Some((first, past)) => Ok(GivenTo {
                counter,
                first,
                last: past.state.mark,
                at: past.at,
                instance: past.by.to_string(),
                request_id: past.request.as_deref().map(str::to_owned),
            }),
            None => Err(Error::new(
                Code::NotFound,
                format!("{number} was not given by {counter}, or so long ago that its record is gone"),
            )),
        }
    }
}

/// Digits are alike.
fn shape(scope: &str) -> impl Iterator<Item = char> {
    scope.chars().map(|char| if char.is_ascii_digit() { '0' } else { char })
}

/// The write that took the number, and the first number that it took. A mark that went back returned what was unused, so
/// the newest write that passed the number counts. The oldest one kept may have had others before it, which nobody knows
/// any more, unless it began the counter.
fn find(history: &[Past<Mark>], number: i64) -> Option<(i64, &Past<Mark>)> {
    let mut found = None;
    let mut before =
        history.first().map(|oldest| match oldest.state.mark == oldest.state.base || history.len() < KEPT {
            true => oldest.state.base,
            false => oldest.state.mark,
        })?;
    for past in history {
        let Mark { mark, base } = past.state;
        let spent = before.max(base);
        if mark < number {
            found = None;
        } else if spent < number {
            found = Some((spent + 1, past));
        }
        before = mark;
    }
    found
}

/// The writes that the bucket keeps of a counter, as `streams/counters.toml` says.
const KEPT: usize = 10_000;

#[cfg(test)]
mod tests {
    use chrono::{DateTime, Utc};

    use super::*;

    fn history(marks: &[(i64, i64)]) -> Vec<Past<Mark>> {
        let past = |(index, &(base, mark)): (usize, &(i64, i64))| Past {
            state: Mark { mark, base },
            at: DateTime::<Utc>::UNIX_EPOCH,
            by: index.to_string().into(),
            request: None,
        };
        marks.iter().enumerate().map(past).collect()
    }

    #[test]
    fn the_declaration_keeps_as_many() {
        let counters =
            crate::jetstream::declarations(&crate::config::Config::from_parts(None, Default::default()).unwrap())
                .into_iter()
                .next()
                .unwrap();
        assert_eq!(counters.config["max_msgs_per_subject"], KEPT);
    }

    #[test]
    fn the_newest_write_that_passed_a_number_took_it() {
        // Begun at 100, a range, its tail given back, another range, a jump, a range.
        let history = history(&[(100, 100), (100, 200), (100, 110), (100, 210), (1000, 1000), (1000, 1100)]);
        let who = |number| find(&history, number).map(|(first, past)| (first, &*past.by));
        assert_eq!(who(105), Some((101, "1")));
        assert_eq!(who(110), Some((101, "1")));
        assert_eq!(who(111), Some((111, "3")));
        assert_eq!(who(150), Some((111, "3")), "what was given back went to somebody else");
        assert_eq!(who(1001), Some((1001, "5")));
        for never in [100, 500, 1000, 1101] {
            assert_eq!(who(never), None, "{never}");
        }
        let last = i64::MAX;
        assert_eq!(find(&self::history(&[(last, last)]), 5).map(|(first, _)| first), None);
        assert_eq!(find(&[], 1).map(|(first, _)| first), None);
    }
}
