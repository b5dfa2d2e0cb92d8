//! Waking: the consumer that all instances share gives each wake-up to one of them.

use std::{sync::Arc, time::Duration};

use async_nats::jetstream::{
    AckKind, Context, Message,
    consumer::{Consumer, pull},
};
use chrono::{DateTime, TimeDelta};
use futures::StreamExt;
use tokio::time::sleep;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{arm::SWEEP, scheduler::Scheduler, store::Store, sweep::Sweeper};
use crate::api::Name;

pub struct Waking {
    pub jetstream: Context,
    pub prefix: Name,
    pub store: Store,
    pub scheduler: Arc<Scheduler>,
    pub sweeper: Arc<Sweeper>,
}

impl Waking {
    /// Takes wake-ups until told to stop, across every loss of the connection.
    pub async fn run(self: Arc<Self>, tracker: TaskTracker, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Err(error) = self.clone().take(&tracker, &stop) => {
                    tracing::warn!(%error, "the wake-ups of timers ended and are begun again");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(Duration::from_millis(500)) => {}
            }
        }
    }

    async fn take(
        self: Arc<Self>,
        tracker: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<std::convert::Infallible, async_nats::Error> {
        let stream = self.jetstream.get_stream(format!("{}_TIMERS", self.prefix)).await?;
        let consumer: Consumer<pull::Config> = stream.get_consumer("scheduler").await?;
        let mut wake_ups = consumer.stream().max_messages_per_batch(100).messages().await?;
        while let Some(wake_up) = wake_ups.next().await {
            tracker.spawn(self.clone().wake(wake_up?, stop.clone()));
        }
        Err("there are no more of them".into())
    }

    async fn wake(self: Arc<Self>, message: Message, stop: CancellationToken) {
        let about = message.subject.rsplit('.').next().unwrap_or_default();
        if about == SWEEP {
            // Another will come, so this one is not kept.
            acknowledge(&message, AckKind::Ack).await;
            self.sweeper.sweep().await;
            return;
        }
        let second = about.parse().ok().and_then(|second| DateTime::from_timestamp(second, 0));
        let Some(second) = second else { return acknowledge(&message, AckKind::Term).await };
        let end = second + TimeDelta::seconds(1);
        match self.store.due_between(second, end).await {
            Ok(due) => self.scheduler.hold(due),
            Err(error) => {
                tracing::warn!(%error, "the timers of a second could not be read yet");
                return acknowledge(&message, AckKind::Nak(Some(Duration::from_secs(1)))).await;
            }
        }
        let rest = (end - self.scheduler.now()).to_std().unwrap_or_default();
        let kind = tokio::select! {
            () = sleep(rest) => AckKind::Ack,
            // Somebody else shall be woken.
            () = stop.cancelled() => AckKind::Nak(None),
        };
        acknowledge(&message, kind).await;
    }
}

async fn acknowledge(message: &Message, kind: AckKind) {
    if let Err(error) = message.ack_with(kind).await {
        tracing::debug!(%error, "a wake-up was not acknowledged and may come again");
    }
}
