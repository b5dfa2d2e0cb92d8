//! `tidemark up`: its data folder, its ports, its end.

use std::{collections::HashMap, os::unix::fs::PermissionsExt};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::{UpInstance, tidemark};

#[tokio::test]
async fn a_second_up_finds_its_data_again() {
    let folder = tempfile::tempdir().unwrap();
    // The user that PostgreSQL runs as, if we are root, must get in.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let data = folder.path().join("data");
    let mut first = UpInstance::start(data.clone()).await;
    let caller = first.http().key(&first.env["TIDEMARK_API_KEY"]);
    caller.post("/v1/config/increment", json!({"key": "k", "base": 0})).await;
    assert_eq!(caller.get("/v1/id/increment?key=k").await.json()["data"]["id"], json!([1]));
    for file in ["env", "service.env", "secrets.json", "nats/nats.conf"] {
        let mode = data.join(file).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{file} is for its owner only");
    }

    // In use, so nobody else may have it.
    let (code, _, err) = tidemark(&up(data.to_str().unwrap()), HashMap::new()).await;
    assert!(code == Some(1) && err.contains("is in use by another `tidemark up`"), "{err}");

    // The welcome's commands can be pasted.
    let pasted = first.process.printed_lines("  . ");
    assert_eq!(pasted.len(), 3);
    for line in pasted {
        let output = tokio::process::Command::new("bash").args(["-c", line.trim()]).output().await.unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && printed.contains("100"), "{line}: {printed}");
    }

    // A key that is revoked stays so, and does not stop the next start.
    let id = first.env["TIDEMARK_API_KEY_GLO_BEX"].split('_').nth(1).unwrap();
    assert_eq!(caller.delete(&format!("/v1/admin/keys/{id}")).await.status, 200);

    first.process.signal(Signal::SIGINT);
    let (code, printed) = first.process.ended().await;
    assert_eq!(code, Some(0), "{printed}");

    let mut second = UpInstance::start(data.clone()).await;
    let secrets = ["TIDEMARK_WEBHOOK_SECRET", "TIDEMARK_WEBHOOK_SECRET_ACME"].map(|name| &first.env[name]);
    assert!(secrets[0] != secrets[1] && secrets.iter().all(|secret| secret.starts_with("whsec_")), "{secrets:?}");
    for same in [
        "TIDEMARK_ADMIN_TOKEN",
        "TIDEMARK_API_KEY",
        "TIDEMARK_API_KEY_ACME",
        "TIDEMARK_WEBHOOK_SECRET",
        "TIDEMARK_WEBHOOK_SECRET_ACME",
    ] {
        assert_eq!(second.env[same], first.env[same], "{same}");
    }
    let revoked = second.http().key(&second.env["TIDEMARK_API_KEY_GLO_BEX"]);
    assert_eq!(revoked.get("/v1/id/increment?key=k").await.status, 401);
    let caller = second.http().key(&second.env["TIDEMARK_API_KEY_ACME"]);
    assert_eq!(caller.get("/v1/id/increment?key=k").await.json()["data"]["id"], json!([2]));

    // Killed without a word, servers and all: the next one waits for what is left of them, and nothing is lost.
    second.process.kill();
    let third = UpInstance::start(data.clone()).await;
    let caller = third.http().key(&third.env["TIDEMARK_API_KEY"]);
    let next = caller.get("/v1/id/increment?key=k").await.json()["data"]["id"][0].as_i64().unwrap();
    assert!(next > 2, "{next}");
}

fn up(data: &str) -> Vec<&str> {
    vec!["up", "--data", data, "--http-port", "0", "--nats-port", "0", "--pg-port", "0"]
}

#[tokio::test]
async fn what_is_wrong_is_one_clear_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let none = HashMap::new;
    let variable = |name: &str, value: &str| HashMap::from([(name.to_owned(), value.to_owned())]);

    std::fs::create_dir(path("old")).unwrap();
    std::fs::write(path("old/format"), "0").unwrap();
    std::fs::create_dir(path("strange")).unwrap();
    std::fs::write(path("strange/thesis.doc"), "").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let busy = |option| {
        let mut arguments = vec!["up".to_owned(), "--data".into(), path("busy")];
        for port_option in ["--http-port", "--nats-port", "--pg-port"] {
            let port = if port_option == option { port.clone() } else { "0".into() };
            arguments.extend([port_option.to_owned(), port]);
        }
        arguments
    };
    let plain = |name: &str| up(&path(name)).into_iter().map(str::to_owned).collect::<Vec<_>>();

    let mut no_tools = variable("PATH", "/nowhere");
    no_tools.insert("TIDEMARK_CACHE".into(), path("empty cache"));

    for (arguments, environment, mentions) in [
        (plain("old"), none(), "made by another version of Tidemark"),
        (plain("strange"), none(), "is not empty and no data folder of Tidemark"),
        (busy("--http-port"), none(), "--http-port"),
        (busy("--nats-port"), none(), "--nats-port"),
        (busy("--pg-port"), none(), "--pg-port"),
        (plain("new"), variable("TIDEMARK_TENANTS", "a.b"), "TIDEMARK_TENANTS"),
        (plain("new"), variable("TIDEMARK_TENANTS", "a-b,a_b"), "TIDEMARK_API_KEY_A_B"),
        (plain("new"), variable("TIDEMARK_TENANTS", "tm"), "TIDEMARK_TENANTS"),
        (plain("new"), no_tools, "python3 with pip"),
        (plain("new"), variable("TIDEMARK_NATS_SERVER", "/no/such/binary"), "TIDEMARK_NATS_SERVER"),
        (plain("new"), variable("TIDEMARK_PG_BIN", "/no/such/folder"), "TIDEMARK_PG_BIN"),
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (code, out, err) = tidemark(&arguments, environment).await;
        assert_eq!(code, Some(1), "{arguments:?}: {out}{err}");
        let complaint: Vec<&str> = err.lines().filter(|line| line.starts_with("tidemark: ")).collect();
        assert!(complaint.len() == 1 && complaint[0].contains(mentions), "{arguments:?}: {err}");
    }
}
