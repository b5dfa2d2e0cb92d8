//! `tidemark usage`.

use serde_json::{Value, json};

use crate::{
    support::{Deployment, Process, tidemark, tidemark_reading},
    usage::{ledger, record},
};

#[tokio::test]
async fn usage_at_the_command_line() {
    let (deployment, server, http) = ledger().await;
    let run = async |arguments: &[&str], input: &str| {
        let arguments = [&["usage"], arguments].concat();
        let (code, printed, problem) = tidemark_reading(&arguments, deployment.environment(), input).await;
        (code, printed, problem)
    };
    // One from arguments, and the same again.
    let one = [
        "emit",
        "--type",
        "calls",
        "--resource",
        "r",
        "--value",
        "2.50",
        "--key",
        "k1",
        "--at",
        "2026-01-01T00:00:00Z",
    ];
    let (code, _, problem) = run(&one, "").await;
    assert!(code == Some(1) && problem.contains("grace_period_exceeded"), "{problem}");
    let one = ["emit", "--type", "calls", "--resource", "r", "--value", "2.50", "--json"];
    let (code, printed, problem) = run(&one, "").await;
    assert_eq!(code, Some(0), "{problem}");
    assert_eq!(
        serde_json::from_str::<Value>(&printed).unwrap(),
        json!({"accepted": 1, "duplicates": 0, "buffered": 0, "rejected": 0})
    );
    // Many from stdin: an object per line, or a table.
    let known = record("calls", "r", 1);
    let lines = format!("{known}\n\n{known}\n{{\"usage_type\": \"bytes\", \"resource_id\": \"x\", \"value\": 7}}\n");
    let (code, printed, problem) = run(&["emit", "--fill"], &lines).await;
    assert_eq!(code, Some(0), "{problem}");
    assert!(printed.contains("accepted    2") && printed.contains("duplicates  1"), "{printed}");
    let table =
        "\u{feff}usage_type,resource_id,value,user_id,metadata.region\ncalls,a,1,ann,eu\ncalls,\"b,\n\"\"c\"\"\",2,,\n";
    let (code, printed, problem) = run(&["emit", "--format", "csv", "--fill"], table).await;
    assert!(code == Some(0) && printed.contains("accepted    2"), "{printed}{problem}");
    let database = deployment.database().await;
    let row: (String, String) =
        sqlx::query_as("select user_id, metadata::text from usage_records where resource_id = 'a'")
            .fetch_one(&database)
            .await
            .unwrap();
    assert_eq!(row, ("ann".to_owned(), "{\"region\": \"eu\"}".to_owned()));
    let multiline = "select count(*) from usage_records where resource_id = $1";
    let multiline: i64 = sqlx::query_scalar(multiline).bind("b,\n\"c\"").fetch_one(&database).await.unwrap();
    assert_eq!(multiline, 1);
    // What stands before a line that can't be read is sent, and counted.
    let (code, printed, problem) = run(&["emit"], &format!("{known}\nnonsense\n")).await;
    assert!(code == Some(1) && printed.contains("duplicates  1"), "{printed}");
    assert!(problem.contains("line 2: ") && problem.contains("(1 records before it were sent"), "{problem}");
    // What is wrong is named, with its line, and nothing of it is sent.
    for (arguments, input, expected) in [
        (&["emit"][..], "{}\nnonsense\n", "line 1: idempotency_key is missing (--fill makes one) (0 records before"),
        (&["emit", "--fill"], "{}\n", "line 1: missing field"),
        (&["emit"], "nonsense\n", "line 1"),
        (&["emit"], "{\"usage_typ\": \"x\"}\n", "unknown field \"usage_typ\""),
        (&["emit", "--fill"], "{\"value\": 1, \"value\": 2}\n", "line 1: \"value\" is there twice"),
        (&["emit", "--format", "csv"], "usage_type,value\ncalls\n", "line 2: 1 cells, but the first line has 2"),
        (&["emit", "--format", "csv"], "value,value\n1,2\n", "line 1: \"value\" is there twice"),
        (&["emit", "--format", "csv"], "value\n\"2\n3\n", "line 2: a quote is not closed"),
        (&["emit", "--format", "csv"], "value\r1\r2\r", "line 1: lines must end with a line feed"),
        (&["emit", "--type", "calls"], "", "--resource"),
        (&["emit", "--source", "a b"], "", "invalid key format"),
    ] {
        let (code, _, problem) = run(arguments, input).await;
        assert!(code.is_some_and(|code| code != 0) && problem.contains(expected), "{arguments:?}: {problem}");
    }
    // What was refused is listed and replayed.
    let (code, _, problem) = run(&["emit", "--type", "unheard", "--resource", "r", "--value", "1"], "").await;
    assert!(code == Some(1) && problem.contains("type_not_found"), "{problem}");
    let (_, listed, _) = run(&["quarantine", "--code", "type_not_found"], "").await;
    let id = listed.split('\t').next().unwrap().to_owned();
    let (code, _, problem) = run(&["replay", &id], "").await;
    assert!(code == Some(1) && problem.contains("no unit"), "{problem}");
    http.unit("unheard", "gauge").await;
    let (code, printed, problem) = run(&["replay", &id], "").await;
    assert!(code == Some(0) && printed.contains("accepted    1"), "{printed}{problem}");
    let (_, printed, _) = run(&["units"], "").await;
    assert!(printed.contains("bytes\tcounter\tone\tdefault"), "{printed}");
    let (_, printed, _) = run(&["status"], "").await;
    assert!(printed.contains("records     6") && printed.contains("emitted ="), "{printed}");
    server.stop().await;
}

#[tokio::test]
async fn tail_shows_what_is_published_and_refused() {
    let (deployment, server, http) = ledger().await;
    let mut tail = Process::spawn(&["usage", "tail"], deployment.environment());
    let mut refused =
        Process::spawn(&["usage", "tail", "--rejected", "--count", "1", "--json"], deployment.environment());
    // Until somebody listens, nobody hears.
    let seen = async |tail: &mut Process, text: &str| {
        tokio::time::timeout(std::time::Duration::from_millis(300), tail.prints(text)).await.is_ok()
    };
    let mut heard = false;
    for number in 0..100 {
        let resource = format!("resource-{number}");
        http.verdict(json!([record("calls", &resource, 5), record("unheard", &resource, 6)])).await;
        heard = seen(&mut tail, &resource).await;
        if heard {
            break;
        }
    }
    assert!(heard);
    tail.prints("refused\tdefault\ttype_not_found").await;
    let (code, printed) = refused.ended().await;
    let entry: Value = serde_json::from_str(printed.lines().next().unwrap()).unwrap();
    assert_eq!((code, &entry["record"]["reason"]["code"]), (Some(0), &json!("type_not_found")));
    let (code, ..) = tidemark(&["usage", "tail", "--count", "x"], deployment.environment()).await;
    assert_eq!(code, Some(2));
    tail.kill();
    server.stop().await;
}

#[tokio::test]
async fn without_a_service_the_command_says_so() {
    let deployment = Deployment::new().await;
    let (code, _, problem) = tidemark(&["usage", "units"], deployment.environment()).await;
    assert!(code == Some(1) && problem.contains("nobody answers on tm.usage.units.default"), "{problem}");
}

#[tokio::test]
async fn backfills_and_reports_at_the_command_line() {
    let (deployment, _server, http) = ledger().await;
    let run = async |arguments: &[&str], input: &str| {
        let arguments = [&["usage"], arguments].concat();
        tidemark_reading(&arguments, deployment.environment(), input).await
    };
    let day = (chrono::Utc::now() - chrono::TimeDelta::days(3)).date_naive();
    let (from, to) = (format!("{day}T00:00:00Z"), format!("{day}T12:00:00Z"));
    let range = ["backfill", "--type", "calls", "--from", &from, "--to", &to, "--reason", "a meter was wrong"];
    // More than one request, as a table.
    let mut table = "usage_type,resource_id,value,event_timestamp,idempotency_key\n".to_owned();
    for n in 0..2500 {
        table.push_str(&format!("calls,r{},0.5,{day}T01:00:00Z,key-{n}\n", n % 2));
    }
    let (code, printed, problem) =
        run(&[&range[..], &["--format", "csv", "--blocking", "--json"]].concat(), &table).await;
    assert_eq!(code, Some(0), "{problem}");
    let done: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&done["status"], &done["events_added"]), (&json!("completed"), &json!(2500)));
    let id = done["id"].as_str().unwrap();
    // A dry run, and lines that can't be.
    let line = format!(
        r#"{{"usage_type":"calls","resource_id":"r0","value":7,"event_timestamp":"{day}T02:00:00Z","idempotency_key":"k"}}"#
    );
    let (code, printed, problem) = run(&[&range[..], &["--dry-run"]].concat(), &line).await;
    assert!(
        code == Some(0) && printed.contains("archived    2500") && printed.contains("added       1"),
        "{printed}{problem}"
    );
    let outside = line.replace("T02:00", "T13:00");
    let (code, _, problem) = run(&range, &format!("{line}\n{outside}\n")).await;
    assert!(
        code == Some(1) && problem.contains("line 2: event_timestamp") && problem.contains("nothing was changed"),
        "{problem}"
    );
    let (code, _, problem) = run(&range, "nonsense").await;
    assert!(code == Some(1) && problem.contains("line 1"), "{problem}");
    // A pipe that has failed empties nothing.
    let (code, _, problem) = run(&range, "").await;
    assert!(code == Some(1) && problem.contains("--allow-empty"), "{problem}");

    let (code, printed, problem) = run(&["report", "--from", &from], "").await;
    assert_eq!(code, Some(0), "{problem}");
    assert!(printed.contains("derived from the raw records of default"), "{printed}");
    assert!(printed.contains(&format!("calls\tr0\t{day}\t1250 records\t625")), "{printed}");
    // Counters by how much they have grown.
    for (minutes, value) in [(30, 100), (20, 140), (10, 150)] {
        let reading = crate::usage::with(record("bytes", "disk", value), "event_timestamp", crate::usage::ago(minutes));
        assert_eq!(http.verdict(reading).await, (1, 0, vec![]));
    }
    let drawing = std::env::temp_dir().join(format!("tidemark-report-{}.svg", uuid::Uuid::new_v4()));
    let svg = drawing.to_str().unwrap();
    let (code, printed, problem) =
        run(&["report", "--from", &from, "--by", "unit", "--output", "csv", "--svg", svg], "").await;
    assert_eq!(code, Some(0), "{problem}");
    assert_eq!(printed.trim(), "unit,metric_kind,records,total\nbytes,counter,3,50\ncalls,gauge,2500,1250");
    assert!(problem.contains("derived"), "{problem}");
    let drawn = std::fs::read_to_string(&drawing).unwrap();
    std::fs::remove_file(&drawing).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("calls") && drawn.contains("derived from raw records"));
    let (code, printed, _) = run(&["report", "--from", &from, "--by", "unit,day", "--output", "plot"], "").await;
    assert!(code == Some(0) && printed.contains("█"), "{printed}");
    let (_, printed, _) = run(&["report", "--from", &from, "--type", "calls", "--by", "resource", "--json"], "").await;
    let report: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&report["derived"], &report["rows"][0]["total"]), (&json!(true), &json!("625")));

    let (code, printed, problem) = run(&["backfill-revert", id, "--reason", "it was right"], "").await;
    assert!(code == Some(0) && printed.contains("it was right"), "{printed}{problem}");
    let (code, printed, _) = run(&["backfill-status", id], "").await;
    assert!(code == Some(0) && printed.contains("status      completed") && printed.contains("reverted"), "{printed}");
    let (code, _, problem) = run(&["backfill-revert", id, "--reason", "again"], "").await;
    assert!(code == Some(1) && problem.contains("reverted before"), "{problem}");
    let (code, printed, problem) = run(&[&range[..], &["--allow-empty"]].concat(), "").await;
    assert!(code == Some(0) && printed.contains("status      completed"), "{printed}{problem}");
}
