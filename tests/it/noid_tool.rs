//! `noid-tool`, and `tidemark noid` against a running deployment.

use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::support::{Deployment, tidemark};

/// Starts it with pipes at all ends.
fn spawn(arguments: &[&str]) -> Child {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_noid-tool"));
    tool.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs it on this input: exit code, stdout, stderr.
fn noid_tool(arguments: &[&str], input: &str) -> (Option<i32>, String, String) {
    let mut child = spawn(arguments);
    // It may have enough before we are done, and closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn prints(arguments: &[&str], input: &str, expected: &str) {
    let (code, printed, errors) = noid_tool(arguments, input);
    assert_eq!((code, printed.as_str()), (Some(0), expected), "{arguments:?}: {errors}");
}

#[test]
fn it_prints_what_the_original_prints() {
    prints(&["valid", ".reeddeeddk", "rj430b984", "nothing"], "", "189506\trj430b984\n-1\tnothing\n");
    prints(&["valid", ".sd"], "7\n\n8\r\nx\n9", "7\t7\n-1\t\n8\t8\n-1\tx\n9\t9\n");
    prints(&["generate", ".sd", "0", "9", "10", "-1", "x", "+3", ""], "", "0\t0\n9\t9\n10\t\n-1\t\nx\t\n+3\t3\n\t\n");
    prints(&["generate", "id.zd"], "12\n18446744073709551616\n", "12\tid12\n18446744073709551616\t\n");
    prints(
        &["info", ".sdd+50", ".zd+3", "a.r500edek"],
        "",
        ".sdd+50\tValid, Pos = 50, Max = 100, 50.00% used\n\
         .zd+3\tValid, Pos = 3, Max = -1, 0.00% used\n\
         a.r500edek\tValid, Pos = 0, Max = 8410, 0.00% used\n",
    );
    prints(&["valid", "--ark", "ark:/13030/xf.sddeedk", "ark:/13030/xf93gt2q"], "", "786432\tark:/13030/xf93gt2q\n");
    prints(&["generate", "--ark", "ark:/1/x.sdk", "5"], "", "5\tark:/1/x5h\n");
}

#[test]
fn bad_templates_and_bad_use_are_told_and_end_with_an_error() {
    let (code, printed, errors) = noid_tool(&["info"], ".sd\nnonsense\n.seeeeeeeeeeeee\n");
    assert_eq!(code, Some(1));
    assert_eq!(
        printed,
        ".sd\tValid, Pos = 0, Max = 10, 0.00% used\n\
         nonsense\tInvalid Template: Bad Template String\n\
         .seeeeeeeeeeeee\tInvalid Template: Bad Template String\n"
    );
    assert!(errors.contains("nonsense: ") && errors.contains("2^63-1"), "{errors}");
    for arguments in [&["valid", "nonsense", "x"][..], &["generate", ".sdd+101"], &["valid", "--ark", ".sdk"]] {
        let (code, printed, errors) = noid_tool(arguments, "");
        assert_eq!((code, printed.as_str()), (Some(1), ""), "{arguments:?}");
        assert!(errors.starts_with("noid-tool: "), "{errors}");
    }
    for arguments in [&[][..], &["valid"], &["generate"], &["frobnicate"], &["info", "--colour"]] {
        let (code, printed, errors) = noid_tool(arguments, "");
        assert_eq!((code, printed.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(errors.contains("Usage"), "{errors}");
    }
}

#[test]
fn bytes_that_are_no_text_are_no_ids_and_come_back_as_they_were() {
    let mut child = spawn(&["valid", ".sd"]);
    child.stdin.take().unwrap().write_all(b"\xff\xfe\n5\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"-1\t\xff\xfe\n5\t5\n");
}

#[test]
fn an_answer_comes_before_the_next_question() {
    let mut child = spawn(&["valid", ".sd"]);
    let (mut questions, mut answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    for _ in 0..3 {
        questions.write_all(b"7\n").unwrap();
        let mut answer = [0; 4];
        answers.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"7\t7\n");
    }
    drop(questions);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_reader_who_has_seen_enough_is_no_error() {
    let mut child = spawn(&["valid", ".sd"]);
    drop(child.stdout.take());
    let _ = child.stdin.take().unwrap().write_all("7\n".repeat(200_000).as_bytes());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn long_work_shows_its_progress_on_a_terminal() {
    let pty = nix::pty::openpty(None, None).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_noid-tool"))
        .args(["valid", ".sdd"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(std::fs::File::from(pty.slave))
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let seen = Arc::new(AtomicBool::new(false));
    let watching = std::thread::spawn({
        let (seen, mut terminal) = (seen.clone(), std::fs::File::from(pty.master));
        move || {
            let (mut shown, mut buffer) = (String::new(), [0; 4096]);
            while let Ok(length @ 1..) = terminal.read(&mut buffer) {
                shown.push_str(&String::from_utf8_lossy(&buffer[..length]));
                seen.fetch_or(shown.contains(" lines"), Ordering::Relaxed);
            }
        }
    });
    // As long as it takes until the bar shows; more than a second.
    let (block, began) = ("42\n".repeat(10_000), Instant::now());
    while !seen.load(Ordering::Relaxed) {
        assert!(began.elapsed() < Duration::from_secs(30), "there is no bar");
        input.write_all(block.as_bytes()).unwrap();
    }
    drop(input);
    assert!(child.wait().unwrap().success());
    watching.join().unwrap();
}

#[tokio::test]
async fn the_verbs_tend_a_running_pool() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let run = async |line: &str| {
        let arguments: Vec<&str> = ["noid"].into_iter().chain(line.split(' ')).collect();
        tidemark(&arguments, deployment.environment()).await
    };
    let succeed = async |line: &str| {
        let (code, printed, errors) = run(line).await;
        assert_eq!(code, Some(0), "{line}: {errors}");
        printed
    };
    let json = async |line: &str| -> Value { serde_json::from_str(&succeed(line).await).unwrap() };

    let made = succeed("create p .reeddeeddk --low-water 100").await;
    assert!(made.contains("template    .reeddeeddk+0\n") && made.contains("state       open\n"), "{made}");
    assert_eq!(succeed("list").await, "p\n");
    assert_eq!(succeed("peek p 2").await, "000000000\n02870v844\n");
    assert_eq!(succeed("mint p").await, "000000000\n");
    assert_eq!(succeed("mint p 1500").await.lines().count(), 1500);
    let once = succeed("mint p 2 --idempotency-key k").await;
    assert_eq!(succeed("mint p 2 --idempotency-key k").await, once);
    assert_eq!(json("info p --json").await["Used"], 1503);
    assert_eq!(succeed("validate p rj43-0b984 --lenient").await, "189506\n");
    assert_eq!(json("advance p rj430b984 --json").await["Template"], ".reeddeeddk+189507");
    assert!(succeed("close p").await.contains("state       closed\n"));
    assert_eq!(succeed("mint p").await, "");
    assert!(succeed("open p").await.contains("state       open\n"));
    assert_eq!(json("low-water p --json").await.get("LowWater"), None);

    // A dump of ids in use: the last one in the pool's order counts, wherever it stands.
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    succeed("create q .sdddd").await;
    let dump = file("dump", "0017\n3141\nREADME\n0005\n");
    assert_eq!(succeed(&format!("import q {dump} --dry-run")).await, "");
    assert_eq!(json("info q --json").await["Used"], 0);
    assert_eq!(json(&format!("import q {dump} --json")).await["Used"], 3142);
    let ids = file("ids", &(3142..9000).map(|number| format!("{number}\n")).collect::<String>());
    assert_eq!(json(&format!("exclude q {ids} --json")).await["Excluded"], 5858);
    assert_eq!(succeed("mint q").await, "9000\n");
    let state = file("state", &succeed("export q").await);
    assert_eq!(json(&format!("restore r {state} --json")).await["Template"], ".sdddd+9001");
    assert_eq!(succeed("mint r").await, "9001\n");
    assert_eq!(json("list --json").await, json!(["p", "q", "r"]));

    for (line, said) in [
        ("create p .sd", "name already exists"),
        ("create x nonsense", "Bad Template String"),
        ("info none", "Pool could not be found"),
        ("mint p 2000 --idempotency-key k", "count is out of range"),
        ("advance p x", "Id is invalid"),
        ("import q /nowhere", "/nowhere"),
        (&format!("import p {dump}"), "none of the 4 lines"),
        (&format!("restore r {state}"), "name already exists"),
        ("info a.b", "invalid key format"),
    ] {
        let (code, _, errors) = run(line).await;
        assert!(code != Some(0) && errors.contains(said), "{line}: {errors}");
    }
    server.stop().await;
}
