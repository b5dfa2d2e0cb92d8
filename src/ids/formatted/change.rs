//! Whether a format may follow another whose ids are out in the world.
//!
//! Numbers go on, so two ids of two formats can only be equal if the same text reads as two numbers. It can't where the
//! number stands at the same place and is written in the same way, or where the beginnings differ.

use super::format::{CounterTerms, Digits, Format, Piece, part_error};
use crate::{
    api::ids::ResetScope,
    error::{Error, Result},
};

/// Refuses a format that could repeat an id of one before.
pub fn check(before: &Format, after: &Format) -> Result<()> {
    // Without a counter chance keeps ids apart, from those of before as well.
    let (Some((_, old, old_terms)), Some((index, new, new_terms))) = (counting(before), counting(after)) else {
        return Ok(());
    };
    let changed = match () {
        () if old.base != new.base => Some("number_base"),
        () if old.padding.0 != new.padding.0 => Some("padding_mode"),
        () if old.padding.1 != new.padding.1 => Some("padding_char"),
        () if old_terms.scope != new_terms.scope => Some("reset_scope"),
        () if old_terms.zone != new_terms.zone && new_terms.scope != ResetScope::None => Some("time_zone"),
        () => None,
    };
    if let Some(field) = changed {
        return Err(part_error(index, field, "can't change once an id was given: ids could repeat"));
    }
    if begin_differently(&before.pieces, &after.pieces) || same_places(&before.pieces, &after.pieces) {
        return Ok(());
    }
    let problem = "ids could repeat those of an earlier format: keep the parts and the lengths of fixed texts as they were, \
                   or begin with a text that differs";
    Err(Error::field("parts", problem))
}

/// The first part that shows the counter, and how it counts.
fn counting(format: &Format) -> Option<(usize, Digits, CounterTerms)> {
    let digits = |piece: &Piece| if let Piece::Number(digits) = piece { Some(*digits) } else { None };
    let (index, digits) = format.pieces.iter().enumerate().find_map(|(index, piece)| Some((index, digits(piece)?)))?;
    Some((index, digits, format.counter?))
}

/// Whether the fixed texts at the beginning differ in a place that both have.
fn begin_differently(before: &[Piece], after: &[Piece]) -> bool {
    let beginning = |pieces: &[Piece]| -> String {
        let text = |piece: &Piece| match piece {
            Piece::Text(text) => Some(text.clone()),
            _ => None,
        };
        pieces.iter().map_while(text).collect()
    };
    let (before, after) = (beginning(before), beginning(after));
    before.chars().zip(after.chars()).any(|(before, after)| before != after)
}

/// Whether every part stands where it stood, so that a text has the same number and the same scope in both.
fn same_places(before: &[Piece], after: &[Piece]) -> bool {
    let same = |(before, after): (&Piece, &Piece)| match (before, after) {
        (Piece::Text(before), Piece::Text(after)) => before.chars().count() == after.chars().count(),
        (Piece::Polling(_), Piece::Polling(_)) => true,
        (Piece::Random { length: before, .. }, Piece::Random { length: after, .. }) => before == after,
        // The length may change: a text has the same number whatever it was padded to.
        (Piece::Number(_), Piece::Number(_)) => true,
        (before, after) => before == after,
    };
    before.len() == after.len() && before.iter().zip(after).all(same)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::tests::{counter, format},
        *,
    };

    fn follows(before: Value, after: Value) -> Result<()> {
        check(&format(before).unwrap(), &format(after).unwrap())
    }

    fn text(value: &str) -> Value {
        json!({"type": "fixed-chars", "value": value})
    }

    #[test]
    fn what_could_repeat_an_id_is_refused() {
        let plain = || counter(json!({}));
        let date = |format: &str| json!({"type": "date-format", "format": format});
        let daily = || counter(json!({"reset_scope": "date"}));
        for (before, after) in [
            (json!([text("A"), plain()]), json!([text("B"), plain()])),
            (json!([text("A"), plain()]), json!([text("B2"), plain()])),
            (json!([text("A"), plain()]), json!([text("A"), counter(json!({"length": 9, "length_fixed": true}))])),
            (json!([text("A"), date("yyyyMMdd"), daily()]), json!([text("B"), date("yyyyMM'x'dd"), daily()])),
            (json!([text("A"), plain()]), json!([{"type": "fixed-random-chars", "chars_scope": "01", "length": 64}])),
        ] {
            follows(before.clone(), after.clone()).unwrap_or_else(|error| panic!("{before} to {after}: {error}"));
        }
        for (before, after, mentions) in [
            (
                json!([text("A"), plain()]),
                json!([text("A"), counter(json!({"number_base": 16}))]),
                "parts[1].number_base",
            ),
            (json!([text("A"), plain()]), json!([text("A"), counter(json!({"padding_char": "_"}))]), "padding_char"),
            // 10 was A110, and 110 would be.
            (json!([text("A1"), plain()]), json!([text("A"), plain()]), "parts: ids could repeat"),
            (json!([text("A"), plain()]), json!([plain()]), "parts: ids could repeat"),
            (json!([date("yyyyMMdd"), daily()]), json!([date("yyyyddMM"), daily()]), "parts: ids could repeat"),
            (json!([text("A"), date("yyyyMMdd"), daily()]), json!([text("B"), plain()]), "reset_scope"),
        ] {
            let refused = follows(before.clone(), after.clone()).unwrap_err().message;
            assert!(refused.contains(mentions), "{before} to {after}: {refused}");
        }
    }
}
