//! A service that uses Tidemark for all four things: an id for each order, a stage for each shop, a reminder, and what was used.
//!
//! `. data/env && cargo run --example service`. It asks for a key `orders` (`tidemark id config set-increment orders`) and for a
//! unit `orders_placed` that the source `default` may send, as the test of the examples makes them.

use std::time::Duration;

use tidemark::{
    api::{
        Context, Name,
        ids::{Increment, IncrementRequest},
        stages::{AllocateStage, NewStage},
        timers::{Callback, NatsCallback, NewTimer},
        usage::UsageRecord,
    },
    client::Client,
    error::Result,
};

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("NATS_URL").expect("NATS_URL is set: . data/env");
    let client = Client::connect(&url).await?;
    let (orders, tenant, source): (Name, Name, Name) = ("orders".parse()?, "default".parse()?, "default".parse()?);

    // An answer may be lost, and then the request is sent again: under the same key it gets the same id.
    let checkout = uuid::Uuid::new_v4().to_string();
    let once = Context { idempotency_key: Some(checkout.parse()?), ..Context::default() };
    let request = IncrementRequest::default();
    let order = client.call_with::<Increment>(&orders, &request, &once).await?.id[0];
    assert_eq!(client.call_with::<Increment>(&orders, &request, &once).await?.id, [order]);
    println!("order {order}");

    // A stage belongs to its request id.
    let named = Context { named: Some(checkout.as_str().into()), ..Context::default() };
    let stage = client.call_with::<AllocateStage>(&(), &NewStage::default(), &named).await?;
    println!("stage {}", stage.stage_id);

    // In an hour, whatever happens to this process.
    let topic = "shop.reminders".to_owned();
    let payload = Some(serde_json::json!({ "order": order }));
    let reminder = NewTimer {
        execute_in: Some("1h".into()),
        callback: Some(Callback::Nats(NatsCallback { topic, key: None, headers: None, payload })),
        idempotency_key: Some(format!("reminder-{order}")),
        ..NewTimer::default()
    };
    let timer = client.create_timer(&tenant, &reminder).await?;
    println!("timer {} is {}", timer.id, timer.status);

    // Emitted and forgotten: batches in the background, each record once however often it is sent.
    let usage = client.emitter(&tenant, &source, Default::default());
    usage.emit(UsageRecord::new("orders_placed", "shop-1", 1));
    let counts = usage.stop(Duration::from_secs(10)).await;
    println!("{} usage records accepted", counts.accepted);
    Ok(())
}
