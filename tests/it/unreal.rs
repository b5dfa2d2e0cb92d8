//! The header for Unreal editors, compiled with the system's C++ compiler, against a running service.

use std::{path::Path, process::Command};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use uuid::Uuid;

use crate::support::Deployment;

fn run(program: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn an_editor_allocates_a_stage() {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("skipped: this machine has no C++ compiler");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("test-stage");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/unreal/TestStage.cpp");
    let strict = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"];
    run(Path::new("c++"), &[&strict[..], &[program.to_str().unwrap(), source.to_str().unwrap()]].concat());
    assert_eq!(run(&program, &[]), "ok\n");

    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    // The program writes the request and reads the answer; we are the wire between.
    let ask = async |request_id: &str| {
        let mut wire = TcpStream::connect(&address).await.unwrap();
        wire.write_all(run(&program, &[request_id]).as_bytes()).await.unwrap();
        let mut response = String::new();
        wire.read_to_string(&mut response).await.unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        run(&program, &[head.split(' ').nth(1).unwrap(), body])
    };
    let id = Uuid::new_v4().simple().to_string().to_uppercase();
    assert_eq!(ask(&id).await, "allocated 1\n");
    assert_eq!(ask(&id).await, "allocated 1\n", "a repeat");
    assert_eq!(ask("not-a-uuid").await, "failed 0\n");
    assert_eq!(ask(&Uuid::new_v4().to_string()).await, "allocated 2\n");
    assert_eq!(ask(&id).await, "allocated 1\n");
    assert_eq!(ask(&id).await, "retry 0\n", "the sixth within ten seconds");
    server.stop().await;
}
