use proptest::prelude::*;

use super::*;

fn template(text: &str) -> Template {
    Template::parse(text).unwrap().0
}

#[test]
fn ark_tools_accept_the_check_character_of_their_scope() {
    // Published ARKs, whose check character is over what follows `ark:/`.
    for (slug, id) in [("ark:/13030/xf", "ark:/13030/xf93gt2q"), ("ark:87924/r", "ark:87924/r41v5jn6x")] {
        let mask: String =
            id[slug.len()..id.len() - 1].chars().map(|char| if char.is_ascii_digit() { 'd' } else { 'e' }).collect();
        let whole = template(&format!("{slug}.s{mask}k"));
        assert_eq!(whole.number(id.as_bytes()), None);
        let ark = whole.with_check_scope(CheckScope::Ark).unwrap();
        let number = ark.number(id.as_bytes()).unwrap();
        assert_eq!(ark.id(number).unwrap(), id);
    }
    assert!(template("ark:/1/.sd").with_check_scope(CheckScope::Ark).is_err(), "nothing to check");
    assert!(template("1/.sdk").with_check_scope(CheckScope::Ark).is_err(), "no ARK");
    let whole = template("ark:/1/.sdk");
    let there_and_back = whole.clone().with_check_scope(CheckScope::Ark).unwrap().with_check_scope(CheckScope::Whole);
    assert_eq!(there_and_back.unwrap(), whole);
}

#[test]
fn hyphens_mean_nothing_to_people() {
    let ark = template("ark:/12-3/x.reeddk");
    let id = ark.id(777).unwrap();
    let written = format!("ark:/1-23/x-{}\u{2010}{}", &id[11..13], &id[13..]);
    assert_eq!(ark.number(written.as_bytes()), None);
    assert_eq!(ark.number_without_hyphens(&written), Some(777));
    assert_eq!(ark.number_without_hyphens(&id), Some(777));
    assert_eq!(ark.number_without_hyphens("-"), None);
}

#[test]
fn what_is_too_big_is_refused_and_the_largest_is_served() {
    for too_big in [".seeeeeeeeeeeee", ".rddddddddddddddddddd", ".sdddddddddddddddddddd", ".zd+9223372036854775808"] {
        assert!(Template::parse(too_big).is_err(), "{too_big}");
    }
    let largest = template(".reedddddddddddddddd");
    let last = largest.end() - 1;
    assert_eq!(largest.number(largest.id(last).unwrap().as_bytes()), Some(last));
    assert_eq!(largest.id(last + 1), None);
    let longest = "x".repeat(252) + ".sd";
    assert_eq!(Template::parse(&format!("{longest}+9")).map(|(_, position)| position), Ok(9));
    assert!(Template::parse(&format!("x{longest}")).is_err());
    let unbounded = template(".zd");
    assert_eq!(unbounded.id(UNBOUNDED - 1).unwrap(), "9223372036854775806");
    for beyond in ["9223372036854775807", "18446744073709551615", "18446744073709551616", &"9".repeat(300)] {
        assert_eq!(unbounded.number(beyond.as_bytes()), None, "{beyond}");
    }
    assert_eq!(unbounded.id(UNBOUNDED), None);
    let (_, exhausted) = Template::parse(".zd+9223372036854775807").unwrap();
    assert_eq!(exhausted, UNBOUNDED);
}

/// Any template that is accepted.
fn any_template() -> impl Strategy<Value = (String, Template)> {
    let slug = prop_oneof![4 => r"[a-z0-9./:+ äλ-]{0,12}", 1 => "[a-z]{220,236}"];
    let text = (slug, "[rsz]", 0_u64..12_000, "[de]{1,14}", "k?").prop_map(|(slug, generator, bins, mask, check)| {
        let bins = if generator == "r" && bins > 0 { bins.to_string() } else { String::new() };
        format!("{slug}.{generator}{bins}{mask}{check}")
    });
    text.prop_filter_map("too big", |text| Template::parse(&text).ok().map(|(template, _)| (text, template)))
}

proptest! {
    #[test]
    fn a_number_and_its_id_tell_each_other((_, template) in any_template(), at in any::<u64>()) {
        let number = at % template.end();
        let id = template.id(number).unwrap();
        prop_assert_eq!(template.number(id.as_bytes()), Some(number), "{}", id);
    }

    #[test]
    fn the_canonical_form_is_the_same_template((_, template) in any_template(), at in any::<u64>()) {
        let position = at % template.end();
        let text = format!("{template}+{position}");
        prop_assert_eq!(Template::parse(&text), Ok((template, position)), "{}", text);
    }

    #[test]
    fn a_small_pool_has_every_id_once(
        generator in "[rs]|r[0-9]{1,4}",
        mask in "[de]{1,3}",
        check in "k?",
    ) {
        let template = Template::parse(&format!("x.{generator}{mask}{check}"));
        prop_assume!(template.is_ok());
        let template = template.unwrap().0;
        let ids: std::collections::HashSet<_> = (0..template.end()).map(|number| template.id(number).unwrap()).collect();
        prop_assert_eq!(ids.len() as u64, template.end());
        let value = |number| template.id(number).map(|id| id[1..=mask.len()].to_owned());
        prop_assert_eq!(template.end(), mask.chars().map(|char| if char == 'd' { 10 } else { 29 }).product::<u64>());
        prop_assert!(ids.iter().all(|id| id.len() == 1 + mask.len() + check.len()) && value(template.end()).is_none());
    }

    #[test]
    fn an_unbounded_pool_repeats_nothing_while_it_grows(mask in "[de]{1,2}", check in "k?") {
        let template = template(&format!(".z{mask}{check}"));
        let ids: std::collections::HashSet<_> = (0..3000).map(|number| template.id(number).unwrap()).collect();
        prop_assert_eq!(ids.len(), 3000);
    }

    #[test]
    fn nothing_that_is_written_makes_it_panic(text in any::<String>(), id in any::<Vec<u8>>(), number in any::<u64>()) {
        let _ = Template::parse(&text);
        for known in [".sdk", "0.sdk", ".zek", "ä.r7deek", ".sd"] {
            let template = template(known);
            let _ = (template.number(&id), template.number(text.as_bytes()), template.number_without_hyphens(&text));
            let _ = template.id(number);
        }
    }

    #[test]
    fn almost_templates_don_t_panic_either(text in r"[.rszdek+0-9\n]{0,40}", id in "[0-9bcxz-]{0,30}") {
        if let Ok((template, _)) = Template::parse(&text) {
            let _ = (template.number(id.as_bytes()), template.number_without_hyphens(&id));
        }
    }
}
