//! PostgreSQL refuses to run as root, so for root there is another user.

use std::{
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::Path,
    process::Command,
};

use nix::unistd::{User, geteuid};

use super::{Doing, EmbeddedError, Result};

/// The user to run as, if it can't be us.
#[derive(Debug, Clone)]
pub struct Unprivileged {
    name: String,
    uid: u32,
    gid: u32,
}

impl Unprivileged {
    /// None if we are no root ourselves.
    pub fn needed() -> Result<Option<Self>> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        for name in ["postgres", "nobody"] {
            if let Ok(Some(user)) = User::from_name(name) {
                return Ok(Some(Self { name: name.to_owned(), uid: user.uid.as_raw(), gid: user.gid.as_raw() }));
            }
        }
        Err(EmbeddedError::new(
            "PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as",
        ))
    }

    /// Makes the command run as this user.
    pub fn drop_to(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }

    pub fn own(&self, path: &Path) -> Result<()> {
        chown(path, Some(self.uid), Some(self.gid))
            .doing(|| format!("giving {} to the user {}", path.display(), self.name))
    }

    /// Whether the user can get into a folder: every folder above must let strangers pass.
    pub fn can_reach(&self, path: &Path) -> bool {
        path.ancestors().skip(1).all(|folder| {
            let Ok(metadata) = folder.metadata() else { return true };
            metadata.permissions().mode() & 0o001 != 0
        })
    }
}
