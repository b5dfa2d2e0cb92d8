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
    let table = "usage_type,resource_id,value,user_id,metadata.region\ncalls,a,1,ann,eu\ncalls,\"b, c\",2,,\n";
    let (code, printed, problem) = run(&["emit", "--format", "csv", "--fill"], table).await;
    assert!(code == Some(0) && printed.contains("accepted    2"), "{printed}{problem}");
    let database = deployment.database().await;
    let row: (String, String) =
        sqlx::query_as("select user_id, metadata::text from usage_records where resource_id = 'a'")
            .fetch_one(&database)
            .await
            .unwrap();
    assert_eq!(row, ("ann".to_owned(), "{\"region\": \"eu\"}".to_owned()));
    // What is wrong is named, with its line, and nothing of it is sent.
    for (arguments, input, expected) in [
        (&["emit"][..], "{}\nnonsense\n", "line 1: idempotency_key is missing (--fill makes one) (0 records before"),
        (&["emit", "--fill"], "{}\n", "line 1: missing field"),
        (&["emit"], "nonsense\n", "line 1"),
        (&["emit"], "{\"usage_typ\": \"x\"}\n", "unknown field \"usage_typ\""),
        (&["emit", "--format", "csv"], "usage_type,value\ncalls\n", "line 2: 1 cells, but the first line has 2"),
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
