//! The README's tour, pasted as a newcomer would.

use std::{collections::HashMap, path::Path, process::Command};

use crate::support::UpInstance;

/// The blocks of the README that are marked `console`, as commands and what they print.
fn tour() -> Vec<(String, String)> {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let mut steps: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in readme.lines() {
        match line {
            "```console" => inside = true,
            "```" => inside = false,
            _ if !inside => {}
            _ => match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push((format!("{command}\n"), String::new())),
                // A command goes on after a backslash.
                (None, Some((command, _))) if command.ends_with("\\\n") => command.extend([line, "\n"]),
                (None, Some((_, output))) => output.extend([line, "\n"]),
                (None, None) => panic!("output before the first command: {line}"),
            },
        }
    }
    steps
}

#[tokio::test]
async fn the_readme_tells_the_truth() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let up = UpInstance::start(folder.path().join("data")).await;
    // Where the newcomer's shell stands: the release build is on the path here as the one under test.
    let build = Path::new(env!("CARGO_BIN_EXE_tidemark")).parent().unwrap().to_owned();
    let data = up.data.clone();
    let steps = tour();
    assert!(steps.len() >= 8, "the tour has shrunk to {} steps", steps.len());
    // One shell for the whole tour: a variable set in one step is there in the next.
    let mut script = String::from("set -u\n");
    for (index, (command, _)) in steps.iter().enumerate() {
        script.push_str(&format!("echo '<<<{index}'\n{command}"));
        script.push_str("echo\n");
    }
    let run = move || {
        let path = format!("{}:{}", build.display(), std::env::var("PATH").unwrap());
        let environment: HashMap<&str, &str> = HashMap::from([("PATH", path.as_str()), ("HOME", "/tmp")]);
        let root = data.parent().unwrap();
        Command::new("bash").arg("-c").arg(&script).env_clear().envs(environment).current_dir(root).output().unwrap()
    };
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    for (index, (command, expected)) in steps.iter().enumerate() {
        let after =
            printed.split(&format!("<<<{index}\n")).nth(1).unwrap_or_else(|| panic!("{command} never ran: {errors}"));
        let actual = after.split("<<<").next().unwrap();
        let shape = |text: &str| -> Vec<String> {
            text.lines().map(str::trim_end).filter(|line| !line.is_empty()).map(without_times).collect()
        };
        assert_eq!(shape(actual), shape(expected), "$ {command}{errors}");
    }
}

/// Times differ from run to run; the README shows them as `…`.
fn without_times(line: &str) -> String {
    let mut words: Vec<String> = line.split('"').map(str::to_owned).collect();
    for word in &mut words {
        if word.ends_with('Z') && word.contains('T') && word.starts_with("20") {
            *word = "…".into();
        }
    }
    words.join("\"")
}
