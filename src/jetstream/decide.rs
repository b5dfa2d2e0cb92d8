//! Compare-and-set until it is known what became of it.
//!
//! A write whose answer is lost may have happened or not, and may even happen later. The very same bytes are sent again under
//! the same expectation: at most one of the copies lands, and what stands there tells whether it was ours.

use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::publish::CasError;
use crate::error::Error;

/// The time was over first.
#[derive(Debug)]
pub struct Undecided {
    /// It may have happened, or may still.
    pub in_doubt: bool,
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// Writes until the outcome is known. None is a conflict: nothing of ours stands there. `find` looks for what is ours; it is
/// asked when something stands there and nobody knows whose it is.
pub async fn until_decided<W, F>(
    deadline: Instant,
    mut write: impl FnMut() -> W,
    mut find: impl FnMut() -> F,
) -> Result<Option<u64>, Undecided>
where
    W: Future<Output = Result<u64, CasError>>,
    F: Future<Output = Result<Option<u64>, Error>>,
{
    let mut in_doubt = false;
    loop {
        let source = match write().await {
            Ok(sequence) => return Ok(Some(sequence)),
            Err(CasError::Conflict) if in_doubt => match find().await {
                Ok(found) => return Ok(found),
                Err(error) => error.into(),
            },
            // Only when it has come to its end can be told whose it was.
            Err(error @ CasError::UnderWay) if in_doubt => error.into(),
            Err(CasError::Conflict | CasError::UnderWay) => return Ok(None),
            Err(CasError::NotStored(error)) => error.into(),
            Err(CasError::Unknown(error)) => {
                in_doubt = true;
                error.into()
            }
        };
        if !pause_before(deadline).await {
            return Err(Undecided { in_doubt, source });
        }
    }
}

/// Waits a moment if there is one before the deadline.
pub async fn pause_before(deadline: Instant) -> bool {
    let until = Instant::now() + Duration::from_millis(rand::random_range(20..100));
    let in_time = until < deadline;
    if in_time {
        sleep_until(until).await;
    }
    in_time
}

/// Lets others go first after a conflict, the longer the more there were.
pub async fn step_back(conflicts: u32) {
    let ceiling = (1 << conflicts.min(6)) as f64;
    sleep(Duration::from_millis(1).mul_f64(rand::random_range(0.0..ceiling))).await;
}
