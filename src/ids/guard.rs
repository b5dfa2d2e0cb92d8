//! The guard of a formatted key: which version of its format counts, and whether an id of it may exist.
//!
//! A format can change freely until an id was given. So that "until" is exact, the first use of a format and its change
//! meet at one key of the bucket: whoever comes second sees it.

use serde::{Deserialize, Serialize};

use super::keys::being_changed;
use crate::{
    api::Name,
    error::Result,
    registry::changed_meanwhile,
    watermark::{Cells, RequestId, State, lost},
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Guard {
    version: u64,
    /// Whether an instance has said that it gives ids of this version,
    announced: bool,
    /// or of any so far.
    used: bool,
}

impl State for Guard {}

/// The guards of all keys.
#[derive(Clone)]
pub struct Guards(Cells<Guard>);

fn key_of(key: &Name) -> String {
    format!("formatted.{key}")
}

impl Guards {
    pub fn new(cells: Cells<Guard>) -> Self {
        Self(cells)
    }

    /// Says that ids of a version are given from now on.
    pub async fn announce(&self, key: &Name, version: u64) -> Result<()> {
        let announce = move |state: &mut Option<Guard>| match state {
            None => Err(lost()),
            Some(guard) if guard.version == version => {
                (guard.announced, guard.used) = (true, true);
                Ok(())
            }
            Some(_) => Err(being_changed()),
        };
        self.0.change(&key_of(key), None, announce).await.map(drop)
    }

    /// Whether this version is the one that counts. It is not where a change to another was broken off.
    pub async fn stands_at(&self, key: &Name, version: u64) -> Result<bool> {
        Ok(self.0.read(&key_of(key)).await?.is_none_or(|guard| guard.version == version))
    }

    /// Moves on to a version, whose number is one above the known one's. If ids may exist, `check` decides.
    /// Answers whether they may.
    pub async fn advance(
        &self,
        key: &Name,
        known: Option<u64>,
        request: RequestId,
        mut check: impl FnMut() -> Result<()> + Send + 'static,
    ) -> Result<bool> {
        let (version, name) = (known.unwrap_or(0) + 1, key.clone());
        let advance = move |state: &mut Option<Guard>| {
            let used = match state {
                None if known.is_some() => return Err(lost()),
                None => false,
                // Behind us, or where an attempt that was broken off has left it.
                Some(guard) if guard.version < version || (guard.version == version && !guard.announced) => guard.used,
                Some(_) => return Err(changed_meanwhile(&name)),
            };
            if used {
                check()?;
            }
            *state = Some(Guard { version, announced: false, used });
            Ok(used)
        };
        Ok(self.0.change(&key_of(key), request, advance).await?.answer)
    }

    /// After a restore: the version that is known counts, and ids of it may exist.
    pub async fn restore(&self, key: &Name, version: u64) -> Result<()> {
        let restore = move |state: &mut Option<Guard>| {
            *state = Some(Guard { version, announced: true, used: true });
            Ok(())
        };
        self.0.change(&key_of(key), None, restore).await.map(drop)
    }

    /// Puts a lost guard back.
    pub async fn begin_again(&self, key: &Name, version: u64) -> Result<()> {
        let begin = move |state: &mut Option<Guard>| {
            state.get_or_insert(Guard { version, announced: false, used: false });
            Ok(())
        };
        self.0.change(&key_of(key), None, begin).await.map(drop)
    }
}
