use std::collections::HashSet;

use chrono::{DateTime, Utc};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Format, uniqueness::Uniqueness};
use crate::{api::ids::Part, error::Result};

fn time(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

pub fn format(parts: Value) -> Result<Format> {
    let parts: Vec<Part> =
        serde_json::from_value(parts).map_err(|error| crate::error::Error::invalid(error.to_string()))?;
    Format::new(&parts)
}

/// A counter part with these options.
pub fn counter(options: Value) -> Value {
    let mut part = json!({"type": "auto-increment"});
    part.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
    part
}

/// An id of one moment.
fn id(parts: Value, number: i64) -> String {
    format(parts).unwrap().at(time("2026-11-16T23:30:05.678Z")).id(number)
}

/// What is wrong with the parts.
fn refusal(parts: Value) -> String {
    let now = time("2026-11-16T12:00:00Z");
    match format(parts.clone()).and_then(|format| format.uniqueness(now)) {
        Ok(uniqueness) => panic!("{parts} was accepted: {uniqueness}"),
        Err(error) => error.message.to_string(),
    }
}

#[test]
fn every_part_is_written_as_its_options_say() {
    let number = |options: Value, number| id(json!([counter(options)]), number);
    assert_eq!(number(json!({}), 42), "42");
    assert_eq!(number(json!({"length": 4}), 42), "0042");
    assert_eq!(number(json!({"length": 4}), 12345), "12345");
    assert_eq!(number(json!({"length": 4, "padding_char": "*"}), 42), "**42");
    assert_eq!(number(json!({"length": 4, "padding_char": "*", "padding_mode": "suffix"}), 42), "42**");
    assert_eq!(number(json!({"number_base": 2}), 10), "1010");
    assert_eq!(number(json!({"number_base": 16, "length": 4}), 255), "00ff");
    assert_eq!(number(json!({"number_base": 36}), 35), "z");
    assert_eq!(number(json!({"number_base": 2}), i64::MAX), "1".repeat(63));
    let polling = json!([{"type": "fixed-polling-char", "chars_scope": "ABC"}]);
    let turns: String = (1..=5).map(|number| id(polling.clone(), number)).collect();
    assert_eq!(turns, "ABCAB");
    assert_eq!(id(json!([{"type": "timestamp"}]), 1), "1794871805678");
    assert_eq!(id(json!([{"type": "timestamp", "base_ts": 1_794_871_800_000_i64}]), 1), "5678");
    assert_eq!(id(json!([{"type": "unix-seconds"}]), 1), "1794871805");
    assert_eq!(id(json!([{"type": "unix-seconds", "base_unix": 1_794_871_800}]), 1), "5");
    let date = |zone: Value| id(json!([{"type": "date-format", "format": "yyyyMMdd'T'HH", "time_zone": zone}]), 1);
    assert_eq!(date(json!(null)), "20261116T23");
    assert_eq!(date(json!("Asia/Tokyo")), "20261117T08");
    assert_eq!(date(json!("America/New_York")), "20261116T18");
    let random = id(json!([{"type": "fixed-random-chars", "chars_scope": "äß", "length": 9}]), 1);
    assert!(random.chars().count() == 9 && random.chars().all(|char| "äß".contains(char)), "{random}");
    let whole = json!([
        {"type": "fixed-chars", "value": "INV"},
        {"type": "date-format", "format": "yyyyMMdd"},
        {"type": "fixed-chars", "value": "-"},
        {"type": "auto-increment", "length": 4, "reset_scope": "date"},
    ]);
    assert_eq!(id(whole, 7), "INV20261116-0007");
}

#[test]
fn fixed_lengths_bound_the_counter() {
    let max = |part: Value| format(json!([part])).unwrap().counter.unwrap().max;
    assert_eq!(max(json!({"type": "auto-increment", "length": 4, "length_fixed": true})), 9999);
    assert_eq!(max(json!({"type": "auto-increment", "length": 4})), i64::MAX);
    assert_eq!(max(json!({"type": "auto-increment", "length": 3, "length_fixed": true, "number_base": 16})), 0xfff);
    assert_eq!(max(json!({"type": "auto-increment", "length": 64, "length_fixed": true})), i64::MAX);
}

#[test]
fn what_makes_no_sense_is_refused_and_named() {
    let counter = |options: Value| json!([counter(options)]);
    for (parts, mentions) in [
        (json!([]), "parts: must have 1 to 32"),
        (json!([{"type": "fixed-chars", "value": ""}]), "parts[0].value"),
        (json!([{"type": "fixed-chars"}]), "value"),
        (json!([{"type": "colour"}]), "colour"),
        (json!([{"type": "fixed-chars", "value": "x", "colour": "red"}]), "colour"),
        (json!([{"type": "fixed-polling-char", "chars_scope": ""}]), "parts[0].chars_scope"),
        (json!([{"type": "fixed-random-chars", "chars_scope": "ab"}]), "length"),
        (json!([{"type": "fixed-random-chars", "chars_scope": "ab", "length": 0}]), "parts[0].length"),
        (json!([{"type": "date-format"}]), "format"),
        (json!([{"type": "date-format", "format": "yyyyb"}]), "parts[0].format"),
        (json!([{"type": "date-format", "format": "yyyy", "time_zone": "Mars/Olympus"}]), "parts[0].time_zone"),
        (
            json!([{"type": "timestamp", "base_ts": 9_999_999_999_999_i64}, {"type": "auto-increment"}]),
            "parts[0].base_ts",
        ),
        (counter(json!({"number_base": 1})), "parts[0].number_base"),
        (counter(json!({"number_base": 37})), "parts[0].number_base"),
        (counter(json!({"length": 0})), "parts[0].length"),
        (counter(json!({"length_fixed": true})), "parts[0].length"),
        (counter(json!({"padding_char": "ab"})), "parts[0].padding_char"),
        (counter(json!({"padding_char": ""})), "parts[0].padding_char"),
        (counter(json!({"padding_char": "1"})), "parts[0].padding_char"),
        (counter(json!({"padding_mode": "suffix"})), "parts[0].padding_char"),
        (counter(json!({"padding_char": "a", "number_base": 16})), "parts[0].padding_char"),
        (counter(json!({"reset_scope": "week"})), "week"),
        (counter(json!({"time_zone": "nowhere"})), "parts[0].time_zone"),
        (
            json!([{"type": "auto-increment"}, {"type": "fixed-chars", "value": "-"},
                {"type": "auto-increment", "reset_scope": "year"}]),
            "parts[2].reset_scope",
        ),
    ] {
        let refused = refusal(parts.clone());
        assert!(refused.contains(mentions), "{parts}: {refused}");
    }
}

#[test]
fn formats_that_could_repeat_an_id_are_refused() {
    let random =
        |length: u32| json!({"type": "fixed-random-chars", "chars_scope": "0123456789abcdef", "length": length});
    let counter = json!({"type": "auto-increment"});
    let daily = json!({"type": "auto-increment", "reset_scope": "date"});
    let date = |format: &str, zone: &str| json!({"type": "date-format", "format": format, "time_zone": zone});
    for (parts, mentions) in [
        (json!([{"type": "fixed-chars", "value": "x"}]), "64 bits"),
        (json!([random(15)]), "these have 60"),
        (json!([{"type": "timestamp"}]), "64 bits"),
        (json!([{"type": "fixed-polling-char", "chars_scope": "ABC"}]), "64 bits"),
        (json!([daily]), "shows the day"),
        (json!([date("yyyyMM-", "UTC"), daily]), "shows the day"),
        (
            json!([date("yyyyMMdd-", "UTC"), {"type": "auto-increment", "reset_scope": "date", "time_zone": "Asia/Tokyo"}]),
            "shows the day",
        ),
        (json!([date("MMdd-", "UTC"), {"type": "auto-increment", "reset_scope": "year"}]), "shows the year"),
        (json!([counter, counter]), "parts 0 and 1"),
        (json!([counter, date("d", "UTC")]), "parts 0 and 1"),
        (json!([counter, {"type": "fixed-chars", "value": "1"}, counter]), "parts 0 and 2"),
        (json!([{"type": "timestamp", "base_ts": 1_794_800_000_000_i64}, counter]), "parts 0 and 1"),
    ] {
        let refused = refusal(parts.clone());
        assert!(refused.contains("ids could repeat") && refused.contains(mentions), "{parts}: {refused}");
    }
    let now = time("2026-11-16T12:00:00Z");
    for (parts, expected) in [
        (json!([random(16)]), Uniqueness::Chance { bits: 64.0 }),
        (json!([{"type": "timestamp"}, counter]), Uniqueness::Counter),
        (json!([counter, {"type": "fixed-chars", "value": "-"}, counter]), Uniqueness::Counter),
        (json!([date("d-M-yyyy", "UTC"), {"type": "fixed-chars", "value": "-"}, daily]), Uniqueness::Counter),
        (json!([{"type": "timestamp"}, daily]), Uniqueness::Counter),
        (json!([date("yyyyMMdd", "Asia/Tokyo"), daily]), Uniqueness::Counter),
    ] {
        assert_eq!(format(parts.clone()).unwrap().uniqueness(now).unwrap(), expected, "{parts}");
    }
}

fn any_part() -> impl Strategy<Value = Value> {
    let zone = prop_oneof![Just("UTC"), Just("Asia/Tokyo"), Just("America/New_York")];
    let pattern = prop_oneof![
        Just("yyyyMMdd"),
        Just("yyyy"),
        Just("yyMM"),
        Just("d-M-yyyy"),
        Just("DDD''yy"),
        Just("HHmm"),
        Just("EEEE"),
        Just("d"),
        Just("yyyyMd"),
        Just("dMMMyy"),
        Just("yyyy'1'")
    ];
    prop_oneof![
        prop_oneof![Just("A"), Just("-"), Just("1"), Just("a1"), Just("0")]
            .prop_map(|value| json!({"type": "fixed-chars", "value": value})),
        Just(json!({"type": "fixed-polling-char", "chars_scope": "1a2"})),
        Just(json!({"type": "fixed-random-chars", "chars_scope": "01", "length": 2})),
        (pattern, zone.clone())
            .prop_map(|(format, zone)| json!({"type": "date-format", "format": format, "time_zone": zone})),
        Just(json!({"type": "timestamp", "base_ts": 1_794_000_000_000_i64})),
        Just(json!({"type": "unix-seconds"})),
        any_counter(),
        any_counter(),
    ]
}

fn any_counter() -> impl Strategy<Value = Value> {
    let scope = prop_oneof![Just("none"), Just("year"), Just("month"), Just("date")];
    let padding =
        prop_oneof![Just(("prefix", "0")), Just(("prefix", "-")), Just(("suffix", "-")), Just(("suffix", "x"))];
    (1_u32..4, any::<bool>(), prop_oneof![Just(2), Just(10), Just(36)], scope, padding).prop_map(
        |(length, fixed, base, scope, (mode, char))| {
            json!({"type": "auto-increment", "length": length, "length_fixed": fixed, "number_base": base,
                   "reset_scope": scope, "padding_mode": mode, "padding_char": char})
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any format that is accepted with a counter: over moments of several days and many numbers of each day's counter,
    /// no id comes twice.
    #[test]
    fn accepted_formats_never_repeat_an_id(parts in prop::collection::vec(any_part(), 1..5)) {
        let Ok(format) = format(json!(parts)) else { return Ok(()) };
        let begin = time("2026-11-11T12:00:00Z");
        if format.uniqueness(begin).ok() != Some(Uniqueness::Counter) {
            return Ok(());
        }
        let terms = format.counter.unwrap();
        let mut seen: HashSet<String> = HashSet::new();
        let mut next: std::collections::HashMap<String, i64> = Default::default();
        for hours in [0, 1, 11, 12, 13, 36, 24 * 61, 24 * 355, 24 * 20, 24 * 50, 24 * 50 + 13, 24 * 400, 24 * 4000] {
            let now = begin + chrono::Duration::hours(hours);
            let stencil = format.at(now);
            let number = next.entry(terms.scope_at(now).to_string()).or_insert(0);
            for _ in 0..130 {
                if *number == terms.max {
                    break;
                }
                *number += 1;
                let id = stencil.id(*number);
                prop_assert!(seen.insert(id.clone()), "{id} came twice from {}", json!(parts));
            }
        }
    }
}
