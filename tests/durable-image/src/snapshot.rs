//! What is in the live directories right now.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file or directory: its device and its number there.
pub(crate) type Key = (u64, u64);

pub(crate) fn key(of: &Metadata) -> Key {
    (of.dev(), of.ino())
}

/// What has which name in which directory.
pub(crate) type Name = (Key, OsString, Key);

/// Directories, and all that is below them.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    /// Those in a directory come after the directory's own.
    pub names: Vec<Name>,
    /// What is in each file.
    pub files: BTreeMap<Key, Vec<u8>>,
}

impl Snapshot {
    /// Looks until it has seen the same names twice: other threads may rename files meanwhile.
    pub fn of(roots: &[PathBuf]) -> Self {
        /// How many times others may change names.
        const TRIES_MAX: usize = 1000;
        let mut before = Self::default();
        for _ in 0..TRIES_MAX {
            let mut now = Self::default();
            let looked = roots.iter().try_for_each(|root| now.add(root));
            match looked {
                Ok(()) if now.names == before.names => return now,
                Ok(()) => before = now,
                // It was removed after its directory was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => panic!("looking at {roots:?}: {error}"),
            }
        }
        panic!("the names in {roots:?} do not stand still");
    }

    fn add(&mut self, dir: &Path) -> io::Result<()> {
        let of = key(&fs::metadata(dir)?);
        let mut entries = fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(DirEntry::file_name);
        for (path, name) in entries.iter().map(|entry| (entry.path(), entry.file_name())) {
            let found = fs::symlink_metadata(&path)?;
            self.names.push((of, name, key(&found)));
            if found.is_dir() {
                self.add(&path)?;
            } else if found.is_file() && !self.files.contains_key(&key(&found)) {
                self.files.insert(key(&found), fs::read(&path)?);
            } else if !found.is_file() {
                panic!("{} is neither a file nor a directory", path.display());
            }
        }
        Ok(())
    }
}
