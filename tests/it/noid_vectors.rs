//! The facts that were recorded from the original noid server. Where its own document promises something else (`doc`), the
//! document holds.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tidemark::noid::Template;

use crate::support::{Deployment, Http};

fn vectors() -> Value {
    serde_json::from_str(include_str!("../vectors/noid.json")).unwrap()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn template(text: &str) -> Template {
    Template::parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).0
}

#[test]
fn templates_make_the_ids_of_the_original() {
    for vector in list(&vectors()["templates"]) {
        let (template, position) = Template::parse(text(&vector["template"])).unwrap();
        let named = |what: &str| format!("{template}: {what}");
        assert_eq!(format!("{template}+{position}"), text(&vector["canonical"]));
        assert_eq!(template.size(), vector["pool_size"].as_u64(), "{}", named("size"));
        for (number, id) in list(&vector["first"]).iter().enumerate() {
            assert_eq!(template.id(number as u64).as_deref(), id.as_str(), "{}", named("first"));
        }
        for pairs in ["at", "last", "valid"] {
            // A pool without an end has no last ids.
            for pair in vector[pairs].as_array().into_iter().flatten() {
                let (number, id) = (pair["n"].as_u64().unwrap(), text(&pair["id"]));
                assert_eq!(template.id(number).as_deref(), Some(id), "{}", named(pairs));
                assert_eq!(template.number(id.as_bytes()), Some(number), "{}", named(pairs));
            }
        }
        for id in list(&vector["invalid"]) {
            assert_eq!(template.number(text(id).as_bytes()), None, "{}", named(text(id)));
        }
        let digest = &vector["digest"];
        let mut hash = Sha256::new();
        let mut line = Vec::new();
        for number in 0..digest["count"].as_u64().unwrap() {
            line.clear();
            assert!(template.write_id(number, &mut line));
            line.push(b'\n');
            hash.update(&line);
        }
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, text(&digest["sha256"]), "{}", named("digest"));
    }
}

#[test]
fn templates_are_read_as_by_the_original() {
    for vector in list(&vectors()["parse"]) {
        let written = text(&vector["template"]);
        match Template::parse(written) {
            // The original takes a counter beyond the end for 0 and mints everything again.
            Err(_) if written == ".sdd+101" => {}
            Err(error) => assert_eq!(vector["ok"], false, "{written}: {error}"),
            Ok((template, position)) => {
                assert_eq!(vector["ok"], true, "{written}");
                assert_eq!(format!("{template}+{position}"), text(&vector["canonical"]), "{written}");
                assert_eq!(Some(position), vector["used"].as_u64(), "{written}");
                assert_eq!(
                    template.size().map_or(-1, |size| size as i64),
                    vector["max"].as_i64().unwrap(),
                    "{written}"
                );
            }
        }
    }
}

#[test]
fn check_characters_and_strange_ids_are_as_in_the_original() {
    let vectors = vectors();
    for vector in list(&vectors["check"]) {
        let (body, check) = (text(&vector["body"]), text(&vector["check"]));
        // As the slug of a pool with one digit: the check of `body` and the digit 0, which weighs nothing.
        let id = template(&format!("{body}.sdk")).id(0).unwrap();
        assert_eq!(id, format!("{body}0{check}"));
    }
    for vector in list(&vectors["noncanonical"]) {
        for pair in list(&vector["ids"]) {
            let number = template(text(&vector["template"])).number(text(&pair["id"]).as_bytes());
            assert_eq!(number, pair["n"].as_u64(), "{pair}");
        }
    }
    for vector in list(&vectors["never_valid"]) {
        for id in list(&vector["ids"]) {
            assert_eq!(template(text(&vector["template"])).number(text(id).as_bytes()), None);
        }
    }
    assert_eq!(template("0.sdk").number(b"0"), None, "the original crashes");
}

#[tokio::test]
async fn pools_live_as_the_document_says() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let http = server.http();
    for (index, scenario) in list(&vectors()["scenarios"]).iter().enumerate() {
        let pool = format!("scenario-{index}");
        for (number, step) in list(&scenario["steps"]).iter().enumerate() {
            play(&http, &pool, text(&scenario["template"]), step, &format!("{} step {number}", scenario["template"]))
                .await;
        }
    }
    server.stop().await;
}

async fn play(http: &Http, pool: &str, template: &str, step: &Value, what: &str) {
    let answer = match text(&step["op"]) {
        "create" => http.form("/pools", &[("name", pool), ("template", template)]).await,
        "info" => http.get(&format!("/pools/{pool}")).await,
        "mint" => http.form(&format!("/pools/{pool}/mint"), &[("n", &step["n"].to_string())]).await,
        "advancePast" => http.form(&format!("/pools/{pool}/advancePast"), &[("id", text(&step["id"]))]).await,
        op @ ("open" | "close") => http.put(&format!("/pools/{pool}/{op}")).await,
        other => panic!("{other}"),
    };
    // The document wins, field by field.
    let expected = |field: &str| match &step["doc"][field] {
        Value::Null => &step[field],
        promised => promised,
    };
    assert_eq!(json!(answer.status), *expected("status"), "{what}: {}", answer.text);
    if answer.status >= 400 {
        assert_eq!(answer.text, format!("{}\n", text(&step["error"])), "{what}");
        return;
    }
    let answer = answer.json();
    for (field, ours) in [("used", "Used"), ("max", "Max"), ("closed", "Closed"), ("template", "Template")] {
        if !expected(field).is_null() {
            assert_eq!(answer[ours], *expected(field), "{what}: {answer}");
        }
    }
    if !expected("result").is_null() {
        assert_eq!(answer, *expected("result"), "{what}");
    }
}
