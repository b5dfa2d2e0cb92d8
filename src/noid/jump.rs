//! After the pools were put back to an older state.

use super::{Pools, existing, key};
use crate::{error::Result, watermark::Passed};

impl Pools {
    /// Passes over so many ids that each pool may have minted since.
    pub async fn jump(&self, margin: usize) -> Result<Passed> {
        let mut passed = Passed::default();
        for name in self.names().await? {
            let now = self.clock.now();
            let jump = move |state: &mut Option<super::pool::Pool>| {
                existing(state)?.jump(margin, now);
                Ok(())
            };
            passed.count(name.as_str(), self.cells.change(&key(&name), None, jump).await.map(drop))?;
        }
        Ok(passed)
    }
}
