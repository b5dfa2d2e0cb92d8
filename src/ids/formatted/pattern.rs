//! Date patterns, in the letters that users of such patterns know from Java: `yyyyMMdd`, `HH:mm:ss.SSS`, `'at' h a`.

use std::fmt::Write;

use chrono::{DateTime, Datelike, Timelike};
use chrono_tz::{OffsetComponents, Tz};

use crate::api::ids::ResetScope;

#[derive(Debug, Clone, PartialEq)]
pub struct Pattern(Vec<Token>);

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Literal(String),
    /// A letter, and how often it stands there.
    Field(char, usize),
}

/// The letters, with the most repetitions that mean something.
const LETTERS: &[(char, usize)] = &[
    ('y', 4), // year: yy has two digits
    ('Y', 4), // year of the ISO week
    ('Q', 1), // quarter
    ('M', 4), // month: MMM and MMMM are names
    ('w', 2), // ISO week
    ('D', 3), // day of the year
    ('d', 2), // day of the month
    ('E', 4), // day of the week: a short name, EEEE the whole
    ('a', 1), // AM or PM
    ('H', 2), // hour, 0 to 23
    ('h', 2), // hour, 1 to 12
    ('m', 2), // minute
    ('s', 2), // second
    ('S', 9), // fraction of the second, digit by digit
    ('X', 3), // offset: Z, +01, +0130 or +01:30
    ('Z', 1), // offset: +0130
];

impl Pattern {
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.chars().count() > 255 {
            return Err("must have 1 to 255 characters".into());
        }
        let mut tokens = Vec::new();
        let mut chars = text.chars().peekable();
        while let Some(char) = chars.next() {
            match char {
                '\'' => {
                    let mut literal = String::new();
                    loop {
                        match chars.next() {
                            Some('\'') if chars.next_if_eq(&'\'').is_some() => literal.push('\''),
                            Some('\'') => break,
                            Some(char) => literal.push(char),
                            None => return Err("a quote is not closed".into()),
                        }
                    }
                    // Two quotes are one.
                    tokens.push(Token::Literal(if literal.is_empty() { "'".into() } else { literal }));
                }
                letter if letter.is_ascii_alphabetic() => {
                    let mut count = 1;
                    while chars.next_if_eq(&letter).is_some() {
                        count += 1;
                    }
                    match LETTERS.iter().find(|(known, _)| *known == letter) {
                        None => return Err(format!("{letter} means nothing in a date pattern; put text into quotes")),
                        Some((_, most)) if count > *most => return Err(format!("{letter} stands there {count} times")),
                        Some(_) => tokens.push(Token::Field(letter, count)),
                    }
                }
                char => tokens.push(Token::Literal(char.into())),
            }
        }
        Ok(Self(tokens))
    }

    /// Whether two moments in different scopes always look different: the scope's fields are there and can be read back.
    pub fn shows(&self, scope: ResetScope) -> bool {
        self.is_readable() && self.has(scope)
    }

    /// Whether every number's end can be found: by its width, or by what follows it. Otherwise 11 January and 1 November
    /// both read `111`.
    fn is_readable(&self) -> bool {
        let begins_without_digit = |next: Option<&Token>| match next {
            None => true,
            Some(Token::Literal(text)) => !text.starts_with(|char: char| char.is_ascii_digit()),
            Some(Token::Field('M', width)) => *width >= 3,
            Some(Token::Field(letter, _)) => matches!(letter, 'E' | 'a' | 'X' | 'Z'),
        };
        let varies = |token: &Token| match token {
            Token::Field('D', width) => *width < 3,
            Token::Field('y' | 'Y', width) => *width != 2 && *width != 4,
            Token::Field('M' | 'w' | 'd' | 'H' | 'h' | 'm' | 's', width) => *width == 1,
            _ => false,
        };
        self.0.iter().enumerate().all(|(index, token)| !varies(token) || begins_without_digit(self.0.get(index + 1)))
    }

    fn has(&self, scope: ResetScope) -> bool {
        let has = |letters: &[char]| {
            self.0.iter().any(|token| matches!(token, Token::Field(letter, _) if letters.contains(letter)))
        };
        let (year, month) = (has(&['y']), has(&['M']));
        let date = (month && has(&['d'])) || has(&['D']);
        match scope {
            ResetScope::None => true,
            ResetScope::Year => year,
            ResetScope::Month => year && (month || has(&['D'])),
            ResetScope::Date => year && date,
        }
    }

    /// Whether every moment looks equally long. Only the literals' and the fields' own widths count.
    pub fn is_even(&self) -> bool {
        self.0.iter().all(|token| match token {
            Token::Literal(_) => true,
            Token::Field('y' | 'Y', count) => *count == 2 || *count == 4,
            Token::Field('M' | 'E', count) => (2..=3).contains(count),
            Token::Field('D', count) => *count == 3,
            Token::Field('w' | 'd' | 'H' | 'h' | 'm' | 's', count) => *count == 2,
            Token::Field('Q' | 'a' | 'S' | 'Z', _) => true,
            Token::Field(..) => false,
        })
    }

    pub fn render(&self, time: &DateTime<Tz>, out: &mut String) {
        for token in &self.0 {
            match token {
                Token::Literal(text) => out.push_str(text),
                Token::Field(letter, count) => render(*letter, *count, time, out),
            }
        }
    }
}

fn render(letter: char, width: usize, time: &DateTime<Tz>, out: &mut String) {
    let number = match letter {
        'y' if width == 2 => time.year().rem_euclid(100) as u32,
        'y' => time.year() as u32,
        'Y' if width == 2 => time.iso_week().year().rem_euclid(100) as u32,
        'Y' => time.iso_week().year() as u32,
        'Q' => time.month0() / 3 + 1,
        'M' if width >= 3 => return name(if width == 3 { "%b" } else { "%B" }, time, out),
        'M' => time.month(),
        'w' => time.iso_week().week(),
        'D' => time.ordinal(),
        'd' => time.day(),
        'E' => return name(if width <= 3 { "%a" } else { "%A" }, time, out),
        'a' => return out.push_str(if time.hour() < 12 { "AM" } else { "PM" }),
        'H' => time.hour(),
        'h' => time.hour12().1,
        'm' => time.minute(),
        's' => time.second(),
        // Leap seconds would show as more than nine digits.
        'S' => time.nanosecond().min(999_999_999) / 10_u32.pow(9 - width as u32),
        _ => return offset(letter, width, time, out),
    };
    write!(out, "{number:0width$}").expect("writing to a string");
}

fn name(format: &str, time: &DateTime<Tz>, out: &mut String) {
    write!(out, "{}", time.format(format)).expect("writing to a string");
}

fn offset(letter: char, width: usize, time: &DateTime<Tz>, out: &mut String) {
    let minutes = (time.offset().base_utc_offset() + time.offset().dst_offset()).num_minutes();
    if letter == 'X' && minutes == 0 {
        return out.push('Z');
    }
    let (sign, hours, minutes) = (if minutes < 0 { '-' } else { '+' }, minutes.abs() / 60, minutes.abs() % 60);
    let written = match (letter, width) {
        ('X', 1) if minutes == 0 => write!(out, "{sign}{hours:02}"),
        ('X', 3) => write!(out, "{sign}{hours:02}:{minutes:02}"),
        _ => write!(out, "{sign}{hours:02}{minutes:02}"),
    };
    written.expect("writing to a string");
}

#[cfg(test)]
mod tests {
    use chrono::TimeZone;

    use super::*;

    fn show(pattern: &str) -> String {
        let time = chrono_tz::Asia::Kolkata.with_ymd_and_hms(2026, 3, 5, 15, 4, 9).unwrap();
        let mut out = String::new();
        Pattern::parse(pattern).unwrap().render(&(time + chrono::Duration::milliseconds(37)), &mut out);
        out
    }

    #[test]
    fn patterns_say_what_their_users_expect() {
        for (pattern, expected) in [
            ("yyyyMMdd", "20260305"),
            ("yy-M-d", "26-3-5"),
            ("HH:mm:ss.SSS", "15:04:09.037"),
            ("h:mm a", "3:04 PM"),
            ("hh", "03"),
            ("EEE, d MMM yyyy", "Thu, 5 Mar 2026"),
            ("EEEE MMMM", "Thursday March"),
            ("DDD D Q", "064 64 1"),
            ("YYYY-'W'ww", "2026-W10"),
            ("'it''s' yyyy", "it's 2026"),
            ("yyyy''MM", "2026'03"),
            ("XXX X XX Z", "+05:30 +0530 +0530 +0530"),
            ("年yyyy", "年2026"),
        ] {
            assert_eq!(show(pattern), expected, "{pattern}");
        }
        let utc = chrono_tz::UTC.with_ymd_and_hms(2026, 1, 1, 0, 0, 0).unwrap();
        let mut out = String::new();
        Pattern::parse("XXX h a").unwrap().render(&utc, &mut out);
        assert_eq!(out, "Z 12 AM");
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for (pattern, mentions) in
            [("", "characters"), ("yyyyb", "b means nothing"), ("'open", "quote"), ("ddd", "3 times")]
        {
            let refused = Pattern::parse(pattern).unwrap_err();
            assert!(refused.contains(mentions), "{pattern}: {refused}");
        }
    }

    #[test]
    fn scopes_are_shown_or_not() {
        for (pattern, scope, shown) in [
            ("yyyyMMdd", ResetScope::Date, true),
            ("yyDDD", ResetScope::Date, true),
            ("yyyyMM", ResetScope::Date, false),
            ("MMdd", ResetScope::Date, false),
            ("yyyyMM", ResetScope::Month, true),
            ("yy", ResetScope::Year, true),
            ("YYYYww", ResetScope::Year, false),
            ("HH", ResetScope::None, true),
            ("yyyy-M-d", ResetScope::Date, true),
            ("d.M.yyyy", ResetScope::Date, true),
            ("dMMMyyyy", ResetScope::Date, true),
            ("yyyyMd", ResetScope::Date, false),
            ("dMyyyy", ResetScope::Date, false),
            ("yyyyDH", ResetScope::Date, false),
            ("d'1'MMyyyy", ResetScope::Date, false),
        ] {
            assert_eq!(Pattern::parse(pattern).unwrap().shows(scope), shown, "{pattern} {scope:?}");
        }
    }
}
