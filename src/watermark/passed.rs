//! What a restore has passed over.

use crate::error::{Code, Error, Result};

/// Keys that have passed over what they may have given since, and those that are broken. These give nothing, and must not keep
/// the others from being restored.
#[derive(Debug, Default)]
pub struct Passed {
    pub keys: usize,
    pub broken: Vec<String>,
}

impl Passed {
    /// Counts a key.
    pub fn count(&mut self, key: &str, passed: Result<()>) -> Result<()> {
        match passed {
            Ok(()) => self.keys += 1,
            Err(Error { code: Code::Internal, .. }) => self.broken.push(key.to_owned()),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
