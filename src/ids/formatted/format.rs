//! A formatted key's parts, ready to render: checked once, when the record is read.

use std::{fmt, str::FromStr};

use chrono::{DateTime, Datelike, NaiveDate, Utc};
use chrono_tz::Tz;

use super::pattern::Pattern;
use crate::{
    api::ids::{PaddingMode, Part, ResetScope},
    error::{Error, Result},
};

const MOST_PARTS: usize = 32;
const LONGEST_TEXT: usize = 255;

#[derive(Debug, Clone, PartialEq)]
pub struct Format {
    pub(super) pieces: Vec<Piece>,
    /// None if nothing in an id depends on a counter.
    pub counter: Option<CounterTerms>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Piece {
    Text(String),
    Polling(Vec<char>),
    Random { chars: Vec<char>, length: usize },
    Date { pattern: Pattern, zone: Tz },
    Milliseconds { base: i64 },
    Seconds { base: i64 },
    Number(Digits),
}

/// How the counter of a key counts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CounterTerms {
    pub scope: ResetScope,
    pub zone: Tz,
    /// The largest number that the fixed lengths can show.
    pub max: i64,
}

/// How a number is written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Digits {
    pub base: u32,
    pub length: usize,
    pub fixed: bool,
    pub padding: (PaddingMode, char),
}

/// Which counter of a key: the one of a year, month or day, or the only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    Whole,
    Year(i32),
    Month(i32, u32),
    Date(NaiveDate),
}

impl Scope {
    pub fn of(scope: ResetScope, zone: Tz, now: DateTime<Utc>) -> Self {
        let here = now.with_timezone(&zone);
        match scope {
            ResetScope::None => Scope::Whole,
            ResetScope::Year => Scope::Year(here.year()),
            ResetScope::Month => Scope::Month(here.year(), here.month()),
            ResetScope::Date => Scope::Date(here.date_naive()),
        }
    }
}

/// As it stands in the counter's key.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Whole => f.write_str("none"),
            Scope::Year(year) => write!(f, "{year:04}"),
            Scope::Month(year, month) => write!(f, "{year:04}-{month:02}"),
            Scope::Date(date) => write!(f, "{date}"),
        }
    }
}

impl CounterTerms {
    pub fn scope_at(&self, now: DateTime<Utc>) -> Scope {
        Scope::of(self.scope, self.zone, now)
    }
}

impl Format {
    /// Understands the parts, or names the one that makes no sense.
    pub fn new(parts: &[Part]) -> Result<Self> {
        if parts.is_empty() || parts.len() > MOST_PARTS {
            return Err(Error::field("parts", format!("must have 1 to {MOST_PARTS} parts, has {}", parts.len())));
        }
        let pieces =
            parts.iter().enumerate().map(|(index, part)| Piece::new(part, index)).collect::<Result<Vec<_>>>()?;
        let counter = counter(parts, &pieces)?;
        Ok(Self { pieces, counter })
    }

    /// What stands still for ids of one moment.
    pub fn at(&self, now: DateTime<Utc>) -> Stencil<'_> {
        let mut spots: Vec<Spot> = Vec::with_capacity(self.pieces.len());
        for piece in &self.pieces {
            let mut text = match spots.pop() {
                Some(Spot::Text(text)) => text,
                other => {
                    spots.extend(other);
                    String::new()
                }
            };
            let varying = match piece {
                Piece::Text(fixed) => {
                    text.push_str(fixed);
                    None
                }
                Piece::Date { pattern, zone } => {
                    pattern.render(&now.with_timezone(zone), &mut text);
                    None
                }
                Piece::Milliseconds { base } => {
                    text.push_str(&(now.timestamp_millis() - base).to_string());
                    None
                }
                Piece::Seconds { base } => {
                    text.push_str(&(now.timestamp() - base).to_string());
                    None
                }
                varying => Some(Spot::Piece(varying)),
            };
            if !text.is_empty() {
                spots.push(Spot::Text(text));
            }
            spots.extend(varying);
        }
        Stencil(spots)
    }
}

/// A format at one moment: only numbers and chance are missing.
pub struct Stencil<'a>(Vec<Spot<'a>>);

enum Spot<'a> {
    Text(String),
    Piece(&'a Piece),
}

impl Stencil<'_> {
    pub fn id(&self, number: i64) -> String {
        let mut id = String::with_capacity(32);
        for spot in &self.0 {
            match spot {
                Spot::Text(text) => id.push_str(text),
                Spot::Piece(Piece::Polling(chars)) => {
                    id.push(chars[(number - 1).rem_euclid(chars.len() as i64) as usize])
                }
                Spot::Piece(Piece::Random { chars, length }) => {
                    id.extend((0..*length).map(|_| chars[rand::random_range(0..chars.len())]));
                }
                Spot::Piece(Piece::Number(digits)) => digits.write(number, &mut id),
                Spot::Piece(_) => unreachable!("what stands still is text already"),
            }
        }
        id
    }
}

impl Digits {
    /// The largest number with these digits.
    fn max(&self) -> i64 {
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        match self.fixed {
            true => i64::from(self.base).checked_pow(length).map_or(i64::MAX, |beyond| beyond - 1),
            false => i64::MAX,
        }
    }

    fn write(&self, number: i64, out: &mut String) {
        // 63 digits are the most: a number of 63 bits in base 2.
        let (mut digits, mut first, mut rest) = ([0_u8; 64], 64, number.unsigned_abs());
        while rest > 0 || first == 64 {
            first -= 1;
            let digit = (rest % u64::from(self.base)) as u32;
            digits[first] = char::from_digit(digit, self.base).expect("less than the base") as u8;
            rest /= u64::from(self.base);
        }
        let digits = std::str::from_utf8(&digits[first..]).expect("digits are ASCII");
        let (mode, char) = self.padding;
        let padding = std::iter::repeat_n(char, self.length.saturating_sub(digits.len()));
        match mode {
            PaddingMode::Prefix => {
                out.extend(padding);
                out.push_str(digits);
            }
            PaddingMode::Suffix => {
                out.push_str(digits);
                out.extend(padding);
            }
        }
    }
}

/// A complaint about a field of one part.
pub(super) fn part_error(index: usize, field: &str, problem: impl fmt::Display) -> Error {
    Error::field(&format!("parts[{index}].{field}"), problem)
}

fn zone(index: usize, name: Option<&str>) -> Result<Option<Tz>> {
    let parse = |name: &str| {
        Tz::from_str(name).map_err(|_| part_error(index, "time_zone", format!("{name:?} is no IANA time zone")))
    };
    name.map(parse).transpose()
}

fn text(index: usize, field: &str, text: &str) -> Result<Vec<char>> {
    let chars: Vec<char> = text.chars().collect();
    match chars.len() {
        1..=LONGEST_TEXT => Ok(chars),
        length => Err(part_error(index, field, format!("must have 1 to {LONGEST_TEXT} characters, has {length}"))),
    }
}

impl Piece {
    fn new(part: &Part, index: usize) -> Result<Self> {
        Ok(match part {
            Part::FixedChars { value } => Piece::Text(text(index, "value", value)?.into_iter().collect()),
            Part::FixedPollingChar { chars_scope } => Piece::Polling(text(index, "chars_scope", chars_scope)?),
            Part::FixedRandomChars { chars_scope, length } => {
                let chars = text(index, "chars_scope", chars_scope)?;
                if !(1..=LONGEST_TEXT).contains(&(*length as usize)) {
                    return Err(part_error(
                        index,
                        "length",
                        format!("must lie between 1 and {LONGEST_TEXT}, is {length}"),
                    ));
                }
                Piece::Random { chars, length: *length as usize }
            }
            Part::DateFormat { format, time_zone } => Piece::Date {
                pattern: Pattern::parse(format).map_err(|problem| part_error(index, "format", problem))?,
                zone: zone(index, time_zone.as_deref())?.unwrap_or(Tz::UTC),
            },
            Part::Timestamp { base_ts } => Piece::Milliseconds { base: *base_ts },
            Part::UnixSeconds { base_unix } => Piece::Seconds { base: *base_unix },
            Part::AutoIncrement { length, length_fixed, padding_mode, padding_char, number_base, .. } => {
                Piece::Number(digits(index, *length, *length_fixed, *padding_mode, padding_char, *number_base)?)
            }
        })
    }
}

fn digits(
    index: usize,
    length: Option<u32>,
    fixed: bool,
    mode: PaddingMode,
    padding_char: &str,
    base: u32,
) -> Result<Digits> {
    if !(2..=36).contains(&base) {
        return Err(part_error(index, "number_base", format!("must lie between 2 and 36, is {base}")));
    }
    let mut chars = padding_char.chars();
    let (Some(char), None) = (chars.next(), chars.next()) else {
        return Err(part_error(index, "padding_char", format!("must be one character, is {padding_char:?}")));
    };
    let is_digit = char.is_digit(base) && !char.is_ascii_uppercase();
    match mode {
        PaddingMode::Suffix if is_digit => {
            let problem = format!("{char:?} is a digit: behind a number, 1 and 10 would look the same");
            return Err(part_error(index, "padding_char", problem));
        }
        PaddingMode::Prefix if is_digit && char != '0' => {
            let problem = format!("{char:?} is a digit other than 0: 1 and {char}1 would look the same");
            return Err(part_error(index, "padding_char", problem));
        }
        _ => {}
    }
    let length = match length {
        Some(length) if !(1..=64).contains(&length) => {
            return Err(part_error(index, "length", format!("must lie between 1 and 64, is {length}")));
        }
        None if fixed => return Err(part_error(index, "length", "is missing, and length_fixed needs it")),
        length => length.unwrap_or(0) as usize,
    };
    Ok(Digits { base, length, fixed, padding: (mode, char) })
}

/// A key has one counter: the parts that show it must agree on when it starts again.
fn counter(parts: &[Part], pieces: &[Piece]) -> Result<Option<CounterTerms>> {
    let first_zone = pieces.iter().find_map(|piece| match piece {
        Piece::Date { zone, .. } => Some(*zone),
        _ => None,
    });
    let mut terms: Option<CounterTerms> = None;
    for (index, (part, piece)) in parts.iter().zip(pieces).enumerate() {
        let (Part::AutoIncrement { reset_scope, time_zone, .. }, Piece::Number(digits)) = (part, piece) else {
            continue;
        };
        let zone = zone(index, time_zone.as_deref())?.or(first_zone).unwrap_or(Tz::UTC);
        match &mut terms {
            None => terms = Some(CounterTerms { scope: *reset_scope, zone, max: digits.max() }),
            Some(terms) if terms.scope != *reset_scope => {
                let problem = "a key has one counter: must be the same as in the part before";
                return Err(part_error(index, "reset_scope", problem));
            }
            Some(terms) if terms.zone != zone => {
                let problem = "a key has one counter: must be the same as in the part before";
                return Err(part_error(index, "time_zone", problem));
            }
            Some(terms) => terms.max = terms.max.min(digits.max()),
        }
    }
    let polls = pieces.iter().any(|piece| matches!(piece, Piece::Polling(_)));
    let turning = CounterTerms { scope: ResetScope::None, zone: Tz::UTC, max: i64::MAX };
    Ok(terms.or_else(|| polls.then_some(turning)))
}
