//! Facts that others may follow: `tm.event.<service>.<what>.<about>`.

use serde::Serialize;

use crate::{
    api::{Encoding, Name},
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
}
