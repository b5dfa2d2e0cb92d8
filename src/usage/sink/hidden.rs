//! A subject with a literal `>` for a name, which the server lets anybody publish to, is counted by a filter with wildcards, and
//! neither found nor purged by it. Its messages would stay in the stream for ever.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use super::{Shard, Sink, incoming::Incoming};

/// How often it is looked for what is hidden.
const PAUSE: Duration = Duration::from_secs(5);

impl Sink {
    pub(super) async fn keep_uncovering(&self) {
        loop {
            if let Err(error) = self.uncover().await {
                tracing::debug!(%error, "usage: what is hidden was not uncovered");
            }
            sleep(PAUSE).await;
        }
    }

    /// Moves what is hidden to a subject where it is found.
    async fn uncover(&self) -> Result<(), async_nats::Error> {
        let request = json!({ "subjects_filter": self.subjects(Shard::Strays) });
        let info: Value = self.jetstream.request(format!("STREAM.INFO.{}", self.stream), &request).await?;
        let subjects = info["state"]["subjects"].as_object().into_iter().flat_map(|subjects| subjects.keys());
        let stream = self.jetstream.get_stream_no_info(&self.stream).await?;
        for hidden in subjects.filter(|subject| subject.contains('>')) {
            let (found, mut after) = (hidden.replace('>', "*"), 0);
            while let Some(message) = Incoming::fetched(&self.jetstream, &self.stream, hidden, after).await? {
                after = message.sequence as i64;
                // The subject is a filter here, for others as well.
                if message.subject != *hidden {
                    continue;
                }
                let put = async || self.jetstream.publish(found.clone(), message.payload.clone()).await?.await;
                let kept = put().await;
                stream.delete_message(message.sequence).await?;
                // The stream was full, perhaps of these.
                if kept.is_err() {
                    put().await?;
                }
            }
        }
        Ok(())
    }
}
