//! After the stages were put back to an older state.

use super::{Stages, contents::Contents};
use crate::{
    api::stages::LAST_STAGE,
    error::{Error, Result},
    jetstream::{MOST_MESSAGES, publish_batch},
};

impl Stages {
    /// Passes over stages that may have been allocated since, and over props and acts that may have been made in those that
    /// are known. Tells how many are known, and the next stage's id.
    pub async fn jump(&self, margin: i64) -> Result<(usize, i64)> {
        let (first, last) = self.allocations.bounds().await?;
        let mut known = Vec::new();
        for stage in first..=last {
            if self.allocations.find(stage as i32).await?.is_some() {
                known.push(stage as i32);
            }
        }
        for stage in &known {
            let key = stage.to_string();
            let parts = self.contents.part_names(&key).await?;
            let jumped = |contents: Option<Contents>| {
                contents.unwrap_or_else(|| Contents::of(*stage)).jumped(margin, parts.iter().map(String::as_str))
            };
            self.contents.rewrite(&key, jumped).await?;
        }
        let skipped = margin.min(i64::from(LAST_STAGE) - last).max(0);
        let filler = self.allocations.filler();
        for begun in (0..skipped).step_by(MOST_MESSAGES) {
            let batch = vec![filler.clone(); (skipped - begun).min(MOST_MESSAGES as i64) as usize];
            let unwritten = |error| Error::unavailable("the stages can't be written").source(error);
            publish_batch(&self.allocations.client(), &batch).await.map_err(unwritten)?;
        }
        Ok((known.len(), last + skipped + 1))
    }
}
