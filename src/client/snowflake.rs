//! Snowflakes minted by the caller: the service leases a worker id, and no id needs a request.

use std::{sync::Arc, time::Duration};

use chrono::Utc;

use super::Client;
use crate::{
    api::{
        Name,
        ids::{LeaseRequest, ReleaseRequest, RenewRequest, SnowflakeLease},
    },
    clock::Clock,
    error::Result,
    snowflake::{Fence, Generator, Keeper, Layout},
};

/// Mints ids of one snowflake key. Share it between threads; one per process is enough.
///
/// The lease is renewed in the background. When that fails until its end, or the lease is lost, no more ids are minted:
/// make a new one then. Small steps of the clock backwards are waited out, large ones refused.
///
/// ```no_run
/// # async fn example(client: tidemark::client::Client) -> tidemark::error::Result<()> {
/// let snowflakes = client.snowflakes(&"events".parse()?).await?;
/// let id: u64 = snowflakes.next().await?;
/// snowflakes.stop().await?;
/// # Ok(())
/// # }
/// ```
pub struct Snowflakes {
    client: Client,
    key: Name,
    lease: SnowflakeLease,
    generator: Arc<Generator>,
    _keeper: Keeper,
}

impl Client {
    /// Leases a worker id and mints with it.
    pub async fn snowflakes(&self, key: &Name) -> Result<Snowflakes> {
        self.snowflakes_by(key, Clock::system()).await
    }

    /// The same by another clock.
    pub async fn snowflakes_by(&self, key: &Name, clock: Clock) -> Result<Snowflakes> {
        // An owner is one process while it runs, so that no two ever share a worker id.
        let request = LeaseRequest { owner: Some(uuid::Uuid::now_v7().to_string()) };
        let asked = Utc::now();
        let lease = self.lease_snowflake(key, &request).await?;
        let fence = Fence { begins: lease.not_before.timestamp_millis(), ends: lease.expires_at.timestamp_millis() };
        let generator = Arc::new(Generator::new(layout(&lease), lease.worker_id, fence, clock));
        let ttl = (lease.expires_at - lease.not_before.max(asked)).to_std().unwrap_or_default();
        let renewal = (self.clone(), key.clone(), RenewRequest { owner: lease.owner.clone(), epoch: lease.epoch });
        let renew = move || {
            let (client, key, request) = renewal.clone();
            async move { Ok(client.renew_snowflake(&key, &request).await?.expires_at.timestamp_millis()) }
        };
        let keeper = Keeper::start(generator.clone(), ttl.max(Duration::from_secs(1)), renew);
        Ok(Snowflakes { client: self.clone(), key: key.clone(), lease, generator, _keeper: keeper })
    }
}

impl Snowflakes {
    /// The next id. Waits while the ids of a millisecond are used up.
    pub async fn next(&self) -> Result<u64> {
        Ok(self.generator.next().await?)
    }

    /// The same for threads.
    pub fn next_blocking(&self) -> Result<u64> {
        Ok(self.generator.next_blocking()?)
    }

    /// Many ids at once, in growing order.
    pub async fn take(&self, count: usize) -> Result<Vec<u64>> {
        Ok(self.generator.take(count).await?)
    }

    /// The lease as it was given.
    pub fn lease(&self) -> &SnowflakeLease {
        &self.lease
    }

    pub fn layout(&self) -> Layout {
        self.generator.layout()
    }

    /// Gives the worker id back, so that somebody else can use it at once.
    pub async fn stop(self) -> Result<()> {
        let last_timestamp = self.generator.stop();
        let SnowflakeLease { owner, epoch, .. } = self.lease;
        let request = ReleaseRequest { owner, epoch, last_timestamp };
        self.client.release_snowflake(&self.key, &request).await.map(drop)
    }
}

fn layout(lease: &SnowflakeLease) -> Layout {
    Layout {
        base: lease.base_ts,
        skip_bits: lease.skip_size,
        timestamp_bits: lease.ts_size,
        worker_bits: lease.worker_id_size,
        sequence_bits: lease.seq_size,
    }
}
