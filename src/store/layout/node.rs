//! What identifies a directory of checkpoints to ranks on other nodes, which do not see it.

use crate::error::{Error, Result};
use crate::format::{Manifest, names};
use crate::store::layout::published::{read_label, write_label};
use crate::sys::chance::unique;
use crate::sys::dir;
use crate::sys::file;
use crate::sys::file_system::host_name;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

/// The content of the file that identifies a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeId {
    /// A text that no other directory has.
    pub id: String,
    /// The host that made it, for messages.
    pub host: String,
}

/// What identifies the directory of a run; `None` if nothing does yet.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for another program's file.
pub(in crate::store) fn read(run: &Path) -> Result<Option<NodeId>> {
    let Some(text) = read_label(run, names::NODE)? else { return Ok(None) };
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        Error::format(
            run.join(names::NODE),
            format!("is not what identifies a node ({error}): remove it"),
        )
    })
}

/// What identifies the directory of a run. Creates directory and file if they are missing; of processes that do so at
/// once, all get the same.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for another program's file.
pub fn node_id(run: &Path) -> Result<NodeId> {
    if let Some(id) = read(run)? {
        return Ok(id);
    }
    let host = host_name();
    write_label(
        run,
        names::NODE,
        &serde_json::json!(NodeId { id: unique(), host }).to_string(),
        false,
    )?;
    read(run)?.ok_or_else(|| {
        let gone = io::Error::from(io::ErrorKind::NotFound);
        Error::io("reading", run.join(names::NODE), gone)
    })
}

/// Whether a save by ranks on several nodes has written its manifest to this directory, and was killed before it committed
/// here: it may be committed on other nodes.
pub(in crate::store) fn is_prepared(dir: &Path) -> bool {
    let path = dir.join(names::UNCOMMITTED_MANIFEST);
    let read = || Manifest::decode_files(file::read(&path).ok()?, &path).ok();
    read().is_some_and(|manifest| !manifest.nodes.is_empty())
}

/// The directory of the run that a checkpoint is in. Links to the checkpoint are followed.
///
/// # Errors
/// [`Error::Invalid`] for a path without a directory above.
pub(in crate::store) fn run_of(dir: &Path) -> Result<PathBuf> {
    let real = dir::try_real(dir).unwrap_or_else(|_| dir.into());
    match real.parent() {
        Some(run) if run.as_os_str().is_empty() => Ok(PathBuf::from(".")),
        Some(run) => Ok(run.into()),
        None => Err(Error::invalid(format!("{} is in no directory", dir.display()))),
    }
}

/// The ranks that wrote in a checkpoint's directory. `None` if all ranks share one.
pub(in crate::store) struct OwnRanks(Option<HashSet<u32>>);

impl OwnRanks {
    /// If nothing identifies the directory, any node may have written the files: no rank is its own.
    pub fn of<T, S>(dir: &Path, manifest: &Manifest<T, S>) -> Self {
        if manifest.nodes.is_empty() {
            return Self(None);
        }
        let here = run_of(dir).and_then(|run| read(&run)).ok().flatten();
        let is_here = |id: &str| here.as_ref().is_some_and(|here| here.id == id);
        let own = manifest.nodes.iter().filter(|node| is_here(&node.id));
        Self(Some(own.flat_map(|node| node.ranks.iter().copied()).collect()))
    }

    /// Whether one of them wrote this file.
    pub fn wrote(&self, file: &str) -> bool {
        let Self(Some(own)) = self else { return true };
        names::shard_rank(file).is_some_and(|rank| own.contains(&rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_see_a_directory_get_one_id_and_other_directories_get_others() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("a/run");
        assert_eq!(read(&run).unwrap(), None);
        let ids: Vec<NodeId> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| node_id(&run).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(dir::file_names(&run).unwrap(), [names::NODE]);
        assert_ne!(node_id(&root.path().join("b")).unwrap().id, ids[0].id);
        std::fs::write(run.join(names::NODE), "notes").unwrap();
        assert!(node_id(&run).unwrap_err().to_string().contains("remove it"));
    }
}
