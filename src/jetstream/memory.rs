//! Streams that live in memory, such as the limiters': a server that is restarted has lost them.

use std::{sync::Arc, time::Duration};

use async_nats::jetstream::Context;
use tokio::{sync::Notify, time::sleep};
use tokio_util::sync::CancellationToken;

use super::streams::{Declaration, apply};

/// JetStream takes a moment to come up behind a connection.
const AGAIN: Duration = Duration::from_millis(200);

/// Makes them again whenever the connection was made again, until told to stop.
pub async fn keep_in_memory(
    jetstream: Context,
    mut declarations: Vec<Declaration>,
    connected: Arc<Notify>,
    stop: CancellationToken,
) {
    declarations.retain(Declaration::is_in_memory);
    let keep = async {
        loop {
            connected.notified().await;
            for declaration in &declarations {
                while let Err(error) = apply(&jetstream, declaration).await {
                    tracing::debug!(stream = declaration.name(), %error, "not made yet");
                    sleep(AGAIN).await;
                }
            }
        }
    };
    stop.run_until_cancelled(keep).await;
}
