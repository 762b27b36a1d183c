//! What this process has read of manifests, without tensors and values: a look at a run after each save costs what has
//! changed, however many tensors its steps have.

use crate::format::manifest::Listed;
use crate::format::{FileEntry, Manifest, TRAILER_LEN, names};
use crate::sys::dir::look_at;
use crate::sys::file;
use crate::sys::fork::{GENERATIONS, PerProcess};
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// So many are remembered at most; then all are forgotten.
const MOST: usize = 10_000;

/// By the checkpoint's directory.
static READ: PerProcess<BTreeMap<PathBuf, (Mark, Arc<Summary>)>> =
    PerProcess::new([const { Mutex::new(BTreeMap::new()) }; GENERATIONS]);

/// Tells a manifest from every other one, and from itself before somebody has written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    inode: u64,
    changed: (i64, i64),
    bytes: u64,
    /// The checksum of the rest.
    trailer: [u8; TRAILER_LEN],
}

impl Mark {
    fn of(path: &Path) -> Option<Self> {
        let found = look_at(path).ok()?;
        let (bytes, trailer) = file::read_end(path).ok()?;
        Some(Self {
            inode: found.ino(),
            changed: (found.mtime(), found.mtime_nsec()),
            bytes,
            trailer,
        })
    }
}

/// A manifest that was read and checked, in brief.
#[derive(Debug)]
pub(in crate::store) struct Summary {
    /// Without its tensors and values, and the checksums of its files.
    pub manifest: Listed,
    /// Number of tensors.
    pub tensors: usize,
}

/// What was read of the manifest in a directory, if it is still the same one. Reads its last bytes.
pub(in crate::store) fn read_before(dir: &Path) -> Option<Arc<Summary>> {
    read_as(dir, names::MANIFEST)
}

/// [`read_before`], while a removal has given it another name.
pub(in crate::store) fn read_as(dir: &Path, name: &str) -> Option<Arc<Summary>> {
    let (mark, summary) = READ.lock()?.get(dir)?.clone();
    (Mark::of(&dir.join(name))? == mark).then_some(summary)
}

/// Remembers a manifest of this many bytes that was read and checked.
pub(in crate::store) fn remember(
    dir: &Path,
    manifest: &Manifest,
    bytes: u64,
    trailer: [u8; TRAILER_LEN],
) {
    let Some(mark) = Mark::of(&dir.join(names::MANIFEST)) else { return };
    if (mark.bytes, mark.trailer) != (bytes, trailer) {
        return; // it was replaced meanwhile
    }
    let Some(mut read) = READ.lock() else { return };
    if read.len() >= MOST {
        read.clear();
    }
    let file = |file: &FileEntry| FileEntry {
        name: file.name.clone(),
        bytes: file.bytes,
        crc32: Vec::new(),
        hashes: Vec::new(),
    };
    let files = manifest.files.iter().map(file).collect();
    let summary = Summary {
        tensors: manifest.tensors.len(),
        manifest: manifest.with(files, IgnoredAny, IgnoredAny),
    };
    read.insert(dir.into(), (mark, Arc::new(summary)));
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::pipeline::runtime::Runtime;
    use crate::state::StateDict;
    use crate::store::layout::summary::*;
    use crate::store::save;

    /// Regression: of several threads that asked at once, only one got the summary.
    #[test]
    fn threads_that_ask_at_once_all_get_the_summary() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("step-1");
        let runtime = Runtime::new(Config::default()).unwrap();
        save(&runtime, &StateDict::new(), &dir, &Arc::default()).unwrap();
        crate::store::list(root.path(), &Config::default()).unwrap();
        std::thread::scope(|scope| {
            let ask = || (0..20_000).all(|_| read_before(&dir).is_some());
            let other = scope.spawn(ask);
            assert!(ask() && other.join().unwrap());
        });
    }
}
