//! Keeps a lease while its generator is in use.

use std::{sync::Arc, time::Duration};

use tokio::task::AbortHandle;

use super::Generator;
use crate::error::{Code, Result};

/// Renews in the background, three times as often as needed, until it is dropped. A lease that is lost stops the
/// generator; while renewing fails for other reasons the generator goes on until the end of its lease, and no further.
pub struct Keeper(AbortHandle);

impl Keeper {
    /// `renew` answers with the lease's new end, in milliseconds since 1970.
    pub fn start<F>(generator: Arc<Generator>, ttl: Duration, renew: impl Fn() -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<i64>> + Send,
    {
        let keep = async move {
            let mut pause = ttl / 3;
            loop {
                tokio::time::sleep(pause).await;
                pause = match renew().await {
                    Ok(ends) => {
                        generator.extend(ends);
                        ttl / 3
                    }
                    Err(error) if matches!(error.code, Code::Conflict | Code::NotFound) => {
                        tracing::warn!(%error, "a worker id is lost; nothing is minted with it any more");
                        generator.stop();
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a worker id could not be renewed yet");
                        (ttl / 30).max(Duration::from_millis(100))
                    }
                };
            }
        };
        Self(tokio::spawn(keep).abort_handle())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}
