//! What a process does. All of it by default; `serve --roles` chooses.

use std::{fmt, str::FromStr};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Answers `tm.id.*`.
    Ids,
    /// Answers `tm.noid.*`.
    Noid,
    /// Answers `tm.stage.*`.
    Stages,
    /// Answers `tm.timer.*`, and fires timers.
    Timers,
    /// Answers `tm.usage.*`, and writes usage events to the ledger.
    Usage,
    /// The HTTP bridge.
    Http,
}

impl Role {
    pub const ALL: &'static [Role] = &[Role::Ids, Role::Noid, Role::Stages, Role::Timers, Role::Usage, Role::Http];

    pub fn as_str(self) -> &'static str {
        match self {
            Role::Ids => "ids",
            Role::Noid => "noid",
            Role::Stages => "stages",
            Role::Timers => "timers",
            Role::Usage => "usage",
            Role::Http => "http",
        }
    }

    pub fn names() -> Vec<&'static str> {
        Self::ALL.iter().map(|role| role.as_str()).collect()
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .copied()
            .find(|role| role.as_str() == name)
            .ok_or_else(|| format!("unknown role {name:?}, expected one of {}", Self::names().join(", ")))
    }
}
