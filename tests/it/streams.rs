//! `streams diff` and `streams apply` against a live server.

use std::time::Duration;

use async_nats::jetstream;

use crate::support::{Deployment, tidemark};

#[tokio::test]
async fn drift_is_shown_mended_where_nothing_is_lost_and_explained_where_something_would_be() {
    let deployment = Deployment::empty().await;
    let environment = || deployment.environment();
    let (code, out, _) = tidemark(&["streams", "diff"], environment()).await;
    assert_eq!(code, Some(1));
    assert!(out.contains("KV_tm_counters: is missing"), "{out}");

    let (code, out, err) = tidemark(&["streams", "apply"], environment()).await;
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("KV_tm_counters: created"), "{out}");
    let (code, out, _) = tidemark(&["streams", "diff"], environment()).await;
    assert_eq!(code, Some(0), "{out}");
    assert!(out.starts_with("KV_tm_counters: as declared\nKV_tm_leases: as declared\n"), "{out}");
    assert!(out.lines().all(|line| line.ends_with(": as declared")), "{out}");

    // An operator changes two things by hand.
    let jetstream = jetstream::new(deployment.nats().await);
    let mut config = jetstream.get_stream("KV_tm_counters").await.unwrap().cached_info().config.clone();
    config.description = Some("mine".into());
    config.max_messages_per_subject = 20_000;
    jetstream.update_stream(config).await.unwrap();

    // And a consumer is gone.
    jetstream.delete_consumer_from_stream("scheduler", "tm_TIMERS").await.unwrap();

    let (code, out, _) = tidemark(&["streams", "diff"], environment()).await;
    assert_eq!(code, Some(1));
    assert!(out.contains("tm_TIMERS: consumer scheduler, durable_name is null"), "{out}");
    assert!(out.contains("KV_tm_counters: description is \"mine\""), "{out}");
    assert!(out.contains("max_msgs_per_subject is 20000, declared is 10000, not applied"), "{out}");

    let (code, out, err) = tidemark(&["streams", "apply"], environment()).await;
    assert_eq!(code, Some(1), "what would lose data remains");
    assert!(out.contains("description changed") && err.contains("would lose data"), "{out}{err}");
    let stream = jetstream.get_stream("tm_TIMERS").await.unwrap();
    assert_eq!(stream.consumer_info("scheduler").await.unwrap().config.ack_wait, Duration::from_secs(5));
    let live = jetstream.get_stream("KV_tm_counters").await.unwrap().cached_info().config.clone();
    assert_eq!(
        (live.description.as_deref(), live.max_messages_per_subject),
        (Some("Tidemark: counters and idempotent answers"), 20_000)
    );

    // A process starts all the same: the operator's wider limit harms nobody. What is a setting of ours follows it.
    for seconds in [10, 1, 20] {
        let window = Duration::from_secs(seconds);
        let server = deployment.serve_with(|config| config.stages.rate_limit.window = window).await;
        let live = jetstream.get_stream("tm_STAGE_LIMITS").await.unwrap().cached_info().config.clone();
        assert_eq!(live.max_age, window);
        server.stop().await;
    }
}
