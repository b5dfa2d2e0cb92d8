//! What the server refuses. It says so on the side, where a request that it did not pass on would only time out.

use async_nats::{ConnectOptions, Event};
use tokio::sync::broadcast::{self, error::RecvError};

use crate::error::{Code, Error};

/// More at once than anybody waits for.
const KEPT: usize = 64;

/// The refusals of one connection. Cheap to clone.
#[derive(Clone)]
pub struct Refusals(broadcast::Sender<String>);

impl Default for Refusals {
    fn default() -> Self {
        Self(broadcast::channel(KEPT).0)
    }
}

impl Refusals {
    /// A connection with these options tells them here. They have no other event callback then.
    pub fn told_by(&self, options: ConnectOptions) -> ConnectOptions {
        let told = self.0.clone();
        options.event_callback(move |event| {
            if let Event::ServerError(error) = event {
                let _ = told.send(error.to_string());
            }
            std::future::ready(())
        })
    }

    /// Listens from now on.
    pub fn heard(&self) -> Heard {
        Heard(self.0.subscribe())
    }
}

pub struct Heard(broadcast::Receiver<String>);

impl Heard {
    /// The next one.
    pub async fn next(&mut self) -> Error {
        self.find(|_| true).await
    }

    /// The next one that keeps a request on this subject from being answered. `inbox` is one that the connection would make.
    pub async fn about(&mut self, subject: &str, inbox: &str) -> Error {
        let (inboxes, _) = inbox.rsplit_once('.').unwrap_or_default();
        // Replies come to one inbox: who may not listen there hears none.
        let reasons = [format!("Publish to \"{subject}\""), format!("Subscription to \"{inboxes}.")];
        self.find(|refusal| reasons.iter().any(|reason| refusal.contains(reason))).await
    }

    async fn find(&mut self, wanted: impl Fn(&str) -> bool) -> Error {
        loop {
            match self.0.recv().await {
                Ok(refusal) if wanted(&refusal) => {
                    return Error::new(Code::Forbidden, format!("NATS refused: {refusal}"));
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}
