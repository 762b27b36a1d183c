//! Cleans up after saves that were killed: finishes a commit that had got past its rename, removes
//! what never got there. Likewise finishes the removal of a checkpoint. In a checkpoint's own directory and
//! in those on the disks it is striped over. Takes no locks; [`prune`](crate::store::cleanup::prune::prune()) goes over all
//! checkpoints of a directory.

use crate::error::Result;
use crate::format::manifest::Listed;
use crate::format::{FileEntry, names};
use crate::store::layout::manifest;
use crate::store::layout::recycled::Spares;
use crate::store::layout::stripes::Places;
use crate::sys::dir;
use crate::sys::dir::{entries, file_names, remove};
use crate::sys::lock::DirLock;
use serde::Serialize;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// What a clean-up did to a directory, or would do.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Swept {
    /// Files that were removed, and directories that held nothing else. Of a whole in parts whose removal was
    /// finished, its own path and no other.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
    /// Shards of a committed checkpoint that got their final name.
    #[serde(with = "crate::path_text::list")]
    pub renamed: Vec<PathBuf>,
    /// Shards that became spare files; see [`retire`](crate::store::cleanup::remove::retire()).
    #[serde(with = "crate::path_text::list")]
    pub kept: Vec<PathBuf>,
    /// What was left alone, and why.
    pub left: Vec<Left>,
}

/// A directory or file that a clean-up left as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Left {
    /// The directory, or the file.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// Brings a checkpoint's places to what its manifest says, which lists these files: renames committed
/// shards that are still under their uncommitted names, removes ringstow's other files, and companions
/// in which nothing is left. Files of others stay, and so does a shard that is there under both of its names:
/// nobody can tell which of them is the checkpoint's.
pub(in crate::store) fn sweep(places: &Places, manifest: Option<&[FileEntry]>) -> Result<Swept> {
    plan(places, manifest)?.carry_out()
}

/// [`sweep`], keeping shards that no manifest lists as spare files, where that can be.
pub(in crate::store) fn sweep_keeping(
    places: &Places,
    manifest: Option<&[FileEntry]>,
) -> Result<Swept> {
    let mut plan = plan(places, manifest)?;
    for dir in places.there()? {
        let (spares, before) = (Spares::beside(dir)?, plan.kept.len());
        for path in std::mem::take(&mut plan.remove) {
            let kept = path.parent() == Some(dir) && spares.keep(&path)?;
            if kept { plan.kept.push(path) } else { plan.remove.push(path) }
        }
        if plan.kept.len() > before {
            spares.sync()?;
        }
    }
    plan.carry_out()
}

/// What the manifest lists; `None` if there is none.
///
/// # Errors
/// What reading it gives; [`Error::Io`].
pub(in crate::store) fn committed(places: &Places) -> Result<Option<Listed>> {
    manifest::read_files(places.own())
}

/// [`sweep`] by what [`committed`] gives.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn sweep_by(places: &Places, committed: Option<&Listed>) -> Result<Swept> {
    plan_by(places, committed)?.carry_out()
}

/// What [`sweep_by`] would do.
///
/// # Errors
/// As for [`sweep_by`].
pub(in crate::store) fn plan_by(places: &Places, committed: Option<&Listed>) -> Result<Plan> {
    let plan = plan(places, committed.map(|listed| &*listed.files))?;
    Ok(Plan { unsynced: Some(places.own().into()), ..plan })
}

/// What is to be done to a checkpoint's directories.
#[derive(Default)]
pub(in crate::store) struct Plan {
    remove: Vec<PathBuf>,
    /// From, to.
    rename: Vec<(PathBuf, PathBuf)>,
    /// What has gone to the spare files.
    kept: Vec<PathBuf>,
    /// Directories in which something is to be done.
    touched: Vec<PathBuf>,
    /// Companions that will hold nothing but their marker.
    emptied: Vec<PathBuf>,
    /// Says that the checkpoint was being removed; goes last.
    mark: Option<PathBuf>,
    /// Shards that are there under both of their names.
    left: Vec<Left>,
    /// The checkpoint's own directory, if another process may have renamed what this goes by, and have ended
    /// before that was durable: after a crash the files would be missed that are to be removed.
    unsynced: Option<PathBuf>,
}

fn plan(places: &Places, manifest: Option<&[FileEntry]>) -> Result<Plan> {
    let listed: HashSet<&str> = manifest
        .map_or_else(HashSet::new, |files| files.iter().map(|file| file.name.as_str()).collect());
    let mark = places.own().join(names::RETIRED);
    let retired = dir::has(&mark);
    let mut plan = Plan::default();
    for dir in places.there()? {
        plan.add(dir, &listed, manifest.is_some() || retired)?;
        if dir != places.own() && plan.empties(dir)? {
            plan.emptied.push(dir.into());
        }
    }
    plan.mark = retired.then_some(mark);
    Ok(plan)
}

impl Plan {
    /// Without a manifest only uncommitted files go: shards that a manifest once listed may be all
    /// that is left of somebody's data. Unless the checkpoint was being removed.
    fn add(&mut self, dir: &Path, listed: &HashSet<&str>, shards_go: bool) -> Result<()> {
        let present = file_names(dir)?;
        let so_far = self.remove.len() + self.rename.len();
        for name in &present {
            let path = dir.join(name);
            let committed = name.strip_suffix(names::PART_SUFFIX).filter(|n| listed.contains(n));
            let stale_shard = shards_go && names::is_shard(name) && !listed.contains(&**name);
            match committed {
                // Sorted, so that ten thousand files are looked up as fast as ten.
                Some(shard) if present.binary_search_by(|n| n.as_str().cmp(shard)).is_err() => {
                    self.rename.push((path, dir.join(shard)));
                }
                Some(shard) => self.left.push(Left { path, reason: twice(shard) }),
                _ if names::is_part(name) || stale_shard => self.remove.push(path),
                _ => {}
            }
        }
        if self.remove.len() + self.rename.len() > so_far {
            self.touched.push(dir.into());
        }
        Ok(())
    }

    /// Whether a companion will hold nothing that is not to be removed, but its marker.
    fn empties(&self, companion: &Path) -> Result<bool> {
        let removed: HashSet<&Path> = self.remove.iter().map(PathBuf::as_path).collect();
        let goes = |path: &Path| removed.contains(path) || path.ends_with(names::COMPANION);
        Ok(entries(companion)?.iter().all(|entry| goes(&entry.path())))
    }

    /// Does it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn carry_out(self) -> Result<Swept> {
        if let Some(own) = self.unsynced.as_ref().filter(|_| self.changes_anything()) {
            dir::sync(own)?;
        }
        // Stale shards go first: who knows no manifest never sees them beside new ones.
        for path in &self.remove {
            remove(path)?;
        }
        for (from, to) in &self.rename {
            dir::rename_new(from, to)?;
        }
        for Left { path, reason } in &self.left {
            tracing::warn!(path = %path.display(), reason, "a shard is left alone");
        }
        for dir in &self.touched {
            dir::sync(dir)?;
        }
        for dir in &self.emptied {
            // Another checkpoint of the name may be about to claim it. Then only the marker goes.
            let lock = DirLock::take(dir);
            remove(&dir.join(names::COMPANION))?;
            if lock.is_ok() {
                dir::remove_if_empty(dir);
            }
        }
        if let Some(mark) = &self.mark {
            remove(mark)?;
        }
        Ok(self.swept())
    }

    fn changes_anything(&self) -> bool {
        let lists = [&self.remove, &self.touched, &self.emptied];
        self.mark.is_some() || lists.iter().any(|list| !list.is_empty())
    }

    /// What it comes to.
    pub fn swept(self) -> Swept {
        let renamed = self.rename.into_iter().map(|(_, to)| to).collect();
        let removed = self.remove.into_iter().chain(self.emptied).chain(self.mark).collect();
        Swept { removed, renamed, kept: self.kept, left: self.left }
    }
}

fn twice(shard: &str) -> String {
    format!(
        "{shard} is there as well, and the manifest lists one of the two: `ringstow verify` tells whether the \
         checkpoint is whole; the next save into the directory replaces both"
    )
}
