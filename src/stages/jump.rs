//! After the stages were put back to an older state.

use tokio::time::Instant;

use super::{Stages, allocations::Run, contents::Contents};
use crate::{
    api::stages::LAST_STAGE,
    error::{Error, Result},
    watermark::Passed,
};

impl Stages {
    /// Passes over stages that may have been allocated since, and over props and acts that may have been made in those that
    /// are known. Tells which are known, and the next stage's id.
    pub async fn jump(&self, margin: u32) -> Result<(Passed, i64)> {
        let (mut passed, mut last, mut next) = (Passed::default(), 0, self.first_id);
        loop {
            let (page, _) = self.allocations.read_after(last).await?;
            if page.is_empty() {
                break;
            }
            for given in page {
                (last, next) = (given.sequence, given.run.end().max(next));
                for (_, stage) in given.run.each() {
                    let key = stage.to_string();
                    passed.count(&key, self.jump_in(&key, stage, margin).await)?;
                }
            }
        }
        let left = i64::from(LAST_STAGE) + 1 - next;
        let skipped = i64::from(margin).min(left.max(0)) as u32;
        if skipped > 0 {
            let run = Run { first: next as i32, requests: Vec::new(), skipped };
            let written = self.allocations.append(last, &run, Instant::now() + self.deadline).await;
            let unwritten = || Error::unavailable("the stages can't be written");
            written.map_err(|undecided| unwritten().source(undecided.source))?.ok_or_else(unwritten)?;
        }
        Ok((passed, next + i64::from(skipped)))
    }

    async fn jump_in(&self, key: &str, stage: i32, margin: u32) -> Result<()> {
        let parts = self.contents.part_names(key).await?;
        let jumped = |contents: Option<Contents>| {
            let parts = parts.iter().map(String::as_str);
            contents.unwrap_or_else(|| Contents::of(stage)).jumped(i64::from(margin), parts)
        };
        self.contents.rewrite(key, jumped).await
    }
}
