//! How soon a process can be asked.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use futures::future::FutureExt;

use super::{Ground, Measure, Measured, Unit, load::Spread};

pub const ROWS: &[(&str, Measure)] = &[("start of serve to ready", |ground| start(ground).boxed_local())];

/// A process of its own, from its start until `/ready` says yes. The servers are up; the first start, which makes the
/// streams, is not counted.
async fn start(ground: &Ground) -> Measured {
    let mut times = Vec::new();
    for round in 0..=ground.effort.at_most(10) {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let began = Instant::now();
        let process = Process::start(ground, port);
        let url = format!("http://127.0.0.1:{port}/ready");
        while !reqwest::get(&url).await.is_ok_and(|answer| answer.status().is_success()) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if round > 0 {
            times.push(began.elapsed().as_secs_f64());
        }
        drop(process);
    }
    let spread = Spread::of(times);
    let detail = format!("a process of its own (middle half {:.2} to {:.2})", spread.low, spread.high);
    Measured::new(Unit::Seconds, 1.0, spread.middle, detail)
}

/// Ends with what holds it.
struct Process(Child);

impl Process {
    fn start(ground: &Ground, port: u16) -> Self {
        let ourselves = std::env::current_exe().expect("we are a file");
        let serve = Command::new(ourselves)
            // Timers and usage are the database's, and that is the first deployment's.
            .args(["serve", "--roles", "ids,noid,stages,http"])
            .envs(ground.environment("started", port))
            .stdout(Stdio::null())
            .spawn();
        Self(serve.expect("it starts"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
