//! Stages.

use std::time::Duration;

use async_nats::jetstream::{self, stream};
use futures::future::FutureExt;
use uuid::Uuid;

use super::{
    Ground, Measure, Measured, Unit,
    load::{IN_FLIGHT, rate},
};
use crate::jetstream::{Message, publish_once};

pub const ROWS: &[(&str, Measure)] = &[("stage allocation, 64 callers", |ground| allocation(ground).boxed_local())];

/// What an allocation writes.
const MESSAGE: &str = r#"{"by":"some-machine-12345-1","nonce":"00000000-0000-4000-8000-000000000000"}"#;

/// Against what an allocation would cost without sharing: the same message, deduplicated and synced, one after the other.
async fn allocation(ground: &Ground) -> Measured {
    let nats = ground.nats().await;
    let config = stream::Config {
        name: "BENCH".to_owned(),
        subjects: vec!["bench.synced".to_owned()],
        duplicate_window: Duration::from_secs(86_400),
        allow_atomic_publish: true,
        ..Default::default()
    };
    jetstream::new(nats.clone()).create_stream(config).await.expect("the stream is made");
    let pairs = ground
        .effort
        .pairs(
            async || {
                let nats = nats.clone();
                rate(1, move || {
                    let nats = nats.clone();
                    async move {
                        let message = Message::with_id("bench.synced", &Uuid::new_v4().to_string(), MESSAGE);
                        publish_once(&nats, message).await.expect("it is stored");
                    }
                })
                .await
            },
            async || {
                let nats = nats.clone();
                rate(IN_FLIGHT, move || {
                    let nats = nats.clone();
                    async move {
                        let Message { subject, headers, payload } =
                            Message::with_id("tm.stage.allocate", &Uuid::new_v4().to_string(), "");
                        let reply = nats.request_with_headers(subject, headers, payload).await.expect("an answer");
                        assert!(reply.headers.is_none(), "neither an error nor a repeat: {reply:?}");
                    }
                })
                .await
            },
        )
        .await;
    let detail = pairs.detail("of synced publishes, one in flight");
    Measured::new(Unit::Ratio, 5.0, pairs.ratio.middle, detail)
}
