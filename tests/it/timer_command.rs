//! `tidemark timer`.

use serde_json::Value;

use crate::support::{Deployment, Process, Receiver, soon, tidemark, tidemark_on_a_terminal};

#[tokio::test]
async fn timers_at_the_command_line() {
    let deployment = Deployment::new().await;
    let _server = deployment.serve_with(soon).await;
    let receiver = Receiver::start().await;
    let timer = async |arguments: &[&str]| {
        let (code, printed, problem) = tidemark(&[&["timer"], arguments].concat(), deployment.environment()).await;
        (code == Some(0), if code == Some(0) { printed } else { problem })
    };
    let succeeds = async |arguments: &[&str]| {
        let (ok, printed) = timer(arguments).await;
        assert!(ok, "{arguments:?}: {printed}");
        printed.trim().to_owned()
    };
    let mut watching = Process::spawn(&["timer", "watch", "--count", "3"], deployment.environment());
    let url = format!("{}/x", receiver.url);
    let far = succeeds(&["set", "--in", "2h", "--topic", "a.b", "--payload", "[1]", "--metadata", r#"{"a":1}"#]).await;
    let shown = succeeds(&["get", &far]).await;
    assert!(shown.contains("pending") && shown.contains(r#"{"a":1}"#), "{shown}");
    let secret = ["set", "--in", "1h", "--url", &url, "--header", "X-Token: hunter2", "--every", "1h", "--json"];
    let secret: Value = serde_json::from_str(&succeeds(&secret).await).unwrap();
    let secret = secret["id"].as_str().unwrap();
    assert!(!succeeds(&["get", secret]).await.contains("hunter2"));
    assert!(succeeds(&["get", secret, "--secrets"]).await.contains("hunter2"));
    assert!(succeeds(&["pause", secret]).await.contains("paused"));
    assert!(succeeds(&["resume", secret]).await.contains("pending"));
    assert!(succeeds(&["list", "--status", "pending"]).await.contains(&far));
    let listed: Value = serde_json::from_str(&succeeds(&["list", "--json"]).await).unwrap();
    assert_eq!(listed["total"], 2);
    assert!(
        succeeds(&["move", &far, "--at", "2999-01-01T00:00:00", "--zone", "Europe/Berlin"])
            .await
            .contains("2998-12-31 23:00:00 UTC")
    );

    // Until somebody watches, nobody hears.
    let heard = async |watching: &mut Process, id: &str| {
        let found = tokio::time::timeout(std::time::Duration::from_millis(300), watching.prints(id)).await;
        found.is_ok()
    };
    let mut fired = None;
    for _ in 0..50 {
        let id = succeeds(&["set", "--in", "5ms", "--url", &url]).await;
        if heard(&mut watching, &id).await {
            fired = Some(id);
            break;
        }
    }
    let fired = fired.expect("watch shows what fires");
    assert!(watching.prints(&fired).await.contains("completed"));
    assert!(succeeds(&["attempts", &fired]).await.contains("attempt 1\tcompleted"));
    succeeds(&["fire", secret]).await;
    assert!(watching.prints(secret).await.contains("completed"));
    assert!(succeeds(&["cancel", secret, &far]).await.contains("timer canceled successfully"));
    assert_eq!(watching.ended().await.0, Some(0));

    let (ok, problem) = timer(&["cancel", &far]).await;
    assert!(!ok && problem.contains("1 of 1 were not canceled"), "{problem}");
    let first = succeeds(&["secret"]).await;
    assert!(first.starts_with("whsec_"));
    assert_ne!(succeeds(&["secret", "--rotate"]).await, first);
    for (arguments, problem) in [
        (&["retry", &fired][..], "cannot retry timer with status 'completed'"),
        (&["get", "nonsense"], "must be a UUID"),
        (&["set", "--in", "1h"], "--url"),
        (&["set", "--in", "yesterday", "--topic", "a"], "execute_in"),
        (&["set", "--topic", "a", "--payload", "{"], "--payload"),
        (&["get", &far, "--tenant", "other"], "timer not found"),
        (&["get", &far, "--tenant", "a.b"], "invalid key format"),
    ] {
        let (ok, printed) = timer(arguments).await;
        assert!(!ok && printed.contains(problem), "{arguments:?}: {printed}");
    }
}

#[tokio::test]
async fn people_see_tables_colours_and_distances() {
    let deployment = Deployment::new().await;
    let _server = deployment.serve().await;
    let set = ["timer", "set", "--in", "3h", "--topic", "a.b"];
    let (code, id, err) = tidemark(&set, deployment.environment()).await;
    assert_eq!(code, Some(0), "{err}");
    let (code, shown) = tidemark_on_a_terminal(&["timer", "list"], deployment.environment()).await;
    assert_eq!(code, Some(0), "{shown}");
    let [names, row] = shown.lines().collect::<Vec<_>>()[..] else { panic!("a line of names and one row: {shown}") };
    assert!(names.starts_with("\u{1b}[2mtimer\u{1b}[0m "), "names are dim: {names:?}");
    assert!(row.contains("\u{1b}[33mpending\u{1b}[0m"), "what waits is yellow: {row:?}");
    assert!(row.contains("(in 2 h)") && row.starts_with(id.trim()) && !row.contains('\t'), "{row:?}");
    // The same for a script, or for whoever wants no colours.
    let (_, piped, _) = tidemark(&["timer", "list"], deployment.environment()).await;
    assert!(piped.contains("\tpending") && !piped.contains('\u{1b}') && !piped.contains("in 2 h"), "{piped:?}");
    let mut plain = deployment.environment();
    plain.insert("NO_COLOR".into(), "1".into());
    let (_, shown) = tidemark_on_a_terminal(&["timer", "list"], plain).await;
    assert!(shown.contains("(in 2 h)") && !shown.contains('\u{1b}'), "{shown:?}");
    let (_, shown) = tidemark_on_a_terminal(&["instances"], deployment.environment()).await;
    assert!(shown.contains("ranges held") && (shown.contains(" s ago)") || shown.contains("(now)")), "{shown:?}");
}
