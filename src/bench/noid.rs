//! Noid pools.

use std::{
    io::Write,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use futures::future::FutureExt;

use super::{
    Ground, Measure, Measured, Unit,
    ground::ECHO,
    load::{IN_FLIGHT, rate, requests},
    name,
};
use crate::{
    api::noid::{Count, NewPool},
    client::Client,
    noid::Template,
};

pub const ROWS: &[(&str, Measure)] = &[
    ("noid mint, 64 in flight", |ground| mint(ground, IN_FLIGHT, 0.50).boxed_local()),
    ("noid mint, 256 in flight", |ground| mint(ground, 4 * IN_FLIGHT, 0.60).boxed_local()),
    ("noid mint, 1000 at once", |ground| a_thousand_at_once(ground).boxed_local()),
    ("noid, number to id", |ground| number_to_id(ground).boxed_local()),
    ("noid, id to number", |ground| id_to_number(ground).boxed_local()),
    ("noid-tool valid", |ground| noid_tool_valid(ground).boxed_local()),
];

/// The one that people use.
const TEMPLATE: &str = ".reeddeeddk";

async fn make_pool(client: &Client) {
    let pool = NewPool { template: TEMPLATE.to_owned(), ..Default::default() };
    // Made by the row before, perhaps.
    let _ = client.create_pool(&name("bench"), &pool).await;
}

/// Strict and synced: every answer waits for a write that is on disk.
async fn mint(ground: &Ground, callers: usize, goal: f64) -> Measured {
    make_pool(&ground.client().await).await;
    let nats = ground.nats().await;
    let pairs = ground
        .effort
        .pairs(
            async || requests(&nats, ECHO, callers).await,
            async || requests(&nats, "tm.noid.mint.bench", callers).await,
        )
        .await;
    let detail = pairs.detail("of an echo");
    Measured::new(Unit::Ratio, goal, pairs.ratio.middle, detail)
}

async fn a_thousand_at_once(ground: &Ground) -> Measured {
    let client = ground.client().await;
    make_pool(&client).await;
    let spread = ground
        .effort
        .rounds(async || {
            let client = client.clone();
            let asked = rate(IN_FLIGHT, move || {
                let client = client.clone();
                async move {
                    client.mint_noids(&name("bench"), &Count { n: Some(1000) }).await.expect("ids");
                }
            })
            .await;
            asked * 1000.0
        })
        .await;
    let detail = format!("ids a second, MessagePack (middle half {:.0} to {:.0})", spread.low, spread.high);
    Measured::new(Unit::PerSecond, 1e6, spread.middle, detail)
}

async fn number_to_id(ground: &Ground) -> Measured {
    let (template, _) = Template::parse(TEMPLATE).expect("a template");
    let mut id = Vec::new();
    arithmetic(ground, move |number| {
        id.clear();
        assert!(template.write_id(number, &mut id));
        std::hint::black_box(&id);
    })
    .await
}

async fn id_to_number(ground: &Ground) -> Measured {
    let (template, _) = Template::parse(TEMPLATE).expect("a template");
    let ids: Vec<String> = (0..1024).map(|number| template.id(number * 6_906_000).expect("an id")).collect();
    arithmetic(ground, move |number| {
        let id = &ids[number as usize % ids.len()];
        assert!(std::hint::black_box(template.number(id.as_bytes())).is_some());
    })
    .await
}

/// Lines a second from a pipe through the tool that was built with us.
async fn noid_tool_valid(ground: &Ground) -> Measured {
    const LINES: u64 = 2_000_000;
    let (template, _) = Template::parse(TEMPLATE).expect("a template");
    let mut lines = Vec::new();
    for number in 0..LINES {
        template.write_id(number * 3_500, &mut lines);
        lines.push(b'\n');
    }
    let tool = std::env::current_exe().expect("we are a file").with_file_name("noid-tool");
    let spread = ground
        .effort
        .rounds(async || {
            let began = Instant::now();
            let mut child = Command::new(&tool)
                .args(["valid", TEMPLATE])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .expect("noid-tool stands beside tidemark");
            let mut input = child.stdin.take().expect("a pipe");
            input.write_all(&lines).expect("it reads");
            drop(input);
            assert!(child.wait().expect("it ends").success());
            LINES as f64 / began.elapsed().as_secs_f64()
        })
        .await;
    let detail = format!("lines a second (middle half {:.0} to {:.0})", spread.low, spread.high);
    Measured::new(Unit::PerSecond, 5e6, spread.middle, detail)
}

/// How often a second on one core.
async fn arithmetic(ground: &Ground, mut compute: impl FnMut(u64)) -> Measured {
    let spread = ground
        .effort
        .rounds(async || {
            let (began, mut count) = (Instant::now(), 0_u64);
            while began.elapsed() < Duration::from_millis(300) {
                for number in count..count + 10_000 {
                    compute(number);
                }
                count += 10_000;
            }
            count as f64 / began.elapsed().as_secs_f64()
        })
        .await;
    let detail = format!("one thread (middle half {:.0} to {:.0})", spread.low, spread.high);
    Measured::new(Unit::PerSecond, 1e7, spread.middle, detail)
}
