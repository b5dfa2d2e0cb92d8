//! NATS callbacks: stored where a stream takes the subject, else told to whoever listens.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::{Duration, Instant},
};

use async_nats::{
    Client, HeaderMap,
    connection::State,
    header,
    jetstream::{self, Context, response::Response},
};
use bytes::Bytes;
use futures::{
    StreamExt,
    stream::{self, FuturesUnordered},
};
use serde::Deserialize;
use serde_json::json;
use tokio::time::{sleep, timeout_at};

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
    /// For asking what streams take.
    jetstream: Context,
    limit: Duration,
    /// Whether a stream takes a subject.
    known: Mutex<HashMap<String, (Instant, bool)>>,
}

impl NatsCaller {
    pub fn new(client: Client, limit: Duration) -> Self {
        let mut jetstream = jetstream::new(client.clone());
        jetstream.set_timeout(Duration::from_secs(2));
        Self { client, jetstream, limit, known: Mutex::default() }
    }

    /// While the connection is lost nothing is begun: it would fail for our own reason.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Makes many callbacks, and reports each by its place as soon as its end is known. Nothing is begun after the time
    /// that one callback has, because then somebody else may.
    pub async fn call(&self, timers: &[(&Claimed, &NatsCallback)], mut report: impl FnMut(usize, Report)) {
        let deadline = Instant::now() + self.limit;
        let taken = self.taken(timers, deadline).await;
        let connection = self.connection();
        let (mut told, mut to_store) = (Vec::new(), Vec::new());
        for (index, (timer, callback)) in timers.iter().enumerate() {
            match taken.get(callback.topic.as_str()) {
                Some(Ok(true)) => {
                    to_store.push((index, message(timer, callback)));
                    continue;
                }
                Some(Ok(false)) => {}
                Some(Err(problem)) => {
                    report(index, Report::failure(format!("NATS did not answer: {problem}")));
                    continue;
                }
                None => unreachable!("every subject was asked for"),
            }
            let Message { subject, headers, payload } = message(timer, callback);
            let sent = self.client.publish_with_headers(subject, headers, payload);
            match timeout_at(deadline.into(), sent).await {
                Ok(Ok(())) => told.push(index),
                Ok(Err(error)) => report(index, Report::failure(format!("not published: {}", chain(&error)))),
                Err(_) => report(index, Report::failure("not published: the connection is lost")),
            }
        }
        if !told.is_empty() {
            let outcome = self.confirm(connection).await;
            for index in told {
                report(index, outcome.clone().map_or_else(Report::failure, |()| Report::success()));
            }
        }
        let store = |(index, message): (usize, Message)| async move {
            let left = deadline.saturating_duration_since(Instant::now());
            let report = match left.is_zero() {
                true => Report::failure("not stored: there was no time left"),
                false => match publish(&self.client, &message, left).await {
                    Ok(_) => Report::success(),
                    Err(error) => Report::failure(format!("not stored: {error}")),
                },
            };
            (index, report)
        };
        let mut stored = stream::iter(to_store).map(store).buffer_unordered(AT_ONCE);
        while let Some((index, stored)) = stored.next().await {
            report(index, stored);
        }
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

    /// Whether a stream takes each of the subjects.
    async fn taken<'a>(
        &self,
        timers: &[(&Claimed, &'a NatsCallback)],
        deadline: Instant,
    ) -> HashMap<&'a str, Result<bool, String>> {
        let mut taken: HashMap<&str, Result<bool, String>> = HashMap::new();
        let mut unknown = HashSet::new();
        {
            let mut known = self.known.lock().expect("no panic while subjects are held");
            if known.len() > MOST_KNOWN {
                known.clear();
            }
            for (_, callback) in timers {
                let subject = callback.topic.as_str();
                match known.get(subject).filter(|(since, _)| since.elapsed() < KNOWN_FOR) {
                    Some((_, is_taken)) => drop(taken.insert(subject, Ok(*is_taken))),
                    None => drop(unknown.insert(subject)),
                }
            }
        }
        let mut asked = FuturesUnordered::new();
        let mut unknown = unknown.into_iter();
        loop {
            let room = AT_ONCE - asked.len();
            asked.extend(unknown.by_ref().take(room).map(|subject| self.ask(subject, deadline)));
            let Some((subject, answer)) = asked.next().await else { break };
            if let Ok(is_taken) = answer {
                let mut known = self.known.lock().expect("no panic while subjects are held");
                known.insert(subject.to_owned(), (Instant::now(), is_taken));
            }
            taken.insert(subject, answer);
        }
        taken
    }

    /// Asks until there is an answer or no time: taking silence for "no stream" would call a lost message heard.
    async fn ask<'a>(&self, subject: &'a str, deadline: Instant) -> (&'a str, Result<bool, String>) {
        #[derive(Deserialize)]
        struct Names {
            streams: Option<Vec<String>>,
        }
        loop {
            let answer = self.jetstream.request("STREAM.NAMES", &json!({ "subject": subject })).await;
            let problem = match answer {
                Ok(Response::Ok(Names { streams })) => {
                    return (subject, Ok(streams.is_some_and(|streams| !streams.is_empty())));
                }
                Ok(Response::Err { error }) => error.to_string(),
                Err(error) => chain(&error),
            };
            if Instant::now() + PAUSE >= deadline {
                return (subject, Err(problem));
            }
            sleep(PAUSE).await;
        }
    }
}

const PAUSE: Duration = Duration::from_millis(200);

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
