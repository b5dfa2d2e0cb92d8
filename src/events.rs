//! Facts that others may follow: `tm.event.<service>.<what>.<about>`.

use std::{fmt, time::Duration};

use async_nats::connection::State;
use futures::FutureExt;
use serde::Serialize;
use tokio::{task::unconstrained, time::timeout};

use crate::{
    api::{Encoding, Name},
    client::Client,
    error::{Error, Result},
    jetstream::round_trip,
};

/// Cheap to clone.
#[derive(Clone)]
pub struct Events {
    nats: async_nats::Client,
    prefix: Name,
}

impl Events {
    pub fn new(nats: async_nats::Client, prefix: Name) -> Self {
        Self { nats, prefix }
    }

    /// Publishes a fact, and returns when the server has it.
    pub async fn publish(&self, service: &str, what: &str, about: &Name, fact: &impl Serialize) -> Result<()> {
        let subject = format!("{}.event.{service}.{what}.{about}", self.prefix);
        let unsent = |error: async_nats::Error| Error::unavailable("an event was not published").source(error);
        let published = self.nats.publish(subject, Encoding::Json.encode(fact)?).await;
        published.map_err(|error| unsent(error.into()))?;
        round_trip(&self.nats).await.map_err(unsent)
    }

    /// What is told of this from now on.
    pub async fn follow(&self, what: String) -> Result<async_nats::Subscriber> {
        Client::new(self.nats.clone(), self.prefix.clone()).follow(&what).await
    }

    /// Tells a fact, waiting for room in the connection if there are many, but for no answer.
    pub async fn send(&self, what: String, fact: &impl Serialize) {
        let subject = format!("{}.event.{what}", self.prefix);
        let Ok(fact) = Encoding::Json.encode(fact) else { return };
        // While the connection is lost nobody hears it, and whoever tells should not wait for that.
        let is_connected = self.nats.connection_state() == State::Connected;
        let told =
            async { is_connected && matches!(timeout(PATIENCE, self.nats.publish(subject, fact)).await, Ok(Ok(()))) };
        if !told.await {
            count_untold();
            // There may be thousands.
            tracing::debug!("the event {what} was not told");
        }
    }

    /// Tells a fact to whoever listens right now, without waiting for anything. While the connection is lost it may go
    /// unheard.
    pub fn tell(&self, what: fmt::Arguments<'_>, fact: &impl Serialize) {
        let subject = format!("{}.event.{what}", self.prefix);
        let told =
            Encoding::Json.encode(fact).map(|fact| unconstrained(self.nats.publish(subject, fact)).now_or_never());
        if !matches!(told, Ok(Some(Ok(())))) {
            count_untold();
            tracing::warn!("the event {what} was not told");
        }
    }
}

/// A connection takes more within this, or is lost.
const PATIENCE: Duration = Duration::from_millis(100);

fn count_untold() {
    metrics::counter!("tidemark_events_untold_total").increment(1);
}
