//! What a save or a clean-up may remove: the one rule that keeps it from removing what another host is writing.
//!
//! A process that holds a lock which keeps out every host may remove all files that no manifest lists. Any other
//! process, and on a file system that other hosts may use each save and removal after its beginning, removes only
//!
//! - files of its own generation. On a file system that other hosts may use, no other save ever has the same one;
//! - the session note and the marks of its own session;
//! - files that a manifest listed which it has replaced or renamed: no process ever commits them again;
//! - for a removal, files that were there right after a lock was granted that keeps out every host.
//!
//! [`Leftovers`](crate::store::write::leftovers::Leftovers) finds no file to remove or rename outside its scope.
//! A [`Rollback`](crate::store::write::rollback::Rollback) removes only what its save has created.

use crate::error::Result;
use crate::format::{FileEntry, names};
use crate::store::layout::session_note::{Note, is_of_session};
use crate::store::layout::stripes::Stripes;
use crate::sys::file_system::Reach;
use crate::sys::lock::DirLock;
use std::collections::HashSet;
use std::path::Path;

/// Which files a process may remove.
#[derive(Debug)]
pub(in crate::store) enum Scope {
    /// All that no manifest lists: nobody else is writing.
    Everything,
    /// Only these: other processes may be writing the rest.
    Own(Own),
}

/// Files that a process knows to be its own, or of no use to anybody.
#[derive(Debug, Default)]
pub(in crate::store) struct Own {
    /// The generation of the shards that this save writes.
    pub generation: Option<u64>,
    /// The session of this save by several ranks.
    pub session: Option<String>,
    /// Shards of a manifest that this process has replaced or renamed, and the name of a renamed manifest.
    pub dead: HashSet<String>,
    /// Files that were there when the lock kept out every other host, and the name of a renamed manifest. `None` if it
    /// never did.
    pub there: Option<HashSet<String>>,
}

impl Scope {
    /// The scope of a save that holds this lock, once it has begun. A save cut off from the server may go on after
    /// another host got the lock. So where there are other hosts, only the clean-up at its beginning removes more.
    pub fn of_save(lock: &DirLock, generation: u64) -> Self {
        match lock.is_shared() {
            false => Self::Everything,
            true => Self::Own(Own { generation: Some(generation), ..Own::default() }),
        }
    }

    /// The scope of a removal that holds this lock and has not renamed the manifest yet. It too may lose its lock. So
    /// where there are other hosts, it removes what is there now, if the lock keeps them out, and what
    /// [`Scope::retires`] adds.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn of_removal(lock: &DirLock, stripes: &Stripes) -> Result<Self> {
        if !lock.is_shared() {
            return Ok(Self::Everything);
        }
        let mut own = Own::default();
        if lock.reach() == Reach::EveryHost {
            // A session elsewhere reuses the names of the note and of the ranks' marks.
            own.session = Note::read(stripes.own()).ok().flatten().and_then(|note| note.session);
            let is_reused = |name: &String| {
                name == names::UNCOMMITTED_MANIFEST || names::done_rank(name).is_some()
            };
            let mut there = HashSet::from([names::REMOVAL_MARK.to_owned()]);
            for (_, names) in stripes.listed()? {
                there.extend(names.into_iter().filter(|name| !is_reused(name)));
            }
            own.there = Some(there);
        }
        Ok(Self::Own(own))
    }

    /// Adds the files of the manifest that a removal has renamed, and that manifest.
    pub fn retires(&mut self, listed: Option<&[FileEntry]>) {
        if let (Self::Own(own), Some(listed)) = (self, listed) {
            own.replaces(listed);
            own.dead.insert(names::REMOVAL_MARK.into());
        }
    }

    /// Whether this file may be removed or renamed if no manifest needs it under its name.
    pub fn covers(&self, path: &Path) -> bool {
        let Self::Own(own) = self else { return true };
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let shard = names::committed(name);
        let is_own = own.generation.is_some_and(|own| own == names::generation(shard));
        let is_of_session = || own.session.as_ref().is_some_and(|id| is_of_session(path, id));
        let was_there = || own.there.as_ref().is_some_and(|there| there.contains(name));
        let is_dead = own.dead.contains(shard) || is_own && names::is_shard(shard);
        is_dead || was_there() || is_of_session()
    }
}

impl Own {
    /// Adds the files of a manifest that this process replaces.
    pub fn replaces(&mut self, listed: &[FileEntry]) {
        self.dead.extend(listed.iter().map(|file| file.name.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::names::{UNCOMMITTED_MANIFEST, done, shard, uncommitted, uncommitted_write};

    #[test]
    fn own_scope_covers_its_generation_its_session_and_what_it_replaced_alone() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let scope = Scope::Own(Own {
            generation: Some(7),
            session: Some("00ff00ff00ff00ff".into()),
            dead: HashSet::from([shard(0, 0, 0)]),
            there: Some(HashSet::from([shard(9, 9, 9)])),
        });
        let hex = "0123456789abcdef";
        let own = [shard(3, 1, 7), shard(0, 0, 0)];
        for name in &own {
            for name in [name.clone(), uncommitted(name), uncommitted_write(name, hex)] {
                assert!(scope.covers(&dir.path().join(&name)), "{name}");
                assert!(Scope::Everything.covers(&dir.path().join(&name)), "{name}");
            }
        }
        for name in
            [&*shard(3, 1, 8), &*shard(0, 1, 0), names::REMOVAL_MARK, names::MANIFEST, "x.part"]
        {
            assert!(!scope.covers(&dir.path().join(uncommitted(name))), "{name}");
            assert!(!scope.covers(&dir.path().join(name)), "{name}");
        }
        let own_note = r#"{"world_size":2,"session":"00ff00ff00ff00ff","generation":7}"#;
        let others = r#"{"world_size":2,"session":"0000000000000000","generation":7}"#;
        assert!(scope.covers(&write(UNCOMMITTED_MANIFEST, own_note)));
        assert!(!scope.covers(&write(UNCOMMITTED_MANIFEST, others)));
        assert!(scope.covers(&write(&done(1), "12345678 00ff00ff00ff00ff 0123456789abcdef")));
        assert!(!scope.covers(&write(&done(1), "12345678 0000000000000000 0123456789abcdef")));
    }
}
