//! `tidemark id`, contexts and completions.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::support::{Deployment, tidemark, tidemark_reading};

#[tokio::test]
async fn keys_are_made_looked_at_and_used() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let run = async |arguments: &[&str], input: &str| {
        let arguments = [&["id"], arguments].concat();
        tidemark_reading(&arguments, deployment.environment(), input).await
    };
    let printed = async |arguments: &[&str]| {
        let (code, out, err) = run(arguments, "").await;
        assert_eq!(code, Some(0), "{arguments:?}: {err}");
        out
    };
    let made =
        printed(&["config", "set-increment", "orders", "--base", "100", "--strict", "--max-request-delta", "7"]).await;
    assert!(made.contains("most asked  7"), "{made}");
    assert!(made.contains("current     100") && made.contains("mode        strict"), "{made}");
    let parts =
        json!({ "parts": [{ "type": "fixed-chars", "value": "A-" }, { "type": "auto-increment", "length": 3 }] });
    let (code, out, err) = run(&["config", "set-formatted", "invoices"], &parts.to_string()).await;
    assert_eq!(code, Some(0), "{out}{err}");
    let layout = json!({ "base_ts": 1_700_000_000_000_i64, "ts_size": 41, "worker_id_size": 10, "seq_size": 12 });
    let (code, _, err) = run(&["config", "set-snowflake", "events"], &layout.to_string()).await;
    assert_eq!(code, Some(0), "{err}");

    // The kind of a key need not be known.
    assert_eq!(printed(&["next", "orders", "-n", "2"]).await, "101\n102\n");
    assert_eq!(printed(&["next", "invoices"]).await, "A-001\n");
    assert!(printed(&["next", "events"]).await.trim().parse::<u64>().unwrap() > 1 << 40);
    assert_eq!(printed(&["next", "orders", "--type", "increment", "--json"]).await, "[\"103\"]\n");
    let once = ["next", "orders", "--idempotency-key", "x"];
    assert_eq!(printed(&once).await, printed(&once).await);

    assert_eq!(printed(&["config", "list"]).await, "events\tsnowflake\ninvoices\tformatted\norders\tincrement\n");
    assert_eq!(printed(&["config", "list", "inv"]).await, "invoices\tformatted\n");
    assert!(printed(&["config", "show", "orders"]).await.contains("current     104"));
    let shown: Value = serde_json::from_str(&printed(&["config", "show", "invoices", "--json"]).await).unwrap();
    assert_eq!(shown["key"], "invoices");
    let token = printed(&["token", "orders"]).await;
    assert!(token.starts_with("tmt_") && printed(&["token", "orders", "--reset"]).await != token);
    assert!(printed(&["given", "orders", "101"]).await.contains("numbers     101 to 102"));

    for (arguments, input, mentions) in [
        (&["next", "nothing"][..], "", "key not found: nothing"),
        (&["next", "orders", "--type", "formatted"], "", "not found"),
        (&["next", "orders", "-n", "5000"], "", "must lie between 1 and 1000"),
        (&["next", "a.b"], "", "invalid value"),
        (&["config", "show", "nothing"], "", "key not found"),
        (&["config", "set-formatted", "x"], "{\"parts\": 7}", "stdin: parts"),
        (&["config", "set-formatted", "x", "/nowhere.json"], "", "/nowhere.json: No such file"),
        (&["config", "set-increment", "orders", "--base", "1"], "", "base"),
    ] {
        let (code, _, err) = run(arguments, input).await;
        assert!(code != Some(0) && err.contains(mentions), "{arguments:?}: {err}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_context_names_a_deployment() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("tidemark");
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("staging.env");
    std::fs::write(&file, format!("# ours\nexport NATS_URL='{}'\n", deployment.nats_url)).unwrap();
    // What the environment says otherwise does not count.
    let environment = HashMap::from([
        ("XDG_CONFIG_HOME".to_owned(), home.path().to_str().unwrap().to_owned()),
        ("NATS_URL".to_owned(), "nats://127.0.0.1:1".to_owned()),
    ]);
    let run = async |arguments: &[&str]| tidemark(arguments, environment.clone()).await;
    let (code, _, err) = run(&["--context", "staging", "id", "config", "set-increment", "k"]).await;
    assert_eq!(code, Some(0), "{err}");
    let (code, out, err) = run(&["id", "next", "k", &format!("--context={}", file.display())]).await;
    assert_eq!((code, out.as_str()), (Some(0), "1\n"), "{err}");
    let mut by_variable = environment.clone();
    by_variable.insert("TIDEMARK_CONTEXT".into(), "staging".into());
    assert_eq!(tidemark(&["id", "next", "k"], by_variable).await.1, "2\n");

    let (code, _, err) = run(&["--context", "production", "id", "next", "k"]).await;
    assert!(code == Some(1) && err.contains("production.env") && err.contains("there are: staging"), "{err}");
    std::fs::write(&file, "nonsense\n").unwrap();
    let (code, _, err) = run(&["--context", "staging", "id", "next", "k"]).await;
    assert!(code == Some(1) && err.contains("staging.env:1: must read NAME=value"), "{err}");
    server.stop().await;
}

#[tokio::test]
async fn shells_complete_our_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, out, err) = tidemark(&["completions", shell], HashMap::new()).await;
        assert_eq!(code, Some(0), "{err}");
        assert!(out.contains("set-increment") && out.contains("quarantine"), "{shell}: {out}");
    }
    // A shell that is there can read it.
    let (_, script, _) = tidemark(&["completions", "bash"], HashMap::new()).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), script).unwrap();
    let read = ". \"$0\" && complete -p tidemark";
    let checked = std::process::Command::new("bash").args(["-c", read]).arg(file.path()).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    assert_eq!(tidemark(&["completions", "cobol"], HashMap::new()).await.0, Some(2));
}
