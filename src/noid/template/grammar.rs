//! How a template is written.

use super::{LONGEST, Order, Template, UNBOUNDED, check::Check, scatter::DEFAULT_BINS, scatter::Scatter};

/// Why a text is no template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{title}: {0}", title = Self::TITLE)]
pub struct BadTemplate(&'static str);

impl BadTemplate {
    /// What the original says of every bad template.
    pub const TITLE: &str = "Bad Template String";
}

pub fn parse(text: &str) -> Result<(Template, u64), BadTemplate> {
    if text.contains('\n') {
        return Err(BadTemplate("it has a line feed"));
    }
    // The slug may have dots, and nothing behind it can.
    let (slug, rest) = text.rsplit_once('.').ok_or(BadTemplate("it has no '.' before the generator"))?;
    let (generator, rest) = match rest.as_bytes().first() {
        Some(generator @ (b'r' | b's' | b'z')) => (*generator, &rest[1..]),
        _ => return Err(BadTemplate("the generator behind the last '.' must be r, s or z")),
    };
    let (bins, rest) = split(rest, |byte| byte.is_ascii_digit());
    let (mask, rest) = split(rest, |byte| matches!(byte, b'd' | b'e'));
    if text.len() - rest.len() > LONGEST {
        return Err(BadTemplate("it has more than 255 bytes"));
    }
    if mask.is_empty() {
        return Err(BadTemplate("the mask must have at least one d or e"));
    }
    let (check, rest) = match rest.strip_prefix('k') {
        Some(rest) => (Some(Check::over(slug)), rest),
        None => (None, rest),
    };
    let mask: Vec<u8> = mask.bytes().map(|byte| if byte == b'd' { 10 } else { 29 }).collect();
    let order = order(generator, number(bins).ok_or(BadTemplate("the number of bins is too large"))?, &mask)?;
    let template = Template { slug: slug.to_owned(), order, mask, check };
    let position = match rest.strip_prefix('+') {
        None if rest.is_empty() => 0,
        None => return Err(BadTemplate("the mask may only be followed by k and a counter")),
        Some(digits) if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            return Err(BadTemplate("the counter behind '+' must be decimal digits"));
        }
        Some(digits) => number(digits)
            .filter(|position| *position <= template.end())
            .ok_or(BadTemplate("the counter lies beyond the last id"))?,
    };
    Ok((template, position))
}

fn order(generator: u8, bins: u64, mask: &[u8]) -> Result<Order, BadTemplate> {
    if bins > 0 && generator != b'r' {
        return Err(BadTemplate("only the generator r has bins"));
    }
    if generator == b'z' {
        return Ok(Order::Unbounded);
    }
    let size = mask
        .iter()
        .try_fold(1_u64, |size, radix| size.checked_mul(u64::from(*radix)))
        .filter(|size| *size <= UNBOUNDED)
        .ok_or(BadTemplate("it has more than 2^63-1 ids, which is too many to count"))?;
    if generator == b's' {
        return Ok(Order::Sequential { size });
    }
    let bins = Some(bins).filter(|bins| ![0, DEFAULT_BINS].contains(bins));
    Ok(Order::Scattered { size, bins, scatter: Scatter::new(size, bins) })
}

/// Splits behind the bytes that belong.
fn split(text: &str, belongs: impl Fn(u8) -> bool) -> (&str, &str) {
    let end = text.bytes().position(|byte| !belongs(byte)).unwrap_or(text.len());
    text.split_at(end)
}

/// Digits as a number; no digits are 0. None if it does not fit.
fn number(digits: &str) -> Option<u64> {
    if digits.is_empty() { Some(0) } else { digits.parse().ok() }
}
