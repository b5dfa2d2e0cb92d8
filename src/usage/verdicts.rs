//! The way back from a sink to whoever waits for its verdict.
//!
//! A message carries where its verdict goes: an instance and a number, nothing that could lead elsewhere. The sink builds
//! the subject from them, under our own inbox, where nobody else listens.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use async_nats::Client;
use futures::StreamExt;
use rand::distr::{Alphanumeric, SampleString};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{
    api::{Encoding, Name, usage::Rejection},
    error::{Error, Result},
};

/// The header that asks for a verdict.
pub const HEADER: &str = "Tidemark-Verdict";

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
    next: AtomicU64,
    waiting: Arc<Mutex<HashMap<u64, oneshot::Sender<Verdict>>>>,
}

/// A verdict that is to come. Dropping it forgets it.
pub struct Expected {
    /// The header's value.
    pub address: String,
    number: u64,
    verdict: oneshot::Receiver<Verdict>,
    waiting: Arc<Mutex<HashMap<u64, oneshot::Sender<Verdict>>>>,
}

impl Verdicts {
    /// Listens for verdicts until told to stop.
    pub async fn start(nats: Client, inbox_prefix: &Name, stop: CancellationToken) -> Result<Arc<Self>> {
        let me = Alphanumeric.sample_string(&mut rand::rng(), 16);
        let prefix = format!("{inbox_prefix}.verdict");
        let deaf = |error: async_nats::SubscribeError| Error::unavailable("verdicts can't be heard").source(error);
        let mut heard = nats.subscribe(format!("{prefix}.{me}.*")).await.map_err(deaf)?;
        let verdicts = Arc::new(Self { nats, prefix, me, next: AtomicU64::new(1), waiting: Arc::default() });
        let waiting = verdicts.waiting.clone();
        tokio::spawn(async move {
            while let Some(Some(message)) = stop.run_until_cancelled(heard.next()).await {
                let number = message.subject.rsplit('.').next().and_then(|number| number.parse::<u64>().ok());
                let waits = number.and_then(|number| waiting.lock().expect(UNBROKEN).remove(&number));
                if let (Some(waits), Ok(verdict)) = (waits, Encoding::MessagePack.decode(&message.payload)) {
                    let _ = waits.send(verdict);
                }
            }
        });
        Ok(verdicts)
    }

    pub fn expect(&self) -> Expected {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, verdict) = oneshot::channel();
        self.waiting.lock().expect(UNBROKEN).insert(number, sender);
        Expected { address: format!("{}.{number}", self.me), number, verdict, waiting: self.waiting.clone() }
    }

    /// Sends a verdict to where a message asked for it. A header that is none of ours is passed over.
    pub async fn send(&self, address: &str, verdict: &Verdict) {
        let ours = |(instance, number): (&str, &str)| {
            let plain =
                |text: &str| !text.is_empty() && text.len() <= 32 && text.bytes().all(|b| b.is_ascii_alphanumeric());
            plain(instance) && plain(number)
        };
        if !address.split_once('.').is_some_and(ours) {
            return;
        }
        let Ok(body) = Encoding::MessagePack.encode(verdict) else { return };
        if let Err(error) = self.nats.publish(format!("{}.{address}", self.prefix), body).await {
            tracing::debug!(%error, "a verdict was not sent");
        }
    }
}

impl Expected {
    /// None if nobody will send it.
    pub async fn verdict(&mut self) -> Option<Verdict> {
        (&mut self.verdict).await.ok()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.waiting.lock().expect(UNBROKEN).remove(&self.number);
    }
}

const UNBROKEN: &str = "no panic while verdicts are held";
