//! The time of day, passed in, so that tests can move it.

use std::sync::{Arc, Mutex};

use chrono::{DateTime, Utc};

/// Cheap to clone. The system's clock, or one that a test moves by hand.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Mutex<DateTime<Utc>>>>);

impl Clock {
    pub fn system() -> Self {
        Self(None)
    }

    /// A clock that stands still until [`Clock::set`].
    pub fn manual(now: DateTime<Utc>) -> Self {
        Self(Some(Arc::new(Mutex::new(now))))
    }

    pub fn now(&self) -> DateTime<Utc> {
        match &self.0 {
            None => Utc::now(),
            Some(time) => *time.lock().expect("no panic while the clock is held"),
        }
    }

    /// Moves a manual clock and every clone of it.
    ///
    /// # Panics
    /// On the system's clock, which is not ours to move.
    pub fn set(&self, now: DateTime<Utc>) {
        let time = self.0.as_ref().expect("only a manual clock can be set");
        *time.lock().expect("no panic while the clock is held") = now;
    }
}
