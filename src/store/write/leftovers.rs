//! Clears up a checkpoint's directories after a save or a removal that was killed: finishes a commit whose manifest
//! is in place, removes files that were never committed, and finishes a removal. Takes no locks.
//! [`prune`](crate::store::cleanup::prune::prune()) does this to all checkpoints of a directory.

use crate::engine::fallback::Fallback;
use crate::error::Result;
use crate::format::manifest::Listed;
use crate::format::{FileEntry, names};
use crate::pipeline::fallbacks::warn_once_of;
use crate::store::layout::recycled::{Kept, RecycledFiles};
use crate::store::layout::stripes::Stripes;
use crate::store::write::scope::Scope;
use crate::store::write::stripe_dir::lock_and_remove;
use crate::store::write::swept::{Left, Swept};
use crate::sys::dir::{self, At, remove};
use crate::sys::lock;
use crate::sys::open_dir::Dir;
use crate::sys::removal_note;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A plan that makes a checkpoint's directories hold what its manifest lists:
///
/// - rename committed shards that still have their uncommitted names,
/// - remove ringstow's other files,
/// - remove stripe directories that are then empty.
///
/// Other programs' files stay, and so do files outside the [`Scope`]. If a shard exists under both of its names, both files stay: either may be the
/// checkpoint's.
#[derive(Default)]
#[must_use = "only `clear` changes anything"]
pub(in crate::store) struct Leftovers {
    remove: Vec<PathBuf>,
    /// From, to.
    rename: Vec<(PathBuf, PathBuf)>,
    /// Shards that became recycled files.
    recycled: Vec<PathBuf>,
    /// Why another one did not.
    pub refused: Option<Fallback>,
    /// The checkpoint's directories, the own one first. What happens to their files happens there, whatever has their path
    /// by then.
    dirs: Vec<Arc<Dir>>,
    /// Directories in which a file is removed or renamed.
    touched: Vec<Arc<Dir>>,
    /// Stripe directories that will hold nothing but their marker.
    emptied: Vec<PathBuf>,
    /// The mark of a checkpoint that was being removed. Removed last.
    mark: Option<PathBuf>,
    /// Shards that exist under both of their names, and stripe directories that stay.
    left: Vec<Left>,
    /// The checkpoint's own directory, if another process may have renamed the manifest without syncing it. A crash
    /// would bring the earlier manifest back, so that is synced before its files are removed.
    unsynced: Option<Arc<Dir>>,
}

impl Leftovers {
    /// Finds the leftovers within a scope. `files` are those of a manifest that this process has synced; `None` if
    /// there is no manifest. `own` is the checkpoint's own directory, which the caller has locked.
    ///
    /// # Errors
    /// [`Error::Io`]; those of [`Dir::check`].
    pub fn find(
        stripes: &Stripes,
        own: &Arc<Dir>,
        files: Option<&[FileEntry]>,
        scope: &Scope,
    ) -> Result<Self> {
        let listed: HashSet<&str> =
            files.iter().copied().flatten().map(|f| f.name.as_str()).collect();
        let mark = stripes.own().join(names::REMOVAL_MARK);
        let was_being_removed = scope.covers(&mark) && dir::has(&mark);
        let mut found = Self::default();
        for open in stripes.opened(own)? {
            let dir = open.path();
            // What said which files stay was read by its path.
            let present = match open.file_names().and_then(|names| open.check().map(|()| names)) {
                // A clean-up has just removed the stripe directory.
                Err(error) if error.is_not_found() && dir != stripes.own() => continue,
                present => present?,
            };
            found.dirs.push(Arc::clone(&open));
            found.add(&open, &present, &listed, (scope, files.is_some() || was_being_removed));
            if dir == stripes.own() || !found.empties(&open)? {
                continue;
            }
            match scope {
                Scope::Own(_) if !was_being_removed => {}
                // A save may be about to write into it. Nothing finds it once the checkpoint is removed.
                Scope::Own(own) if own.there.is_none() => {
                    found.leave(dir, MARKER_STAYS);
                }
                _ => found.emptied.push(dir.into()),
            }
        }
        found.mark = was_being_removed.then_some(mark);
        let is_listed = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            listed.contains(name.strip_suffix(names::UNCOMMITTED_SUFFIX).unwrap_or(name))
        };
        assert!(!found.remove.iter().any(is_listed), "a listed shard must stay under either name");
        Ok(found)
    }

    /// [`Leftovers::find`] for a manifest that another process may have renamed without syncing it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of_killed(
        stripes: &Stripes,
        own: &Arc<Dir>,
        committed: Option<&Listed>,
        scope: &Scope,
    ) -> Result<Self> {
        let found = Self::find(stripes, own, committed.map(|listed| &*listed.files), scope)?;
        Ok(Self { unsynced: Some(Arc::clone(own)), ..found })
    }

    /// Recycles shards that no manifest lists, if possible, instead of removing them. Logs once why one is unfit.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn recycle(mut self) -> Result<Self> {
        for dir in &self.dirs {
            let (recycled, before) = (RecycledFiles::beside(dir)?, self.recycled.len());
            for path in std::mem::take(&mut self.remove) {
                let is_here = path.parent() == Some(dir.path());
                match if is_here { recycled.keep(dir, &path)? } else { Kept::No } {
                    Kept::Yes => self.recycled.push(path),
                    Kept::No => self.remove.push(path),
                    Kept::Refused(why) => {
                        warn_once_of(dir.path(), &why.wanted, &why);
                        self.refused.get_or_insert(why);
                        self.remove.push(path);
                    }
                }
            }
            if self.recycled.len() > before {
                recycled.sync()?;
            }
        }
        Ok(self)
    }

    /// Adds the leftovers of one directory. Without a manifest, and if the checkpoint was not being removed, only
    /// uncommitted files are removed: the shards may be all that is left of the user's data.
    fn add(
        &mut self,
        dir: &Arc<Dir>,
        present: &[String],
        listed: &HashSet<&str>,
        (scope, shards_go): (&Scope, bool),
    ) {
        let so_far = self.remove.len() + self.rename.len();
        for name in present {
            let path = dir.path().join(name);
            if !scope.covers(&path) {
                continue;
            }
            let committed =
                name.strip_suffix(names::UNCOMMITTED_SUFFIX).filter(|n| listed.contains(n));
            let stale_shard = shards_go && names::is_shard(name) && !listed.contains(&**name);
            match committed {
                // `present` is sorted: the lookup takes logarithmic time.
                Some(shard) if present.binary_search_by(|n| n.as_str().cmp(shard)).is_err() => {
                    self.rename.push((path, dir.path().join(shard)));
                }
                Some(shard) => self.leave(path, twice(shard)),
                _ if names::is_uncommitted(name) || stale_shard => self.remove.push(path),
                _ => {}
            }
        }
        if self.remove.len() + self.rename.len() > so_far {
            self.touched.push(Arc::clone(dir));
        }
    }

    /// Whether a stripe directory will hold nothing but its marker.
    fn empties(&self, stripe_dir: &Dir) -> Result<bool> {
        let removed: HashSet<&Path> = self.remove.iter().map(PathBuf::as_path).collect();
        let own = [names::STRIPE_MARKER, lock::FILE];
        let goes =
            |path: &Path| removed.contains(path) || own.iter().any(|name| path.ends_with(name));
        Ok(stripe_dir.names()?.iter().all(|(name, _)| goes(&stripe_dir.path().join(name))))
    }

    /// Notes a file that stays.
    pub fn leave(&mut self, path: impl Into<PathBuf>, reason: impl Into<String>) {
        self.left.push(Left::alone(path, reason));
    }

    /// Carries out the plan.
    ///
    /// # Errors
    /// [`Error::Io`]. Then [`Leftovers::carry_out`] would also say what was done before.
    pub fn clear(self) -> Result<Swept> {
        let mut done = Swept::default();
        self.carry_out(&mut done).map(|()| done)
    }

    /// Carries out the plan, and adds to `done` each thing that is done.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn carry_out(self, done: &mut Swept) -> Result<()> {
        if let Some(own) = self.unsynced.as_ref().filter(|_| self.changes_anything()) {
            own.sync()?;
        }
        done.kept.extend(self.recycled);
        // Remove stale shards first, so that programs that ignore the manifest never see them beside new ones.
        let mut outcome = Ok(());
        for path in self.remove {
            match remove(at(&self.dirs, &path)) {
                Ok(_) => done.removed.push(path),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome?;
        for (from, to) in self.rename {
            dir::rename_new(at(&self.dirs, &from), at(&self.dirs, &to))?;
            done.renamed.push(to);
        }
        for Left { path, reason, .. } in &self.left {
            tracing::warn!(path = %path.display(), reason, "left alone");
        }
        done.left.extend(self.left);
        for dir in &self.touched {
            dir.sync()?;
        }
        for dir in self.emptied {
            let Swept { removed, left, .. } = lock_and_remove(&dir, true)?;
            done.left.extend(left);
            if dir::has(&dir) {
                done.removed.extend(removed);
                continue;
            }
            // Before the checkpoint's own directory goes: without that, nobody would find this one after a crash.
            let synced = dir.parent().map_or(Ok(()), dir::sync);
            done.removed.push(dir);
            synced?;
        }
        if let Some(mark) = self.mark {
            // Without its mark, nothing else would tell the directory from an empty one of the user's.
            removal_note::note(&self.dirs[0]);
            remove(self.dirs[0].at(&mark))?;
            done.removed.push(mark);
        }
        Ok(())
    }

    /// Whether there is anything to remove or rename.
    pub fn changes_anything(&self) -> bool {
        let lists = [&self.remove, &self.emptied];
        let is_listed = lists.iter().any(|list| !list.is_empty());
        self.mark.is_some() || is_listed || !self.touched.is_empty()
    }

    /// The report of what [`Leftovers::clear`] would do.
    pub fn swept(self) -> Swept {
        let renamed = self.rename.into_iter().map(|(_, to)| to).collect();
        let removed = self.remove.into_iter().chain(self.emptied).chain(self.mark).collect();
        Swept { removed, renamed, kept: self.recycled, left: self.left }
    }
}

/// A file in one of these directories.
fn at<'a>(dirs: &'a [Arc<Dir>], path: &'a Path) -> At<'a> {
    let holds = |dir: &&Arc<Dir>| path.parent() == Some(dir.path());
    dirs.iter().find(holds).expect("it was found in one of them").at(path)
}

const MARKER_STAYS: &str = "nothing but its marker is in it, and a save from elsewhere may be about to write into it: no \
                            lock would show that; `ringstow prune` of the checkpoint's parent directory removes it";

fn twice(shard: &str) -> String {
    format!(
        "{shard} exists too, and the manifest lists only one of the two: `ringstow verify` checks whether the \
         checkpoint is intact; the next save into the directory replaces both"
    )
}
