//! Stages.

use async_nats::{
    HeaderMap, header,
    jetstream::{self, stream},
};
use futures::future::FutureExt;
use uuid::Uuid;

use super::{
    Ground, Measure, Measured, Unit,
    load::{IN_FLIGHT, rate},
};
use crate::jetstream::{Message, publish_once};

pub const ROWS: &[(&str, Measure)] = &[("stage allocation, 64 callers", |ground| allocation(ground).boxed_local())];

/// What the allocation of one stage writes.
const MESSAGE: &str = r#"{"by":"some-machine-12345-1","nonce":"00000000-0000-4000-8000-000000000000","first":1000000,
    "requests":["00000000-0000-4000-8000-000000000000"]}"#;

/// Against what it would cost without sharing: the same message, synced, one after the other.
async fn allocation(ground: &Ground) -> Measured {
    let nats = ground.nats().await;
    let config =
        stream::Config { name: "BENCH".to_owned(), subjects: vec!["bench.synced".to_owned()], ..Default::default() };
    jetstream::new(nats.clone()).create_stream(config).await.expect("the stream is made");
    let pairs = ground
        .effort
        .pairs(
            async || {
                let nats = nats.clone();
                rate(1, move || {
                    let nats = nats.clone();
                    async move {
                        let (subject, headers) = ("bench.synced".to_owned(), HeaderMap::new());
                        let message = Message { subject, headers, payload: MESSAGE.into() };
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
                        let mut headers = HeaderMap::new();
                        headers.insert(header::NATS_MESSAGE_ID, Uuid::new_v4().to_string());
                        let asked = nats.request_with_headers("tm.stage.allocate", headers, Default::default());
                        let reply = asked.await.expect("an answer");
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
