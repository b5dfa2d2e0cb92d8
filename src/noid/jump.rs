//! After the pools were put back to an older state.

use super::{Pools, existing, key};
use crate::error::Result;

impl Pools {
    /// Passes over so many ids that each pool may have minted since. Tells how many pools there are.
    pub async fn jump(&self, margin: usize) -> Result<usize> {
        let names = self.names().await?;
        for name in &names {
            let now = self.clock.now();
            let jump = move |state: &mut Option<super::pool::Pool>| {
                existing(state)?.jump(margin, now);
                Ok(())
            };
            self.cells.change(&key(name), None, jump).await?;
        }
        Ok(names.len())
    }
}
