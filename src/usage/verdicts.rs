//! The way back from a sink to whoever waits for its verdict.
//!
//! A message carries where its verdict goes: an instance and a nonce, nothing that could lead elsewhere. The sink builds
//! the subject from them, under our own inbox, where nobody else listens.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use async_nats::Client;
use futures::StreamExt;
use rand::distr::{Alphanumeric, SampleString};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;

use crate::{
    api::{Encoding, Name, usage::Rejection},
    error::{Error, Result},
};

/// The header that asks for a verdict.
pub const HEADER: &str = "Tidemark-Verdict";

/// After so many verdicts in a row that did not come, nobody waits long for the next: while the database is away, a
/// thousand callers should not each hold on for seconds.
const MISSES: u32 = 20;
const BRIEFLY: Duration = Duration::from_millis(50);

/// What a sink decided on one message.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub accepted: usize,
    pub duplicates: usize,
    pub rejected: Vec<Rejection>,
}

pub struct Verdicts {
    nats: Client,
    prefix: String,
    /// This process among all.
    me: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<HashMap<String, oneshot::Sender<Verdict>>>,
    /// Verdicts that did not come in time, since the last that came.
    missed: AtomicU32,
}

/// A verdict that is to come. Dropping it forgets it.
pub struct Expected {
    address: String,
    verdict: oneshot::Receiver<Verdict>,
    shared: Arc<Shared>,
}

impl Verdicts {
    /// Listens for verdicts until told to stop.
    pub async fn start(nats: Client, inbox_prefix: &Name, stop: CancellationToken) -> Result<Arc<Self>> {
        let me = nonce();
        let prefix = format!("{inbox_prefix}.verdict");
        let deaf = |error: async_nats::SubscribeError| Error::unavailable("verdicts can't be heard").source(error);
        let mut heard = nats.subscribe(format!("{prefix}.{me}.*")).await.map_err(deaf)?;
        let verdicts = Arc::new(Self { nats, prefix, me, shared: Arc::default() });
        let shared = verdicts.shared.clone();
        tokio::spawn(async move {
            while let Some(Some(message)) = stop.run_until_cancelled(heard.next()).await {
                shared.missed.store(0, Ordering::Relaxed);
                let nonce = message.subject.rsplit('.').next().unwrap_or_default();
                let waits = shared.waiting.lock().expect(UNBROKEN).remove(nonce);
                if let (Some(waits), Ok(verdict)) = (waits, Encoding::MessagePack.decode(&message.payload)) {
                    let _ = waits.send(verdict);
                }
            }
        });
        Ok(verdicts)
    }

    pub fn expect(&self) -> Expected {
        let (sender, verdict) = oneshot::channel();
        let nonce = nonce();
        let address = format!("{}.{nonce}", self.me);
        self.shared.waiting.lock().expect(UNBROKEN).insert(nonce, sender);
        Expected { address, verdict, shared: self.shared.clone() }
    }

    /// Sends a verdict to where a message asked for it. A header that is none of ours is passed over.
    pub async fn send(&self, address: &str, verdict: &Verdict) {
        let plain =
            |text: &str| (1..=32).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !address.split_once('.').is_some_and(|(instance, nonce)| plain(instance) && plain(nonce)) {
            return;
        }
        let Ok(body) = Encoding::MessagePack.encode(verdict) else { return };
        if let Err(error) = self.nats.publish(format!("{}.{address}", self.prefix), body).await {
            tracing::warn!(%error, "a verdict was not sent");
        }
    }
}

impl Expected {
    /// The header's value.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits for it until the deadline, or only briefly while none come.
    pub async fn verdict(&mut self, deadline: Instant) -> Option<Verdict> {
        let deadline = match self.shared.missed.load(Ordering::Relaxed) {
            ..MISSES => deadline,
            _ => deadline.min(Instant::now() + BRIEFLY),
        };
        let verdict = timeout_at(deadline, &mut self.verdict).await.ok().and_then(Result::ok);
        if verdict.is_none() {
            self.shared.missed.fetch_add(1, Ordering::Relaxed);
        }
        verdict
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        let nonce = self.address.rsplit('.').next().unwrap_or_default();
        self.shared.waiting.lock().expect(UNBROKEN).remove(nonce);
    }
}

fn nonce() -> String {
    Alphanumeric.sample_string(&mut rand::rng(), 16)
}

const UNBROKEN: &str = "no panic while verdicts are held";
