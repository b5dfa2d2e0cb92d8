//! Snowflake keys: leases of worker ids, and minting for callers that can't hold one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{
    Ids,
    keys::{KeyRecord, Kind, being_changed, check_name, known, size},
};
use crate::{
    access,
    api::{
        Call, Handle, Name,
        ids::{
            GetSnowflake, IdType, LeaseSnowflake, NextSnowflakes, ReleaseRequest, ReleaseSnowflake, Released,
            RenewSnowflake, SetSnowflake, SnowflakeConfig, SnowflakeIds, SnowflakeLease, SnowflakeSettings,
        },
    },
    clock::Clock,
    error::{Error, Result},
    hex,
    snowflake::{Fence, Generator, Keeper, Layout, Refusal},
    watermark::{
        Cells, RequestId, State,
        leases::{Held, Leases, Terms},
        lost,
    },
};

/// Snowflake keys in use by this process.
pub struct Snowflakes {
    leasing: Leasing,
    /// What this instance mints with, by key.
    minters: Mutex<HashMap<Name, Arc<tokio::sync::Mutex<Place>>>>,
}

#[derive(Default)]
enum Place {
    #[default]
    Empty,
    Minting(Minter),
    /// No lease was to be had.
    Failed(Instant, Error),
}

/// A lease that this instance holds for callers without one.
struct Minter {
    generator: Arc<Generator>,
    held: Held,
    _keeper: Keeper,
}

impl Snowflakes {
    pub fn new(leasing: Leasing) -> Self {
        Self { leasing, minters: Mutex::default() }
    }

    /// Mints with this instance's own lease, taking one if it has none.
    async fn mint(&self, instance: &str, key: &Name, layout: Layout, count: u32) -> Result<Vec<u64>> {
        loop {
            let generator = self.minter(instance, key, layout).await?;
            match generator.take(count as usize).await {
                Ok(ids) => return Ok(ids),
                // Lost, or the clock passed its end. Whoever comes first takes a new one.
                Err(Refusal::LeaseEnded) => self.forget(key, &generator).await,
                Err(refusal) => return Err(refusal.into()),
            }
        }
    }

    async fn minter(&self, instance: &str, key: &Name, layout: Layout) -> Result<Arc<Generator>> {
        let place = {
            let mut minters = self.minters.lock().expect("no panic while minters are held");
            minters.entry(key.clone()).or_default().clone()
        };
        let mut place = place.lock().await;
        match &*place {
            Place::Minting(minter) => return Ok(minter.generator.clone()),
            // Everyone who waited behind the one that failed would fail as slowly.
            Place::Failed(when, error) if when.elapsed() < Duration::from_secs(1) => return Err(error.share()),
            Place::Failed(..) | Place::Empty => {}
        }
        match self.lease(instance, key, layout).await {
            Ok(minter) => {
                let generator = minter.generator.clone();
                *place = Place::Minting(minter);
                Ok(generator)
            }
            Err(error) => {
                *place = Place::Failed(Instant::now(), error.share());
                Err(error)
            }
        }
    }

    async fn lease(&self, instance: &str, key: &Name, layout: Layout) -> Result<Minter> {
        // A new owner each time: a lease that we had before and lost must not come back to us as it was.
        let owner = format!("{:.24}/{}", instance, uuid::Uuid::now_v7().simple());
        let held = self.leasing.take(key, layout, Some(owner), None).await?;
        let fence = Fence { begins: held.begins, ends: held.ends };
        let generator = Arc::new(Generator::new(layout, held.number, fence, self.leasing.clock.clone()));
        let (leasing, leased_key, lease) = (self.leasing.clone(), key.clone(), held.clone());
        let renew = move || {
            let (leasing, key, lease) = (leasing.clone(), leased_key.clone(), lease.clone());
            async move { Ok(leasing.renew(&key, layout, lease.owner, lease.epoch).await?.ends) }
        };
        let keeper = Keeper::start(generator.clone(), self.leasing.owned, renew);
        Ok(Minter { generator, held, _keeper: keeper })
    }

    async fn forget(&self, key: &Name, generator: &Arc<Generator>) {
        let place = self.minters.lock().expect("no panic while minters are held").get(key).cloned();
        if let Some(place) = place {
            let mut place = place.lock().await;
            if matches!(&*place, Place::Minting(minter) if Arc::ptr_eq(&minter.generator, generator)) {
                *place = Place::Empty;
            }
        }
    }

    /// Gives back the leases that this instance holds.
    pub async fn stop(&self) {
        let minters: Vec<_> = self.minters.lock().expect("no panic while minters are held").drain().collect();
        for (key, place) in minters {
            let Place::Minting(Minter { generator, held, .. }) = std::mem::take(&mut *place.lock().await) else {
                continue;
            };
            let (last, layout) = (generator.stop(), generator.layout());
            if let Err(error) = self.leasing.release(&key, layout, (held.owner, held.epoch), last, None).await {
                tracing::debug!(%key, %error, "a worker id was not given back and will expire");
            }
        }
    }
}

/// The leases of a key, with the layout that they are for: it can't change once one was given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseSet {
    layout: Layout,
    leases: Leases,
}

impl State for LeaseSet {}

/// Takes, keeps and gives back worker ids. Cheap to clone.
#[derive(Clone)]
pub struct Leasing {
    pub cells: Cells<LeaseSet>,
    pub clock: Clock,
    /// How long leases last, with an owner and without.
    pub owned: Duration,
    pub unowned: Duration,
}

impl Leasing {
    async fn take(&self, key: &Name, layout: Layout, owner: Option<String>, request: RequestId) -> Result<Held> {
        let (owner, ttl) = match owner {
            Some(owner) => (owner, self.owned),
            None => (uuid::Uuid::now_v7().to_string(), self.unowned),
        };
        let terms = self.terms(layout, ttl);
        self.change(key, layout, request, move |leases| leases.take(&owner, terms)).await
    }

    async fn renew(&self, key: &Name, layout: Layout, owner: String, epoch: u64) -> Result<Held> {
        let terms = self.terms(layout, self.owned);
        self.change(key, layout, None, move |leases| leases.renew(&owner, epoch, terms)).await
    }

    async fn release(
        &self,
        key: &Name,
        layout: Layout,
        (owner, epoch): (String, u64),
        last: Option<i64>,
        request: RequestId,
    ) -> Result<()> {
        self.change(key, layout, request, move |leases| leases.release(&owner, epoch, last)).await
    }

    /// Lends no number that somebody may hold, for as long as he may. The layout is the one that the key has.
    async fn hold(&self, key: &Name, layout: Layout, since: DateTime<Utc>, more: u32, longest: Duration) -> Result<()> {
        let terms = self.terms(layout, longest);
        let hold = move |state: &mut Option<LeaseSet>| {
            let mut leases = state.take().map(|set| set.leases).unwrap_or_default();
            leases.hold(since.timestamp_millis(), more, terms);
            *state = Some(LeaseSet { layout, leases });
            Ok(())
        };
        self.cells.change(&lease_key(key), None, hold).await.map(drop)
    }

    async fn read(&self, key: &Name) -> Result<Leases> {
        Ok(self.cells.read(&lease_key(key)).await?.ok_or_else(lost)?.leases)
    }

    fn terms(&self, layout: Layout, ttl: Duration) -> Terms {
        let ttl = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX / 2);
        Terms { now: self.clock.now().timestamp_millis(), ttl, numbers: layout.workers() }
    }

    /// Says for which layout leases are from now on. `exists`: there must be a set already.
    async fn set_layout(&self, key: &Name, layout: Layout, exists: bool, request: RequestId) -> Result<()> {
        let set = move |state: &mut Option<LeaseSet>| match state {
            None if exists => Err(lost()),
            Some(set) if set.layout != layout && set.leases.is_used() => {
                Err(Error::invalid("the layout can't change once a lease was given: ids could repeat"))
            }
            Some(set) => {
                set.layout = layout;
                Ok(())
            }
            None => {
                *state = Some(LeaseSet { layout, leases: Leases::default() });
                Ok(())
            }
        };
        self.cells.change(&lease_key(key), request, set).await.map(drop)
    }

    async fn change<A: Send + 'static>(
        &self,
        key: &Name,
        layout: Layout,
        request: RequestId,
        mut apply: impl FnMut(&mut Leases) -> Result<A> + Send + 'static,
    ) -> Result<A> {
        let apply = move |state: &mut Option<LeaseSet>| {
            let set = state.as_mut().ok_or_else(lost)?;
            if set.layout != layout {
                return Err(being_changed());
            }
            apply(&mut set.leases)
        };
        Ok(self.cells.change(&lease_key(key), request, apply).await?.answer)
    }
}

fn lease_key(key: &Name) -> String {
    format!("snowflake.{key}")
}

fn layout(settings: &SnowflakeSettings) -> Layout {
    Layout {
        base: settings.base_ts,
        skip_bits: settings.skip_size,
        timestamp_bits: settings.ts_size,
        worker_bits: settings.worker_id_size,
        sequence_bits: settings.seq_size,
    }
}

impl Ids {
    pub(super) async fn hold_workers_of(
        &self,
        key: &Name,
        settings: &SnowflakeSettings,
        since: DateTime<Utc>,
        more: u32,
        longest: Duration,
    ) -> Result<()> {
        self.snowflakes.leasing.hold(key, layout(settings), since, more, longest).await
    }

    /// Begins with no leases where they are lost.
    pub(super) async fn begin_snowflake_again(&self, key: &Name, settings: &SnowflakeSettings) -> Result<()> {
        self.snowflakes.leasing.set_layout(key, layout(settings), false, None).await
    }

    async fn describe_snowflake(
        &self,
        key: Name,
        settings: SnowflakeSettings,
        record: &KeyRecord,
    ) -> Result<SnowflakeConfig> {
        let leases = self.snowflakes.leasing.read(&key).await?;
        let expires_on = layout(&settings).expires_on();
        let SnowflakeSettings { name, skip_size, base_ts, ts_size, worker_id_size, seq_size } = settings;
        Ok(SnowflakeConfig {
            key,
            name,
            skip_size,
            base_ts,
            ts_size,
            worker_id_size,
            seq_size,
            active_workers: leases.active(self.clock.now().timestamp_millis()) as u64,
            expires_on,
            created_at: record.created_at,
            updated_at: record.updated_at,
        })
    }
}

fn moment(milliseconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(milliseconds).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

fn describe_lease(settings: &SnowflakeSettings, held: Held) -> SnowflakeLease {
    SnowflakeLease {
        skip_size: settings.skip_size,
        base_ts: settings.base_ts,
        ts_size: settings.ts_size,
        worker_id: held.number,
        worker_id_size: settings.worker_id_size,
        seq_size: settings.seq_size,
        owner: held.owner,
        epoch: held.epoch,
        not_before: moment(held.begins.max(settings.base_ts)),
        expires_at: moment(held.ends),
    }
}

fn check_owner(owner: String) -> Result<String> {
    match (1..=64).contains(&owner.len()) && !owner.contains(char::is_control) {
        true => Ok(owner),
        false => Err(Error::field("owner", "must have 1 to 64 bytes and no control characters")),
    }
}

impl Handle<LeaseSnowflake> for Ids {
    async fn handle(&self, call: Call<LeaseSnowflake>) -> Result<SnowflakeLease> {
        let record = self.existing(&call.target).await?;
        let settings = record.settings(&call.target)?;
        // A repeated request is its own owner: it finds the lease that it has, or takes a new one when that is gone.
        let owner = match (call.request.owner, &call.context.idempotency_key) {
            (Some(owner), _) => Some(check_owner(owner)?),
            (None, Some(name)) => Some(format!("once-{:.32}", hex::encode(&access::hash(name.as_str())))),
            (None, None) => None,
        };
        let request = call.context.request_id();
        let _measured = self.requests.measure(&call.target, IdType::Snowflake);
        let held = self.snowflakes.leasing.take(&call.target, layout(settings), owner, request).await?;
        Ok(describe_lease(settings, held))
    }
}

impl Handle<RenewSnowflake> for Ids {
    async fn handle(&self, call: Call<RenewSnowflake>) -> Result<SnowflakeLease> {
        let record = self.existing(&call.target).await?;
        let settings = record.settings(&call.target)?;
        let (owner, epoch) = (call.request.owner, call.request.epoch);
        let held = self.snowflakes.leasing.renew(&call.target, layout(settings), owner, epoch).await?;
        Ok(describe_lease(settings, held))
    }
}

impl Handle<ReleaseSnowflake> for Ids {
    async fn handle(&self, call: Call<ReleaseSnowflake>) -> Result<Released> {
        let record = self.existing(&call.target).await?;
        let settings = record.settings(&call.target)?;
        let ReleaseRequest { owner, epoch, last_timestamp } = call.request;
        let (lease, request) = ((owner, epoch), call.context.request_id());
        self.snowflakes.leasing.release(&call.target, layout(settings), lease, last_timestamp, request).await?;
        Ok(Released { released: true })
    }
}

impl Handle<NextSnowflakes> for Ids {
    async fn handle(&self, mut call: Call<NextSnowflakes>) -> Result<SnowflakeIds> {
        let key = &call.target;
        let record = self.existing(key).await?;
        let settings = record.settings(key)?;
        let count = size(&mut call.request.size)?;
        let mint = async || self.snowflakes.mint(&self.instance, key, layout(settings), count).await;
        let _measured = self.requests.measure(key, IdType::Snowflake);
        let id = self.answer(self.once(&call)?, mint).await?;
        Ok(match call.request.strings {
            false => SnowflakeIds::Numbers { id },
            true => SnowflakeIds::Strings { id: id.iter().map(u64::to_string).collect() },
        })
    }
}

impl Handle<SetSnowflake> for Ids {
    async fn handle(&self, call: Call<SetSnowflake>) -> Result<SnowflakeConfig> {
        check_name(&call.request.name)?;
        layout(&call.request).check(self.clock.now())?;
        self.registry.until_stored(|| self.set_snowflake(&call.target, &call.request, call.context.request_id())).await
    }
}

impl Ids {
    async fn set_snowflake(
        &self,
        key: &Name,
        settings: &SnowflakeSettings,
        request: RequestId,
    ) -> Result<SnowflakeConfig> {
        let row = self.find(key).await?;
        let exists = known::<SnowflakeSettings>(&row, key)?.is_some();
        // First the leases, then the record, as with the marks of increment keys.
        self.snowflakes.leasing.set_layout(key, layout(settings), exists, request).await?;
        let record = self.store(key, row, Kind::Snowflake(settings.clone())).await?;
        self.describe_snowflake(key.clone(), settings.clone(), &record).await
    }
}

impl Handle<GetSnowflake> for Ids {
    async fn handle(&self, call: Call<GetSnowflake>) -> Result<SnowflakeConfig> {
        let record = self.existing(&call.target).await?;
        let settings: &SnowflakeSettings = record.settings(&call.target)?;
        self.describe_snowflake(call.target.clone(), settings.clone(), &record).await
    }
}
