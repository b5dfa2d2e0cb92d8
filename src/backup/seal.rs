//! What the files of a backup are, so that one that was damaged since is known before anything is touched.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    path::Path,
};

use sha2::{Digest, Sha256};
use tokio::task::spawn_blocking;

use super::{BackupError, Result, file};
use crate::hex;

/// The hash of each file, by its name.
pub type Seal = BTreeMap<String, String>;

/// Of all that is in a folder.
pub async fn of(folder: &Path) -> Result<Seal> {
    aside(folder, |folder| {
        let unread = |source| file(folder, source);
        let hashed = |entry: std::io::Result<fs::DirEntry>| {
            let entry = entry.map_err(unread)?;
            Ok((entry.file_name().to_string_lossy().into_owned(), hash(&entry.path())?))
        };
        fs::read_dir(folder).map_err(unread)?.map(hashed).collect()
    })
    .await
}

/// Refuses a folder in which one is missing or is not as it was.
pub async fn check(folder: &Path, seal: &Seal) -> Result<()> {
    let seal = seal.clone();
    aside(folder, move |folder| {
        seal.iter().try_for_each(|(name, expected)| {
            let path = folder.join(name);
            match hash(&path)? == *expected {
                true => Ok(()),
                false => Err(BackupError::Folder { path, problem: "is not as it was saved".into() }),
            }
        })
    })
    .await
}

/// Reading takes its time, and connections want to be looked after meanwhile.
async fn aside<T: Send + 'static>(folder: &Path, work: impl FnOnce(&Path) -> Result<T> + Send + 'static) -> Result<T> {
    let folder = folder.to_owned();
    let done = spawn_blocking(move || work(&folder));
    done.await.unwrap_or_else(|error| Err(BackupError::Refused(error.to_string())))
}

fn hash(path: &Path) -> Result<String> {
    let unread = |source| file(path, source);
    let mut from = File::open(path).map_err(unread)?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 17]);
    loop {
        match from.read(&mut buffer).map_err(unread)? {
            0 => return Ok(hex::encode(&hash.finalize())),
            read => hash.update(&buffer[..read]),
        }
    }
}
