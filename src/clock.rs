//! The time of day, passed in, so that tests can move it.

use std::sync::{Arc, Mutex};

use chrono::{DateTime, TimeDelta, Utc};

/// Cheap to clone. The system's clock, or one that a test moves by hand or sets wrong.
#[derive(Clone, Default)]
pub struct Clock(Kind);

#[derive(Clone, Default)]
enum Kind {
    #[default]
    System,
    Manual(Arc<Mutex<DateTime<Utc>>>),
    Wrong(TimeDelta),
}

impl Clock {
    pub fn system() -> Self {
        Self::default()
    }

    /// A clock that stands still until [`Clock::set`].
    pub fn manual(now: DateTime<Utc>) -> Self {
        Self(Kind::Manual(Arc::new(Mutex::new(now))))
    }

    /// A clock that runs, but is ahead of the system's.
    pub fn ahead(by: TimeDelta) -> Self {
        Self(Kind::Wrong(by))
    }

    /// The same clock if it runs; the system's for one that stands still, which would wait for ever.
    pub fn running(&self) -> Self {
        match &self.0 {
            Kind::Manual(_) => Self::system(),
            Kind::System | Kind::Wrong(_) => self.clone(),
        }
    }

    pub fn now(&self) -> DateTime<Utc> {
        match &self.0 {
            Kind::System => Utc::now(),
            Kind::Manual(time) => *time.lock().expect(UNBROKEN),
            Kind::Wrong(by) => Utc::now() + *by,
        }
    }

    /// Moves a manual clock and every clone of it.
    ///
    /// # Panics
    /// On a clock that is not ours to move.
    pub fn set(&self, now: DateTime<Utc>) {
        let Kind::Manual(time) = &self.0 else { panic!("only a manual clock can be set") };
        *time.lock().expect(UNBROKEN) = now;
    }
}

const UNBROKEN: &str = "no panic while the clock is held";
