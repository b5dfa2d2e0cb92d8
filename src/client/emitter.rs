//! Usage records, emitted and forgotten.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::Value;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use super::Client;
use crate::{
    api::{
        Encoding, Name, WholeBody,
        usage::{Ingest, Ingested, Reason, Rejection, UsageRecord},
    },
    error::{Code, Error, Result},
};

/// Bytes of one batch: a request may have more, but records differ in size.
const BATCH_BYTES: usize = 512 * 1024;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// A verdict, or that there is none yet, comes sooner than this.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A defect of the service may pass, but not if it is there again and again.
const MOST_DEFECTS: usize = 5;

const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How an emitter behaves.
#[derive(Clone)]
pub struct EmitterOptions {
    /// Records that are sent together, at most.
    pub batch: usize,
    /// How long the first of them waits for others.
    pub linger: Duration,
    /// Records that wait to be sent, at most. When there are more, the oldest are dropped and counted.
    pub queue: usize,
    /// Hears of every record that was refused.
    pub on_rejected: Option<OnRejected>,
}

pub type OnRejected = Arc<dyn Fn(&UsageRecord, &Reason) + Send + Sync>;

impl Default for EmitterOptions {
    fn default() -> Self {
        Self { batch: 500, linger: Duration::from_millis(100), queue: 100_000, on_rejected: None }
    }
}

/// What became of what was emitted. Once nothing waits, `emitted` is the sum of all the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EmitterCounts {
    pub emitted: u64,
    pub accepted: u64,
    pub duplicates: u64,
    pub rejected: u64,
    /// Kept by the service, and judged later.
    pub buffered: u64,
    /// Given up because the queue was full.
    pub dropped: u64,
    /// Not sent yet.
    pub waiting: u64,
}

/// What became of records that were sent until there was an answer.
#[derive(Debug, Default)]
pub struct Delivered {
    pub accepted: usize,
    pub duplicates: usize,
    /// Kept by the service, and judged later.
    pub buffered: usize,
    pub refused: Vec<(UsageRecord, Reason)>,
}

/// Sends one source's usage records in the background. Emitting never waits and never fails; while the service is away,
/// slow or limiting, records wait in a bounded queue and are sent again, under the same keys, until they are taken.
///
/// ```no_run
/// # async fn example(client: tidemark::client::Client) -> tidemark::error::Result<()> {
/// use tidemark::api::usage::UsageRecord;
///
/// let emitter = client.emitter(&"acme".parse()?, &"api-gateway".parse()?, Default::default());
/// emitter.emit(UsageRecord::new("api_calls", "endpoint-7", 1));
/// let counts = emitter.stop(std::time::Duration::from_secs(10)).await;
/// assert_eq!(counts.waiting, 0);
/// # Ok(())
/// # }
/// ```
pub struct Emitter {
    shared: Arc<Shared>,
    stop: CancellationToken,
}

struct Shared {
    queue: Mutex<VecDeque<UsageRecord>>,
    /// Something is in the queue.
    filled: Notify,
    /// Somebody wants everything to be sent now.
    hurry: Notify,
    options: EmitterOptions,
    counters: Counters,
    /// Records that are neither judged nor dropped.
    waiting: watch::Sender<u64>,
}

#[derive(Default)]
struct Counters {
    emitted: AtomicU64,
    accepted: AtomicU64,
    duplicates: AtomicU64,
    rejected: AtomicU64,
    buffered: AtomicU64,
    dropped: AtomicU64,
}

impl Client {
    /// An emitter for one source.
    pub fn emitter(&self, tenant: &Name, source: &Name, options: EmitterOptions) -> Emitter {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            filled: Notify::new(),
            hurry: Notify::new(),
            options,
            counters: Counters::default(),
            waiting: watch::Sender::new(0),
        });
        let stop = CancellationToken::new();
        let sending =
            Sending { client: self.clone(), target: (tenant.clone(), source.clone()), shared: shared.clone() };
        let stopped = stop.clone();
        tokio::spawn(async move { stopped.run_until_cancelled(sending.run()).await });
        Emitter { shared, stop }
    }

    /// Sends records until each of them is judged or kept, across everything that passes: the service away, slow, or
    /// limiting. What is refused comes back with the reason.
    pub async fn deliver(&self, target: &(Name, Name), records: Vec<UsageRecord>) -> Delivered {
        self.deliver_soon(target, records, &Notify::new()).await
    }

    /// The same, trying again at once when somebody is in a hurry.
    async fn deliver_soon(&self, target: &(Name, Name), records: Vec<UsageRecord>, hurry: &Notify) -> Delivered {
        let mut delivered = Delivered::default();
        let mut batches = cut(records);
        while let Some(mut records) = batches.pop_front() {
            match self.ingest_until_answered(target, &records, hurry).await {
                Ok(Ingested::Verdict { accepted, duplicates, rejected }) => {
                    delivered.accepted += accepted;
                    delivered.duplicates += duplicates;
                    let refused = |one: Rejection| Some((records.get(one.index)?.clone(), one.reason));
                    delivered.refused.extend(rejected.into_iter().filter_map(refused));
                }
                Ok(Ingested::Buffered { records, .. }) => delivered.buffered += records,
                // What is wrong with the batch as a whole may be wrong with its size.
                Err(error) => match records.len() {
                    0 => {}
                    1 => delivered.refused.extend(records.pop().map(|record| (record, error.into()))),
                    count => {
                        let second = records.split_off(count / 2);
                        batches.push_front(second);
                        batches.push_front(records);
                    }
                },
            }
        }
        delivered
    }

    async fn ingest_until_answered(
        &self,
        target: &(Name, Name),
        records: &[UsageRecord],
        hurry: &Notify,
    ) -> Result<Ingested> {
        let body = WholeBody::new(Encoding::Json, serde_json::to_vec(records).map_err(Error::internal)?);
        let (mut pause, mut defects) = (FIRST_PAUSE, 0);
        loop {
            let error = match timeout(ATTEMPT, self.call::<Ingest>(target, &body)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => Error::unavailable(format!("no answer within {ATTEMPT:?}")),
            };
            defects += usize::from(error.code == Code::Internal);
            if !passes(&error) || defects > MOST_DEFECTS {
                return Err(error);
            }
            let hint = error.details.as_ref().and_then(|details| details["retry_after_ms"].as_u64());
            let wait = hint.map_or(pause, Duration::from_millis).max(FIRST_PAUSE).mul_f64(rand::random_range(1.0..1.5));
            tracing::debug!(%error, ?wait, "usage records are sent again");
            pause = tokio::select! {
                () = sleep(wait) => (pause * 2).min(LONGEST_PAUSE),
                () = hurry.notified() => FIRST_PAUSE,
            };
        }
    }
}

/// Whether asking again may help.
fn passes(error: &Error) -> bool {
    use Code::{BackfillInProgress, Internal, RateLimited, TypesRegistryUnavailable, Unavailable};
    matches!(error.code, Unavailable | RateLimited | BackfillInProgress | TypesRegistryUnavailable | Internal)
}

impl Emitter {
    /// Takes a record. Its key was made with it, so however often it is sent it counts once.
    pub fn emit(&self, record: UsageRecord) {
        let Shared { queue, options, counters, waiting, filled, .. } = &*self.shared;
        counters.emitted.fetch_add(1, Ordering::Relaxed);
        let mut queue = queue.lock().expect(UNBROKEN);
        match (queue.len() >= options.queue).then(|| queue.pop_front()).flatten() {
            Some(_) => drop(counters.dropped.fetch_add(1, Ordering::Relaxed)),
            // While the queue is held, so that it is counted before it is sent.
            None => waiting.send_modify(|waiting| *waiting += 1),
        }
        queue.push_back(record);
        drop(queue);
        filled.notify_one();
    }

    pub fn counts(&self) -> EmitterCounts {
        let Counters { emitted, accepted, duplicates, rejected, buffered, dropped } = &self.shared.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EmitterCounts {
            emitted: load(emitted),
            accepted: load(accepted),
            duplicates: load(duplicates),
            rejected: load(rejected),
            buffered: load(buffered),
            dropped: load(dropped),
            waiting: *self.shared.waiting.borrow(),
        }
    }

    /// Sends everything now, and returns when nothing waits any more.
    pub async fn flush(&self) {
        let mut waiting = self.shared.waiting.subscribe();
        self.shared.hurry.notify_one();
        let _ = waiting.wait_for(|waiting| *waiting == 0).await;
    }

    /// Flushes, for so long at most, and ends. What is still waiting then is lost, and counted in the answer.
    pub async fn stop(self, patience: Duration) -> EmitterCounts {
        let _ = timeout(patience, self.flush()).await;
        self.counts()
    }
}

impl Drop for Emitter {
    fn drop(&mut self) {
        self.stop.cancel();
        let waiting = *self.shared.waiting.borrow();
        if waiting > 0 {
            tracing::warn!(waiting, "an emitter ended with usage records that were not sent");
        }
    }
}

struct Sending {
    client: Client,
    target: (Name, Name),
    shared: Arc<Shared>,
}

impl Sending {
    async fn run(self) {
        loop {
            let records = self.next_batch().await;
            let count = records.len() as u64;
            let delivered = self.client.deliver_soon(&self.target, records, &self.shared.hurry).await;
            self.count(&delivered);
            self.shared.waiting.send_modify(|waiting| *waiting -= count);
        }
    }

    /// Waits for a record, then for company, then takes what fits into one request.
    async fn next_batch(&self) -> Vec<UsageRecord> {
        let Shared { queue, filled, hurry, options, .. } = &*self.shared;
        let length = || queue.lock().expect(UNBROKEN).len();
        while length() == 0 {
            filled.notified().await;
        }
        let until = Instant::now() + options.linger;
        let company = async {
            while length() < options.batch {
                filled.notified().await;
            }
        };
        tokio::select! {
            _ = timeout_at(until, company) => {}
            () = hurry.notified() => {}
        }
        let mut queue = queue.lock().expect(UNBROKEN);
        let count = queue.len().min(options.batch.max(1));
        queue.drain(..count).collect()
    }

    fn count(&self, delivered: &Delivered) {
        let counters = &self.shared.counters;
        for (counter, count) in [
            (&counters.accepted, delivered.accepted),
            (&counters.duplicates, delivered.duplicates),
            (&counters.buffered, delivered.buffered),
            (&counters.rejected, delivered.refused.len()),
        ] {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        }
        for (record, reason) in &delivered.refused {
            tracing::warn!(key = record.idempotency_key, code = %reason.code, "a usage record was refused: {}", reason.message);
            if let Some(hears) = &self.shared.options.on_rejected {
                hears(record, reason);
            }
        }
    }
}

/// Records in pieces of a size that a request may have.
fn cut(records: Vec<UsageRecord>) -> VecDeque<Vec<UsageRecord>> {
    let (mut pieces, mut bytes) = (VecDeque::new(), usize::MAX);
    for record in records {
        let size = size(&record);
        bytes = bytes.saturating_add(size);
        if bytes > BATCH_BYTES {
            pieces.push_back(Vec::new());
            bytes = size;
        }
        pieces.back_mut().expect("just made").push(record);
    }
    pieces
}

/// About how many bytes a record has as JSON.
fn size(record: &UsageRecord) -> usize {
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let json = |value: &Option<Value>| value.as_ref().map_or(0, |value| value.to_string().len());
    let lineage = record.lineage.iter().flatten().map(|name| name.len() + 3).sum::<usize>();
    let value = record.value.as_str().map_or(0, str::len);
    let names = value + record.usage_type.len() + record.resource_id.len() + record.idempotency_key.len();
    200 + names + text(&record.user_id) + text(&record.resource_type) + json(&record.metadata) + lineage
}

const UNBROKEN: &str = "no panic while the queue is held";
