//! Counting, on a real bucket: group commit, lost answers, idempotent requests.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_nats::{HeaderMap, header, jetstream};
use bytes::Bytes;
use futures::future::join_all;
use serde::{Deserialize, Serialize};
use tidemark::{
    api::{Info, Operation, ids::Increment},
    config::Config,
    error::{Code, Error, Result},
    jetstream::{Bucket, CasError, Message, PublishError, Write, declarations, publish, publish_batch},
    watermark::{Absent, Bounds, Cells, Mark, Once, RangeSettings, Ranges, State, Steps},
};

use crate::support::{Deployment, Proxy, eventually, name};

const DEADLINE: Duration = Duration::from_secs(10);
const INFO: &Info = &Increment::INFO;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Count(i64);

impl State for Count {}

/// A deployment with its buckets, and a second way to get at them.
async fn bucket(url: &str) -> Bucket {
    let nats = tidemark::jetstream::connect_to(async_nats::ConnectOptions::new(), url).await.unwrap();
    let mut context = jetstream::new(nats);
    context.set_timeout(Duration::from_secs(2));
    for declaration in declarations(&Config::from_parts(None, Default::default()).unwrap()) {
        tidemark::jetstream::apply(&context, &declaration).await.unwrap();
    }
    tidemark::watermark::bucket(context, &name("tm"))
}

fn increment(state: &mut Option<Count>) -> Result<i64> {
    let count = state.get_or_insert(Count(0));
    count.0 += 1;
    Ok(count.0)
}

#[tokio::test]
async fn callers_who_wait_together_share_one_write() {
    let deployment = Deployment::new().await;
    let bucket = bucket(&deployment.nats_url).await;
    let cells = [
        Cells::new(bucket.clone(), "test", DEADLINE),
        Cells::new(bucket.clone(), "test", DEADLINE),
        Cells::new(bucket, "test", DEADLINE),
    ];
    let answers = join_all((0..900).map(|caller| cells[caller % 3].change("k", None, increment))).await;
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.unwrap()).collect();
    let numbers: BTreeSet<i64> = answers.iter().map(|committed| committed.answer).collect();
    assert_eq!(numbers, (1..=900).collect(), "strict: no number twice, none left out");
    let writes: BTreeSet<u64> = answers.iter().map(|committed| committed.revision).collect();
    assert!(writes.len() < 90, "{} writes for 900 callers", writes.len());
}

#[tokio::test]
async fn an_answer_that_changes_nothing_is_never_from_old_knowledge() {
    let deployment = Deployment::new().await;
    let bucket = bucket(&deployment.nats_url).await;
    let (here, there) = (Cells::new(bucket.clone(), "test", DEADLINE), Cells::new(bucket, "test", DEADLINE));
    here.change("k", None, increment).await.unwrap();
    there.change("k", None, increment).await.unwrap();
    let look = |state: &mut Option<Count>| Ok(state.as_ref().map(|count| count.0));
    assert_eq!(here.change("k", None, look).await.unwrap().answer, Some(2));
    let refuse = |state: &mut Option<Count>| -> Result<()> { Err(Error::invalid(format!("{state:?}"))) };
    there.change("k", None, increment).await.unwrap();
    assert!(here.change("k", None, refuse).await.unwrap_err().message.contains('3'), "a refusal is true as well");
}

#[tokio::test]
async fn a_lost_acknowledgement_is_recognised_by_its_nonce() {
    let deployment = Deployment::new().await;
    bucket(&deployment.nats_url).await;
    let proxy = Proxy::before(&deployment.nats_url).await;
    let cells = Cells::<Count>::new(bucket(&proxy.url).await, "test", DEADLINE);
    let mut given = Vec::new();
    for _ in 0..3 {
        given.push(cells.change("k", None, increment).await.unwrap().answer);
        let (lost, ()) = tokio::join!(cells.change("k", None, increment), proxy.lose_an_acknowledgement());
        given.push(lost.unwrap().answer);
    }
    assert_eq!(given, [1, 2, 3, 4, 5, 6], "the write had happened, was found, and was not done twice");
}

#[tokio::test]
async fn a_lost_acknowledgement_that_others_wrote_over_skips_numbers_and_repeats_none() {
    let deployment = Deployment::new().await;
    let direct = Cells::<Count>::new(bucket(&deployment.nats_url).await, "test", DEADLINE);
    let proxy = Proxy::before(&deployment.nats_url).await;
    let lossy = Cells::<Count>::new(bucket(&proxy.url).await, "test", DEADLINE);
    let done = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = [direct.clone(), lossy.clone(), lossy.clone(), lossy]
        .into_iter()
        .map(|cells| {
            let done = done.clone();
            tokio::spawn(async move {
                let mut given = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    // The direct one goes on while the others are cut off, and moves the mark under them.
                    given.extend(cells.change("k", None, increment).await.ok().map(|committed| committed.answer));
                }
                given
            })
        })
        .collect();
    for _ in 0..4 {
        proxy.lose_an_acknowledgement().await;
    }
    done.store(true, Ordering::Relaxed);
    let mut given = Vec::new();
    for caller in callers {
        given.extend(caller.await.unwrap());
    }
    let distinct: BTreeSet<i64> = given.iter().copied().collect();
    assert_eq!(distinct.len(), given.len(), "a number was given twice");
    let mark = direct.read("k").await.unwrap().unwrap().0;
    assert!(mark as usize > given.len(), "what nobody could know of was skipped: {mark} against {}", given.len());
}

#[tokio::test]
async fn idempotent_changes_of_strict_counters() {
    let deployment = Deployment::new().await;
    let bucket = bucket(&deployment.nats_url).await;
    let cells = [Cells::new(bucket.clone(), "test", DEADLINE), Cells::new(bucket.clone(), "test", DEADLINE)];
    let once =
        |key: &str, asked: &str, window| Once::new(INFO, &name("pool"), &key.parse().unwrap(), &asked, window).unwrap();
    let day = Duration::from_secs(86_400);

    // Mixed with others in the same groups, from two instances at once.
    let repeated = (0..60).map(|caller| cells[caller % 2].change_once("k", None, once("same", "n=1", day), increment));
    let others = (0..60).map(|caller| cells[caller % 2].change("k", None, increment));
    let (repeated, others) = tokio::join!(join_all(repeated), join_all(others));
    let repeated: Vec<_> = repeated.into_iter().map(|answer| answer.unwrap()).collect();
    let first = repeated.iter().filter(|committed| committed.revision > 0).count();
    assert_eq!(first, 1, "one is the first, and the others are told that they repeat");
    let repeated: BTreeSet<i64> = repeated.into_iter().map(|committed| committed.answer).collect();
    assert_eq!(repeated.len(), 1, "{repeated:?}");
    let mut all: Vec<i64> = others.into_iter().map(|answer| answer.unwrap().answer).collect();
    all.extend(&repeated);
    all.sort_unstable();
    assert_eq!(all, (1..=61).collect::<Vec<_>>(), "one number for sixty repeats, and strict as ever");

    let other = cells[0].change_once("k", None, once("same", "n=2", day), increment).await.unwrap_err();
    assert_eq!(other.code, Code::Conflict);
    let refused =
        cells[0].change_once("k", None, once("refused", "", day), |_| Err::<i64, _>(Error::invalid("no"))).await;
    assert_eq!(refused.unwrap_err().code, Code::InvalidRequest);
    assert_eq!(
        cells[0].change_once("k", None, once("refused", "", day), increment).await.unwrap().answer,
        62,
        "a refusal is not kept"
    );

    // Many equal ones that are refused together.
    let no = |_: &mut Option<Count>| Err::<i64, _>(Error::invalid("no"));
    let many = join_all((0..300).map(|_| cells[0].change_once("k", None, once("never", "", day), no))).await;
    assert!(many.iter().all(|answer| answer.as_ref().is_err_and(|error| error.code == Code::InvalidRequest)));
    // The same key for two requests at once, which differ.
    let mixed = ["a", "b"].map(|asked| cells[0].change_once("k", None, once("mixed", asked, day), increment));
    let codes: Vec<_> = join_all(mixed).await.into_iter().map(|answer| answer.err().map(|error| error.code)).collect();
    assert!(codes.contains(&None) && codes.contains(&Some(Code::Conflict)), "{codes:?}");

    // After the window it is a new request.
    let short = || once("short", "", Duration::from_secs(1));
    let first = cells[0].change_once("k", None, short(), increment).await.unwrap().answer;
    eventually("the record expires", async || short().find::<i64>(&bucket).await.unwrap().is_none().then_some(()))
        .await;
    assert!(cells[0].change_once("k", None, short(), increment).await.unwrap().answer > first);
}

#[tokio::test]
async fn a_broken_counter_harms_itself_only_and_is_never_reset() {
    let deployment = Deployment::new().await;
    let bucket = bucket(&deployment.nats_url).await;
    let cells = Cells::<Count>::new(bucket.clone(), "test", DEADLINE);
    let broken = Write { key: "broken".into(), value: Bytes::from("{"), expected: Some(0), ttl: None };
    bucket.write(&[broken]).await.unwrap();
    assert_eq!(cells.change("broken", None, increment).await.unwrap_err().code, Code::Internal);
    assert_eq!(cells.change("whole", None, increment).await.unwrap().answer, 1);
    assert_eq!(&*bucket.read("broken").await.unwrap().unwrap().value, b"{");
}

#[tokio::test]
async fn a_batch_is_stored_all_or_none() {
    let deployment = Deployment::new().await;
    let bucket = bucket(&deployment.nats_url).await;
    let write =
        |key: &str, expected| Write { key: key.into(), value: Bytes::from("v"), expected: Some(expected), ttl: None };
    let revision = bucket.write(&[write("a", 0), write("b", 0), write("c", 0)]).await.unwrap();
    assert_eq!(bucket.read("c").await.unwrap().unwrap().revision, revision, "the ack is the last one's");
    assert_eq!(bucket.read("a").await.unwrap().unwrap().revision, revision - 2);
    let conflict = bucket.write(&[write("d", 0), write("a", 999), write("e", 0)]).await;
    assert!(matches!(conflict, Err(CasError::Conflict)), "{conflict:?}");
    assert!(bucket.read("d").await.unwrap().is_none() && bucket.read("e").await.unwrap().is_none());
}

#[tokio::test]
async fn publishing_repeats_with_the_same_id_until_it_is_known() {
    let deployment = Deployment::new().await;
    let config =
        jetstream::stream::Config { name: "FACTS".into(), subjects: vec!["facts.>".into()], ..Default::default() };
    let stream = jetstream::new(deployment.nats().await).create_stream(config).await.unwrap();
    let proxy = Proxy::before(&deployment.nats_url).await;
    let nats = tidemark::jetstream::connect_to(async_nats::ConnectOptions::new(), &proxy.url).await.unwrap();
    let message = |subject: &str| Message { subject: subject.into(), headers: HeaderMap::new(), payload: "x".into() };
    let mut fact = message("facts.one");
    fact.headers.insert(header::NATS_MESSAGE_ID, "id-1");
    let send = publish(&nats, &fact, DEADLINE);
    let (ack, ()) = tokio::join!(send, proxy.lose_an_acknowledgement());
    assert_eq!((ack.unwrap().sequence, stream.get_info().await.unwrap().state.messages), (1, 1), "it is stored once");

    let nowhere = publish(&nats, &message("nowhere"), Duration::from_millis(300)).await;
    assert!(matches!(nowhere, Err(PublishError::NotStored)), "{nowhere:?}");
    let message = message("facts.two");
    let refused = publish_batch(&nats, &[message.clone(), message]).await;
    assert!(matches!(refused, Err(PublishError::Refused { .. })), "the stream takes no batches: {refused:?}");
}

#[tokio::test]
async fn the_next_range_is_fetched_before_this_one_is_used_up() {
    let deployment = Deployment::new().await;
    let cells = Cells::<Mark>::new(bucket(&deployment.nats_url).await, "test", DEADLINE);
    cells.change("k", None, |state| Ok(state.insert(Mark::at(0)).mark)).await.unwrap();
    let settings = RangeSettings { default_size: 10, max_size: 10, prefetch_threshold: 0.5 };
    let ranges = Ranges::new(cells.clone(), "k".into(), Absent::IsLost, settings);
    ranges.take(Steps::single(1), Bounds::above(0), &|| None).await.unwrap();
    let left = ranges.at_hand();
    assert!(left >= 5, "nothing is fetched before it is needed: {left}");
    ranges.take(Steps::single(left as u32 - 3), Bounds::above(0), &|| None).await.unwrap();
    eventually("a refill that nobody waits for", async || (ranges.at_hand() > 3).then_some(())).await;

    // The tail that is given back is exactly what nobody was given.
    let last = *ranges.take(Steps::single(2), Bounds::above(0), &|| None).await.unwrap().last().unwrap();
    eventually("no refill is under way", async || (ranges.at_hand() >= 5).then_some(())).await;
    ranges.stop().await;
    assert_eq!(cells.read("k").await.unwrap().unwrap(), Mark { mark: last, base: 0 });
    assert_eq!(ranges.take(Steps::single(1), Bounds::above(0), &|| None).await.unwrap_err().code, Code::Unavailable);
}
