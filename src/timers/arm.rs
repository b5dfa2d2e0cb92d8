//! Arming: making sure that somebody is woken for each second in which a timer is due.
//!
//! A schedule in JetStream stands for a second, however many timers share it. The server turns it into a wake-up shortly
//! before, and the consumer that all instances share gives that to one of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_nats::{Client, HeaderMap, header};
use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use futures::future::join_all;
use tokio::{sync::Notify, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    api::Name,
    jetstream::{Message, PublishError, publish_batch, publish_once},
};

/// A wake-up comes so long before its second.
const LEAD: i64 = 1;

/// A second counts as armed until so long before it: the server looks every 250 ms, and whoever was woken has read.
pub const FIRM: i64 = 5;

/// What comes later is armed again, but not for every timer.
const AGAIN: Duration = Duration::from_millis(500);

/// How long a wake-up that nobody takes stays. The sweep finds what it was for.
const KEPT: &str = "5m";

/// Fewer are published side by side; a batch has a cost of its own.
const BATCH: usize = 16;
const LARGEST_BATCH: usize = 500;

pub struct Armer {
    client: Client,
    prefix: Name,
    seconds: Mutex<Seconds>,
    asked: Notify,
}

#[derive(Default)]
struct Seconds {
    /// Since when a second is armed, as far as we know.
    armed: BTreeMap<i64, Instant>,
    wanted: BTreeSet<i64>,
}

impl Armer {
    pub fn start(client: Client, prefix: Name, stop: CancellationToken) -> Arc<Self> {
        let armer = Arc::new(Self { client, prefix, seconds: Mutex::default(), asked: Notify::new() });
        let working = armer.clone();
        tokio::spawn(async move {
            let work = async {
                loop {
                    working.asked.notified().await;
                    working.publish_wanted().await;
                    if working.forget_past() {
                        sleep(AGAIN).await;
                        working.asked.notify_one();
                    }
                }
            };
            tokio::select! {
                () = work => {}
                () = stop.cancelled() => {}
            }
        });
        armer
    }

    /// Asks for wake-ups. Returns at once: whoever dies before they stand leaves it to the sweep.
    pub fn arm(&self, seconds: impl IntoIterator<Item = i64>, now: DateTime<Utc>) {
        let now = now.timestamp();
        let mut known = self.seconds.lock().expect(UNBROKEN);
        for second in seconds {
            let is_armed = known.armed.get(&second).is_some_and(|since| second - now > FIRM || since.elapsed() < AGAIN);
            if !is_armed {
                known.armed.insert(second, Instant::now());
                known.wanted.insert(second);
            }
        }
        // What lies behind need not be remembered.
        known.armed = known.armed.split_off(&(now - 60));
        if !known.wanted.is_empty() {
            self.asked.notify_one();
        }
    }

    async fn publish_wanted(&self) {
        let wanted: Vec<i64> = std::mem::take(&mut self.seconds.lock().expect(UNBROKEN).wanted).into_iter().collect();
        for seconds in wanted.chunks(LARGEST_BATCH) {
            let schedules: Vec<Message> = seconds.iter().map(|second| self.schedule_of(*second)).collect();
            if let Err(error) = self.publish(schedules).await {
                tracing::warn!(%error, count = seconds.len(), "wake-ups for timers could not be set yet");
                self.seconds.lock().expect(UNBROKEN).wanted.extend(seconds);
            }
        }
    }

    /// Whether something is still wanted. A second that has passed is the sweep's.
    fn forget_past(&self) -> bool {
        let mut known = self.seconds.lock().expect(UNBROKEN);
        known.wanted = known.wanted.split_off(&(Utc::now().timestamp() - FIRM));
        !known.wanted.is_empty()
    }

    async fn publish(&self, schedules: Vec<Message>) -> Result<(), PublishError> {
        if schedules.len() >= BATCH {
            return publish_batch(&self.client, &schedules).await.map(drop);
        }
        let published = schedules.into_iter().map(|schedule| publish_once(&self.client, schedule));
        join_all(published).await.into_iter().try_for_each(|published| published.map(drop))
    }

    /// Sets the schedule of the sweep. The same one is simply set again.
    pub async fn arm_sweep(&self, interval: Duration) -> Result<(), PublishError> {
        let schedule = self.schedule(format!("@every {}s", interval.as_secs()), SWEEP);
        publish_once(&self.client, schedule).await.map(drop)
    }

    fn schedule_of(&self, second: i64) -> Message {
        let at = DateTime::from_timestamp(second - LEAD, 0).unwrap_or_default();
        self.schedule(format!("@at {}", at.to_rfc3339_opts(SecondsFormat::Secs, true)), second)
    }

    /// What makes the server send a wake-up.
    fn schedule(&self, when: String, about: impl fmt::Display) -> Message {
        let prefix = &self.prefix;
        let mut headers = HeaderMap::new();
        headers.insert(header::NATS_SCHEDULE, when);
        headers.insert(header::NATS_SCHEDULE_TARGET, format!("{prefix}_timers.wake.{about}"));
        headers.insert(header::NATS_SCHEDULE_TTL, KEPT);
        Message { subject: format!("{prefix}_timers.arm.{about}"), headers, payload: Bytes::new() }
    }
}

/// The wake-up that is for no second.
pub const SWEEP: &str = "sweep";

const UNBROKEN: &str = "no panic while seconds are held";
