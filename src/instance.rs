//! This process among its like: its name, its number, and what it reports of itself.
//!
//! The number is a lease, so no two living instances have the same. What an instance reports goes out with the statistics
//! of the NATS micro services API, where `tidemark instances` and any other tool can read it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::{DateTime, Utc};
use rand::distr::{Alphanumeric, SampleString};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::Clock,
    error::{Code, Result},
    roles::Role,
    watermark::{
        AtHand, Cells,
        leases::{Held, Leases, Terms},
    },
};

/// A number is free again this long after its holder was killed.
const TTL: Duration = Duration::from_secs(30);

/// Far more than anybody runs.
const NUMBERS: u64 = 4096;

const LEASES: &str = "instances";

pub struct Instance {
    name: Arc<str>,
    roles: Vec<Role>,
    started_at: DateTime<Utc>,
    held: Mutex<Option<Held>>,
}

/// What an instance says of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    pub instance: String,
    pub number: Option<u32>,
    pub roles: Vec<String>,
    pub version: String,
    pub started_at: DateTime<Utc>,
    /// Numbers that are reserved and not given yet, by counter.
    pub ranges: Vec<AtHand>,
}

impl Instance {
    pub fn new(roles: &[Role], clock: &Clock) -> Self {
        let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let suffix = Alphanumeric.sample_string(&mut rand::rng(), 6);
        let name = format!("{}-{suffix}", host.unwrap_or_else(|| "instance".into()));
        Self { name: name.into(), roles: roles.to_vec(), started_at: clock.now(), held: Mutex::default() }
    }

    /// Unique to this process. Our changes are signed with it.
    pub fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    pub fn report(&self, ranges: Vec<AtHand>) -> Report {
        Report {
            instance: self.name.to_string(),
            number: self.held().map(|held| held.number),
            roles: self.roles.iter().map(Role::to_string).collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            started_at: self.started_at,
            ranges,
        }
    }

    /// Takes a number.
    pub async fn take_number(&self, leases: &Cells<Leases>, clock: &Clock) -> Result<()> {
        let (owner, terms) = (self.name.clone(), terms(clock));
        self.change(leases, move |leases| leases.take(&owner, terms)).await
    }

    /// Keeps the number until told to stop. A lost one is replaced.
    pub async fn keep_number(self: Arc<Self>, leases: Cells<Leases>, clock: Clock, stop: CancellationToken) {
        while tokio::time::timeout(TTL / 3, stop.cancelled()).await.is_err() {
            let kept = match self.held() {
                Some(Held { owner, epoch, .. }) => {
                    let terms = terms(&clock);
                    self.change(&leases, move |leases| leases.renew(&owner, epoch, terms)).await
                }
                None => self.take_number(&leases, &clock).await,
            };
            match kept {
                Err(error) if error.code == Code::Conflict => self.hold(None),
                Err(error) => tracing::warn!(%error, "this instance's number was not renewed yet"),
                Ok(()) => {}
            }
        }
    }

    /// So that the next one to start can have the number at once.
    pub async fn give_number_back(&self, leases: &Cells<Leases>, clock: &Clock) {
        let Some(Held { owner, epoch, .. }) = self.held() else { return };
        let now = clock.now().timestamp_millis();
        let release = move |state: &mut Option<Leases>| {
            state.as_mut().map_or(Ok(()), |leases| leases.release(&owner, epoch, Some(now)))
        };
        if let Err(error) = leases.change(LEASES, None, release).await {
            tracing::debug!(%error, "this instance's number was not given back and will expire");
        }
    }

    async fn change(
        &self,
        leases: &Cells<Leases>,
        mut apply: impl FnMut(&mut Leases) -> Result<Held> + Send + 'static,
    ) -> Result<()> {
        let apply = move |state: &mut Option<Leases>| apply(state.get_or_insert_default());
        let held = leases.change(LEASES, None, apply).await?.answer;
        self.hold(Some(held));
        Ok(())
    }

    fn held(&self) -> Option<Held> {
        self.held.lock().expect("no panic while the number is held").clone()
    }

    fn hold(&self, held: Option<Held>) {
        *self.held.lock().expect("no panic while the number is held") = held;
    }
}

fn terms(clock: &Clock) -> Terms {
    Terms { now: clock.now().timestamp_millis(), ttl: TTL.as_millis() as i64, numbers: NUMBERS }
}
