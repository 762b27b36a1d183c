//! Saves in progress, seen from outside by what their files have so far. Takes no lock: a look disturbs nobody.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::rank_dirs;
use crate::store::layout::stripes::Stripes;
use crate::sys::{dir, file, holder, space};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A checkpoint whose save has not committed: it is in progress, or was killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InFlight {
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// Files of tensors so far.
    pub files: usize,
    /// Bytes in these files. A save over recycled files has all of them at once: what they held before counts.
    pub written_bytes: u64,
    /// Bytes that these files will have, as far as the file system reserves them.
    pub bytes: u64,
    /// Whether it is being copied here from another place.
    pub is_copy: bool,
    /// The process that saves, if this host knows it.
    pub process: Option<u32>,
    /// Whether nobody saves: no process of this host does, and no other host can.
    pub was_killed: bool,
}

/// The saves of a run's directory that have not committed, by path, and when a checkpoint there was last committed. A
/// directory that does not exist yet has none.
///
/// # Errors
/// [`Error::Io`].
pub fn in_flight(run: &Path, config: &Config) -> Result<(Vec<InFlight>, Option<SystemTime>)> {
    let (mut saves, mut newest) = (Vec::new(), None);
    if !dir::is_there(run)? {
        return Ok((saves, newest));
    }
    let holders = holder::Holders::now();
    for path in [vec![run.to_path_buf()], dir::directories(run)?].concat() {
        let committed = dir::look(&path.join(names::MANIFEST)).and_then(|found| found.modified());
        newest = newest.max(committed.ok());
        match look(&path, config, &holders) {
            Ok(found) => saves.extend(found),
            Err(error) if error.is_not_found() => {} // committed or removed meanwhile
            Err(error) => return Err(error),
        }
    }
    saves.sort_by(|one, other| one.path.cmp(&other.path));
    Ok((saves, newest))
}

/// What is being saved to a directory; `None` for nothing.
fn look(path: &Path, config: &Config, holders: &holder::Holders) -> Result<Option<InFlight>> {
    let mut found = InFlight {
        path: path.into(),
        files: 0,
        written_bytes: 0,
        bytes: 0,
        is_copy: false,
        process: None,
        was_killed: false,
    };
    for own in [vec![path.to_path_buf()], rank_dirs::dirs(path)?].concat() {
        for (dir, files) in Stripes::to_read(&own, &config.stripe).listed()? {
            for name in files.iter().filter(|name| is_being_written(name)) {
                add(&mut found, &dir.join(name))?;
                found.is_copy |= names::is_promoted(names::committed(name));
            }
        }
        found.process = found.process.or_else(|| holders.of(&own));
    }
    if found.files == 0 {
        return Ok(None);
    }
    found.was_killed = found.process.is_none() && holders.know_all(path);
    Ok(Some(found))
}

fn is_being_written(name: &str) -> bool {
    names::is_uncommitted(name) && names::is_shard(names::committed(name))
}

fn add(found: &mut InFlight, path: &Path) -> Result<()> {
    let failed = |error| Error::io("reading", path, error);
    let open = match file::open_read(path, false) {
        Err(error) if file::is_absent(&error) => return Ok(()), // committed meanwhile
        open => open.map_err(failed)?,
    };
    found.files += 1;
    found.bytes += file::look(&open).map_err(failed)?.len();
    found.written_bytes += space::written(&open).map_err(failed)?;
    Ok(())
}
