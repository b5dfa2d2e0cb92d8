//! The promise of a pool: every id once, all of them, whoever asks and whoever is killed.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::join_all;
use tidemark::{
    api::{
        Context, NoParameters,
        noid::{Count, MintNoids, NewPool, SomeIds},
    },
    error::Code,
    noid::Template,
};
use tokio::time::timeout;

use crate::support::{Deployment, Process, eventually, name};

fn pool(template: &str) -> NewPool {
    NewPool { template: template.to_owned(), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_for_the_last_ids_get_exactly_the_rest() {
    let deployment = Deployment::new().await;
    let (one, two) = (deployment.serve().await, deployment.serve().await);
    let client = deployment.client().await;
    for template in [".sdd+37", "x.r10ddk", ".zd+9223372036854775744"] {
        let (parsed, position) = Template::parse(template).unwrap();
        let pool_name = name(&format!("p{}", template.len()));
        client.create_pool(&pool_name, &pool(template)).await.unwrap();
        let callers = (0..60).map(async |caller| {
            let mut all = Vec::new();
            loop {
                let count = Count { n: Some(1 + caller % 4) };
                let ids = client.mint_noids(&pool_name, &count).await.unwrap();
                if ids.is_empty() {
                    return all;
                }
                all.extend(ids);
            }
        });
        let given: Vec<String> = join_all(callers).await.into_iter().flatten().collect();
        let distinct: HashSet<&String> = given.iter().collect();
        assert_eq!(distinct.len(), given.len(), "{template}: an id came twice");
        let rest: HashSet<String> = (position..parsed.end()).map(|number| parsed.id(number).unwrap()).collect();
        assert_eq!(distinct, rest.iter().collect(), "{template}");
        let after = client.pool_info(&pool_name, &NoParameters {}).await.unwrap();
        assert_eq!((after.closed, after.used), (true, parsed.end()), "{template}");
    }
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_repeated_mint_gets_the_same_ids() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let client = deployment.client().await;
    let (pool_name, other) = (name("p"), name("q"));
    client.create_pool(&pool_name, &pool(".sdd+90")).await.unwrap();
    client.create_pool(&other, &pool(".sdd")).await.unwrap();
    let context = Context { idempotency_key: Some("once".parse().unwrap()), ..Default::default() };
    let mint = async |pool, n| client.call_with::<MintNoids>(pool, &Count { n: Some(n) }, &context).await;
    let answers = join_all((0..20).map(|_| mint(&pool_name, 8))).await;
    for answer in answers {
        assert_eq!(answer.unwrap().len(), 8);
    }
    let first = mint(&pool_name, 8).await.unwrap();
    assert_eq!(first, ["90", "91", "92", "93", "94", "95", "96", "97"]);
    assert_eq!(mint(&pool_name, 7).await.unwrap_err().code, Code::Conflict);
    assert_eq!(mint(&other, 8).await.unwrap().first().unwrap(), "00", "another pool is another request");
    assert_eq!(client.mint_noids(&pool_name, &Count { n: Some(9) }).await.unwrap(), ["98", "99"]);
    let stats = client.noid_stats(&NoParameters {}).await.unwrap();
    assert_eq!(stats.minted, 8 + 8 + 2, "repeats are not counted");
    // Nothing is no answer to remember.
    let closed = name("closed");
    client.create_pool(&closed, &pool(".sd")).await.unwrap();
    client.close_pool(&closed, &NoParameters {}).await.unwrap();
    assert!(mint(&closed, 3).await.unwrap().is_empty());
    client.open_pool(&closed, &NoParameters {}).await.unwrap();
    assert_eq!(mint(&closed, 3).await.unwrap(), ["0", "1", "2"]);
    server.stop().await;
    // It outlives the process, and the pool.
    let server = deployment.serve().await;
    assert_eq!(mint(&pool_name, 8).await.unwrap(), first);
    let http = server.http().header("idempotency-key", "over-http");
    let answer = http.form("/pools/q/mint", &[("n", "2")]).await.text;
    assert_eq!(http.form("/pools/q/mint", &[("n", "2")]).await.text, answer);
    assert_eq!(http.form("/pools/q/mint", &[("n", "3")]).await.status, 409);
    let one = server.http().header("idempotency-key", "one");
    assert_eq!(one.form("/pools/q/mint", &[]).await.text, one.form("/pools/q/mint", &[("n", "1")]).await.text);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_id_comes_twice_while_two_processes_on_one_pool_are_killed() {
    const CALLERS: usize = 12;
    const ROUNDS: usize = 6;
    let deployment = Deployment::new().await;
    let spawn = async || deployment.spawn_ready(&["--roles", "noid"]).await;
    let mut processes: [Process; 2] = [spawn().await, spawn().await];
    let (client, pool_name) = (deployment.client().await, name("p"));
    client.create_pool(&pool_name, &pool(".reeddeeddk")).await.unwrap();
    let given: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
    let (total, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (given, total, done) = (given.clone(), total.clone(), done.clone());
            let (client, pool_name) = (client.clone(), pool_name.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    let count = Count { n: Some(1 + caller as i64 % 5) };
                    // A killed process leaves callers without an answer; they ask again.
                    let answer = timeout(Duration::from_secs(1), client.mint_noids(&pool_name, &count)).await;
                    let Ok(Ok(ids)) = answer else { continue };
                    total.fetch_add(ids.len(), Ordering::Relaxed);
                    for id in ids {
                        let earlier = given.lock().unwrap().insert(id.clone(), caller);
                        assert_eq!(earlier, None, "{id} was given before");
                    }
                }
            })
        })
        .collect();
    let (template, _) = Template::parse(".reeddeeddk").unwrap();
    let mut excluded = Vec::new();
    for round in 0..ROUNDS {
        let before = total.load(Ordering::Relaxed);
        // Ids a little ahead of everybody, taken out while they mint.
        let used = eventually("the pool answers", async || {
            client.pool_info(&pool_name, &NoParameters {}).await.ok().map(|pool| pool.used)
        })
        .await;
        let numbers: Vec<u64> = (used..used + 3000).step_by(7).collect();
        let some = SomeIds { ids: Vec::new(), numbers: numbers.clone() };
        if let Ok(Ok(after)) = timeout(Duration::from_secs(1), client.exclude_noids(&pool_name, &some)).await {
            // Those that were minted before the answer are none of its business.
            excluded.extend(numbers.into_iter().filter(|number| *number >= after.used));
        }
        eventually("ids are given", async || (total.load(Ordering::Relaxed) > before + 300).then_some(())).await;
        processes[round % 2].kill();
        processes[round % 2] = spawn().await;
    }
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    let given = std::mem::take(&mut *given.lock().unwrap());
    assert!(excluded.len() > 100, "only {} were excluded in time", excluded.len());
    for id in excluded.iter().map(|number| template.id(*number).unwrap()) {
        assert!(!given.contains_key(&id), "{id} was excluded, and minted");
    }
    let last = given.keys().map(|id| template.number(id.as_bytes()).unwrap()).max().unwrap();
    assert!(last < client.pool_info(&pool_name, &NoParameters {}).await.unwrap().used);
}
