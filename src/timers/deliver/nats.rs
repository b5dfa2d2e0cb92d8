//! NATS callbacks: stored where a stream takes the subject, else told to whoever listens.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::{Duration, Instant},
};

use async_nats::{Client, HeaderMap, connection::State, header};
use bytes::Bytes;
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use super::Report;
use crate::{
    api::timers::NatsCallback,
    error::chain,
    jetstream::{Message, publish, round_trip},
    telemetry::Trace,
    timers::store::Claimed,
};

/// Where the callback's key goes.
const KEY: &str = "Tidemark-Key";
/// Which timer and run it is: the same if a message comes twice.
const TIMER: &str = "Tidemark-Timer";

/// How long an answer to "does a stream take it" counts.
const KNOWN_FOR: Duration = Duration::from_secs(5);
const MOST_KNOWN: usize = 10_000;

/// Questions and stored messages under way at once.
const AT_ONCE: usize = 64;

pub struct NatsCaller {
    client: Client,
    limit: Duration,
    /// Whether a stream takes a subject.
    known: Mutex<HashMap<String, (Instant, bool)>>,
}

impl NatsCaller {
    pub fn new(client: Client, limit: Duration) -> Self {
        Self { client, limit, known: Mutex::default() }
    }

    /// While the connection is lost nothing is begun: it would fail for our own reason.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Makes many callbacks. The answers are in the same order.
    pub async fn call(&self, timers: &[(&Claimed, &NatsCallback)]) -> Vec<Report> {
        let stored = match self.stored(timers).await {
            Ok(stored) => stored,
            Err(problem) => {
                let unanswered = || Report::failure(format!("NATS did not answer: {problem}"));
                return timers.iter().map(|_| unanswered()).collect();
            }
        };
        let mut reports: Vec<Option<Report>> = timers.iter().map(|_| None).collect();
        let mut to_store = Vec::new();
        let connection = self.connection();
        let mut told = Vec::new();
        for (index, (timer, callback)) in timers.iter().enumerate() {
            let message = message(timer, callback);
            if stored.contains(callback.topic.as_str()) {
                to_store.push((index, message));
                continue;
            }
            let sent = self.client.publish_with_headers(message.subject, message.headers, message.payload);
            match tokio::time::timeout(self.limit, sent).await {
                Ok(Ok(())) => told.push(index),
                Ok(Err(error)) => reports[index] = Some(Report::failure(format!("not published: {}", chain(&error)))),
                Err(_) => reports[index] = Some(Report::failure("not published: the connection is lost")),
            }
        }
        if !told.is_empty() {
            let outcome = self.confirm(connection).await;
            for index in told {
                reports[index] = Some(outcome.clone().map_or_else(Report::failure, |()| Report::success()));
            }
        }
        let store = |(index, message): (usize, Message)| async move {
            let report = match publish(&self.client, &message, self.limit).await {
                Ok(_) => Report::success(),
                Err(error) => Report::failure(format!("not stored: {error}")),
            };
            (index, report)
        };
        let mut stored = stream::iter(to_store).map(store).buffer_unordered(AT_ONCE);
        while let Some((index, report)) = stored.next().await {
            reports[index] = Some(report);
        }
        reports.into_iter().map(|report| report.unwrap_or_else(|| Report::failure("was not made"))).collect()
    }

    /// Returns when the server has what we published. What was on the wire of a connection that broke may be lost, so
    /// another connection can't confirm it.
    async fn confirm(&self, connection: u64) -> Result<(), String> {
        let confirmed = round_trip(&self.client).await;
        match confirmed {
            Ok(()) if self.connection() == connection => Ok(()),
            Ok(()) => Err("the connection to NATS was lost while publishing; whether it was heard is not known".into()),
            Err(error) => Err(format!("NATS did not confirm it: {error}")),
        }
    }

    /// Counts connections, so that it can be told whether it is still the same.
    fn connection(&self) -> u64 {
        self.client.statistics().connects.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The subjects among these that a stream takes.
    async fn stored(&self, timers: &[(&Claimed, &NatsCallback)]) -> Result<HashSet<String>, String> {
        let subjects: HashSet<&str> = timers.iter().map(|(_, callback)| callback.topic.as_str()).collect();
        let (mut taken, mut unknown) = (HashSet::new(), Vec::new());
        {
            let mut known = self.known.lock().expect("no panic while subjects are held");
            if known.len() > MOST_KNOWN {
                known.clear();
            }
            for subject in subjects {
                match known.get(subject).filter(|(since, _)| since.elapsed() < KNOWN_FOR) {
                    Some((_, true)) => drop(taken.insert(subject.to_owned())),
                    Some((_, false)) => {}
                    None => unknown.push(subject.to_owned()),
                }
            }
        }
        let mut asked = stream::iter(unknown).map(|subject| self.ask(subject)).buffer_unordered(AT_ONCE);
        while let Some(answer) = asked.next().await {
            let (subject, is_taken) = answer?;
            let mut known = self.known.lock().expect("no panic while subjects are held");
            known.insert(subject.clone(), (Instant::now(), is_taken));
            if is_taken {
                taken.insert(subject);
            }
        }
        Ok(taken)
    }

    async fn ask(&self, subject: String) -> Result<(String, bool), String> {
        let mut jetstream = async_nats::jetstream::new(self.client.clone());
        jetstream.set_timeout(Duration::from_secs(2));
        let filter = json!({ "subject": subject });
        let names: Value = jetstream.request("STREAM.NAMES", &filter).await.map_err(|error| chain(&error))?;
        Ok((subject, names["streams"].as_array().is_some_and(|streams| !streams.is_empty())))
    }
}

fn message(timer: &Claimed, callback: &NatsCallback) -> Message {
    let mut headers = HeaderMap::new();
    for (name, value) in callback.headers.iter().flatten() {
        headers.insert(name.as_str(), value.as_str());
    }
    if let Some(key) = &callback.key {
        headers.insert(KEY, key.as_str());
    }
    let id = timer.delivery_id();
    headers.insert(TIMER, id.as_str());
    // Where a stream takes it, it is stored once.
    headers.insert(header::NATS_MESSAGE_ID, id.as_str());
    if let Some(trace) = timer.trace().header() {
        headers.insert(Trace::HEADER, trace);
    }
    let payload = callback.payload.as_ref().map_or_else(Bytes::new, |payload| payload.to_string().into());
    Message { subject: callback.topic.clone(), headers, payload }
}
