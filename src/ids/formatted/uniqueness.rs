//! Whether ids of a format can repeat.
//!
//! An id must show which counter its number is of, and the number must be readable out of the id: then two ids of two
//! numbers differ. Without a counter in the id only chance keeps ids apart, and there must be enough of it.

use std::fmt;

use chrono::{DateTime, Duration, Utc};

use super::format::{Digits, Format, Piece, part_error};
use crate::{
    api::ids::ResetScope,
    error::{Error, Result},
};

/// The least chance that two ids differ by, in bits, where nothing else keeps them apart.
const ENOUGH_BITS: f64 = 64.0;

/// How long a timestamp's length must last to count as even.
const FORESEEABLE: Duration = Duration::days(20 * 365);

/// What keeps the ids of a format apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Uniqueness {
    Counter,
    Chance { bits: f64 },
}

impl fmt::Display for Uniqueness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uniqueness::Counter => f.write_str("counter: no id repeats"),
            Uniqueness::Chance { bits } => {
                write!(f, "chance alone, {bits:.0} bits: a repeat is improbable, not impossible")
            }
        }
    }
}

impl Format {
    /// What keeps ids apart, or why nothing does.
    pub fn uniqueness(&self, now: DateTime<Utc>) -> Result<Uniqueness> {
        self.check_bases(now)?;
        let Some(number) = self.pieces.iter().position(|piece| matches!(piece, Piece::Number(_))) else {
            let bits = self.random_bits();
            if bits < ENOUGH_BITS {
                let problem = format!(
                    "ids could repeat: without an auto-increment part, random parts must have {ENOUGH_BITS} bits \
                     together, and these have {bits:.0}"
                );
                return Err(Error::field("parts", problem));
            }
            return Ok(Uniqueness::Chance { bits });
        };
        let scope = self.counter.as_ref().map_or(ResetScope::None, |terms| terms.scope);
        if !self.shows(scope) {
            let problem = format!(
                "ids could repeat: a counter that starts again with every {scope} needs a date part of the same time zone \
                 that shows the {scope}",
                scope = scope_name(scope)
            );
            return Err(part_error(number, "reset_scope", problem));
        }
        if let Some((left, right)) = self.ambiguity(now) {
            let problem = format!(
                "ids could repeat: the lengths of parts {left} and {right} vary, so 1 and 12 could look like 11 and 2; put \
                 a separator between them, or fix a length"
            );
            return Err(Error::field("parts", problem));
        }
        Ok(Uniqueness::Counter)
    }

    /// A time before its base would have a sign.
    fn check_bases(&self, now: DateTime<Utc>) -> Result<()> {
        for (index, piece) in self.pieces.iter().enumerate() {
            let (field, future) = match piece {
                Piece::Milliseconds { base } => ("base_ts", !(0..=now.timestamp_millis()).contains(base)),
                Piece::Seconds { base } => ("base_unix", !(0..=now.timestamp()).contains(base)),
                _ => continue,
            };
            if future {
                return Err(part_error(index, field, "must lie between 1970 and now"));
            }
        }
        Ok(())
    }

    /// Bits of chance: what the most frequent outcome leaves, in case a character stands in its set twice.
    fn random_bits(&self) -> f64 {
        let bits = |chars: &[char], length: usize| {
            let most = chars.iter().map(|one| chars.iter().filter(|other| *other == one).count()).max().unwrap_or(1);
            (chars.len() as f64 / most as f64).log2() * length as f64
        };
        let of = |piece: &Piece| match piece {
            Piece::Random { chars, length } => bits(chars, *length),
            _ => 0.0,
        };
        self.pieces.iter().map(of).sum()
    }

    /// Whether every id shows the scope of its counter.
    fn shows(&self, scope: ResetScope) -> bool {
        let Some(terms) = &self.counter else { return true };
        scope == ResetScope::None
            || self.pieces.iter().any(|piece| match piece {
                Piece::Date { pattern, zone } => *zone == terms.zone && pattern.shows(scope),
                // A moment has one day, in whatever zone.
                Piece::Milliseconds { .. } | Piece::Seconds { .. } => true,
                _ => false,
            })
    }

    /// Two parts whose border can't be found. Read from both ends, every part but one must have an end that is known: by
    /// its length, or by a character beside it that it can't contain.
    fn ambiguity(&self, now: DateTime<Utc>) -> Option<(usize, usize)> {
        let pieces = &self.pieces;
        let (mut left, mut right) = (0, pieces.len());
        while left < right && (is_even(&pieces[left], now) || is_parted(&pieces[left], pieces.get(left + 1), str_first))
        {
            left += 1;
        }
        while right > left
            && (is_even(&pieces[right - 1], now)
                || is_parted(&pieces[right - 1], right.checked_sub(2).and_then(|before| pieces.get(before)), str_last))
        {
            right -= 1;
        }
        (right - left > 1).then(|| (left, right - 1))
    }
}

fn scope_name(scope: ResetScope) -> &'static str {
    match scope {
        ResetScope::None => "nothing",
        ResetScope::Year => "year",
        ResetScope::Month => "month",
        ResetScope::Date => "day",
    }
}

/// Whether a piece is always equally long.
fn is_even(piece: &Piece, now: DateTime<Utc>) -> bool {
    let lasts = |value: fn(DateTime<Utc>) -> i64, base: i64| {
        (value(now) - base).to_string().len() == (value(now + FORESEEABLE) - base).to_string().len()
    };
    match piece {
        Piece::Text(_) | Piece::Polling(_) | Piece::Random { .. } => true,
        Piece::Date { pattern, .. } => pattern.is_even(),
        Piece::Milliseconds { base } => lasts(|time| time.timestamp_millis(), *base),
        Piece::Seconds { base } => lasts(|time| time.timestamp(), *base),
        Piece::Number(digits) => digits.fixed,
    }
}

/// Whether a neighbour's nearest character ends a piece, because the piece can't contain it.
fn is_parted(piece: &Piece, neighbour: Option<&Piece>, nearest: fn(&str) -> Option<char>) -> bool {
    let Some(Piece::Text(text)) = neighbour else { return false };
    let Some(separator) = nearest(text) else { return false };
    match piece {
        Piece::Number(Digits { base, padding: (_, padding), .. }) => {
            !separator.is_digit(*base) && separator != *padding
        }
        Piece::Milliseconds { .. } | Piece::Seconds { .. } => !separator.is_ascii_digit(),
        // Names of days and months, signs and literals: only what no date contains.
        _ => false,
    }
}

fn str_first(text: &str) -> Option<char> {
    text.chars().next()
}

fn str_last(text: &str) -> Option<char> {
    text.chars().next_back()
}
