//! Increment keys. The configuration is a record of the registry; the mark is a counter of its own.

use super::{
    Ids,
    keys::{KeyRecord, Kind, check_name, known, size},
    sequences::{CounterName, Taking},
};
use crate::{
    api::{
        self, Call, Handle, Name,
        ids::{GetIncrement, IdType, Increment, IncrementConfig, IncrementSettings, SetIncrement},
    },
    error::{Code, Error, Result},
    watermark::{Absent, Bounds, Mark, RequestId, Steps, lost},
};

/// Steps beyond this would leave a counter with hardly any number.
const LARGEST_DELTA: i64 = 1_000_000_000_000;

impl Ids {
    /// Puts a key back to its base where its mark is lost.
    pub(super) async fn begin_increment_again(&self, key: &Name, settings: &IncrementSettings) -> Result<()> {
        self.sequences.begin(CounterName::Increment(key), Absent::Begins, settings.base, None).await
    }
}

impl Handle<Increment> for Ids {
    async fn handle(&self, mut call: Call<Increment>) -> Result<api::ids::Ids> {
        let key = &call.target;
        let record = self.existing(key).await?;
        let settings: &IncrementSettings = record.settings(key)?;
        let count = size(&mut call.request.size)?;
        let step = call.request.delta.unwrap_or(settings.delta);
        if !(1..=settings.max_request_delta).contains(&step) {
            let problem = format!("must lie between 1 and {}, is {step}", settings.max_request_delta);
            return Err(Error::field_as(Code::DeltaExceedsLimit, "delta", problem));
        }
        let random = call.request.rand_delta.unwrap_or(settings.rand_delta);
        let taking = Taking {
            steps: Steps { count, step, random },
            bounds: Bounds { base: settings.base, max: settings.max.unwrap_or(i64::MAX) },
            mode: settings.mode,
            version: None,
        };
        let request = || call.context.request_id();
        let counter = CounterName::Increment(key);
        let _measured = self.requests.measure(key, IdType::Increment);
        let id = match self.once(&call)? {
            None => self.sequences.take(counter, taking, &request).await?,
            Some(once) => {
                let render = |numbers| numbers;
                Box::pin(self.sequences.take_once(counter, taking, &request, once, render)).await?
            }
        };
        Ok(api::ids::Ids { id })
    }
}

impl Handle<SetIncrement> for Ids {
    async fn handle(&self, call: Call<SetIncrement>) -> Result<IncrementConfig> {
        check(&call.request)?;
        self.registry.until_stored(|| self.set_increment(&call.target, &call.request, call.context.request_id())).await
    }
}

impl Ids {
    async fn set_increment(
        &self,
        key: &Name,
        settings: &IncrementSettings,
        request: RequestId,
    ) -> Result<IncrementConfig> {
        let row = self.find(key).await?;
        let known = known::<IncrementSettings>(&row, key)?;
        let (base, exists, unchanged) =
            (settings.base, known.is_some(), known.is_some_and(|known| known.base == settings.base));
        // First the mark, then the record: after a crash between the two, the same call again completes it.
        let jump = move |state: &mut Option<Mark>| match state {
            None if exists => Err(lost()),
            None => Ok(state.insert(Mark::at(base)).mark),
            Some(mark) if base > mark.mark => {
                *mark = Mark::at(base);
                Ok(base)
            }
            Some(mark) if base == mark.mark || unchanged => Ok(mark.mark),
            Some(Mark { mark, .. }) => {
                let problem = format!("must not lie below the current value {mark}: ids would repeat");
                Err(Error::field("base", problem).details(serde_json::json!({ "field": "base", "current": mark })))
            }
        };
        let current =
            self.sequences.cells().change(&CounterName::Increment(key).to_string(), request, jump).await?.answer;
        let record = self.store(key, row, Kind::Increment(settings.clone())).await?;
        Ok(describe(key.clone(), settings.clone(), &record, current))
    }
}

impl Handle<GetIncrement> for Ids {
    async fn handle(&self, call: Call<GetIncrement>) -> Result<IncrementConfig> {
        let record = self.existing(&call.target).await?;
        let settings: &IncrementSettings = record.settings(&call.target)?;
        let mark =
            self.sequences.cells().read(&CounterName::Increment(&call.target).to_string()).await?.ok_or_else(lost)?;
        Ok(describe(call.target.clone(), settings.clone(), &record, mark.mark))
    }
}

fn check(settings: &IncrementSettings) -> Result<()> {
    check_name(&settings.name)?;
    let IncrementSettings { base, delta, max_request_delta, max, .. } = settings;
    if *base < 0 {
        return Err(Error::field("base", format!("must not be negative, is {base}")));
    }
    if !(1..=LARGEST_DELTA).contains(max_request_delta) {
        let problem = format!("must lie between 1 and {LARGEST_DELTA}, is {max_request_delta}");
        return Err(Error::field("max_request_delta", problem));
    }
    if !(1..=*max_request_delta).contains(delta) {
        let problem = format!("must lie between 1 and max_request_delta, which is {max_request_delta}, is {delta}");
        return Err(Error::field_as(Code::DeltaExceedsLimit, "delta", problem));
    }
    match max {
        Some(max) if max <= base => Err(Error::field("max", format!("must lie above base, which is {base}, is {max}"))),
        _ => Ok(()),
    }
}

fn describe(key: Name, settings: IncrementSettings, record: &KeyRecord, current: i64) -> IncrementConfig {
    let IncrementSettings { name, base, delta, max_request_delta, rand_delta, mode, max } = settings;
    let KeyRecord { created_at, updated_at, .. } = *record;
    IncrementConfig {
        key,
        name,
        base,
        current,
        delta,
        max_request_delta,
        rand_delta,
        mode,
        max,
        created_at,
        updated_at,
    }
}
