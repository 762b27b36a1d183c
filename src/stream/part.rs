//! A file under its uncommitted name, and what killed writers left of such files.

use crate::error::{Error, Result};
use crate::sys::chance::random;
use crate::sys::file_system::{FileSystem, Reach};
use crate::sys::lock::{FileLock, Hold, hold};
use crate::sys::open_dir::Dir;
use crate::sys::{dir, file, inodes};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const SUFFIX: &[u8] = b".stream-part";
/// Hex digits that make a name unlike all others.
const DIGITS: usize = 16;
/// As much of the file's name as the uncommitted one has: a name has 255 bytes at most.
const NAME_MAX: usize = 200;

/// An uncommitted file. Dropping it removes the file, unless it was published.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    is_published: bool,
    /// Shows others that the writer lives. `None` where nothing can be locked.
    _lock: Option<FileLock>,
}

impl Part {
    /// Creates an empty file, to be renamed to `target`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(target: &Path) -> Result<Self> {
        /// How many times a clean-up may lock or remove the file before its writer has locked it.
        const TRIES_MAX: usize = 100;
        for _ in 0..TRIES_MAX {
            let path = target.with_file_name(name(target));
            match file::create_new(&path, false) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                created => drop(created.map_err(|e| inodes::creating(target, e))?),
            }
            let mut part = Self { path, is_published: false, _lock: None };
            match hold(&part.path).map_err(|e| Error::io("locking", &*part.path, e))? {
                Hold::Held(lock) => part._lock = Some(lock),
                Hold::Impossible => {}
                Hold::Busy | Hold::Gone => continue,
            }
            return Ok(part);
        }
        Err(Error::Busy { path: target.into() })
    }

    /// Where the file is now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file to its final name. Where another may use the file system, a rename may fail and have taken
    /// effect: the server's answer was lost.
    ///
    /// # Errors
    /// [`Error::Io`]; of [`io::ErrorKind::AlreadyExists`] if `overwrite` is false and something has the name.
    pub fn publish(&mut self, target: &Path, overwrite: bool) -> Result<()> {
        let rename = if overwrite { dir::rename } else { dir::rename_new };
        match rename(&self.path, target) {
            Err(error) if error.is_taken() || dir::has(&self.path) || !dir::has(target) => {
                return Err(error);
            }
            _ => self.is_published = true,
        }
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_published
            && let Err(error) = dir::remove(&self.path)
        {
            tracing::warn!(%error, "an unfinished stream is left; the next one to the same file or `ringstow prune` removes it");
        }
    }
}

fn name(target: &Path) -> OsString {
    let mut name = stem(target.file_name().unwrap_or_default());
    name.extend_from_slice(format!("{:016x}", random()).as_bytes());
    name.extend_from_slice(SUFFIX);
    OsString::from_vec(name)
}

/// What the uncommitted names of a file begin with.
fn stem(name: &OsStr) -> Vec<u8> {
    let name = name.as_bytes();
    [&name[..name.len().min(NAME_MAX)], b"."].concat()
}

/// What precedes the digits in an uncommitted name; `None` for any other name.
fn stem_of(name: &OsStr) -> Option<&[u8]> {
    let name = name.as_bytes().strip_suffix(SUFFIX)?;
    let (stem, digits) = name.split_at_checked(name.len().checked_sub(DIGITS)?)?;
    let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (stem.ends_with(b".") && digits.iter().all(is_hex)).then_some(stem)
}

/// What a clean-up found in a directory.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Files whose writer is gone: removed, or to be removed.
    pub stale: Vec<PathBuf>,
    /// Files that stay, and why.
    pub left: Vec<(PathBuf, String)>,
}

/// Which leftovers to clear, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clearing<'a> {
    /// Only those of this file.
    pub of: Option<&'a Path>,
    /// Whether to remove them, or only to find them.
    pub removes: bool,
    /// The caller promises that no other host writes here.
    pub no_other_writers: bool,
}

/// Finds the uncommitted files in a directory that no living writer holds.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn clear(dir: &Dir, clearing: Clearing<'_>) -> Result<Leftovers> {
    let wanted = clearing.of.and_then(Path::file_name).map(stem);
    let is_wanted = |name: &OsStr| {
        stem_of(name).is_some_and(|stem| wanted.as_ref().is_none_or(|wanted| wanted == stem))
    };
    let names = dir.names()?.into_iter().filter(|(name, _)| is_wanted(name.as_os_str()));
    let mut found: Vec<PathBuf> = names.map(|(name, _)| dir.path().join(name)).collect();
    found.sort();
    let mut leftovers = Leftovers::default();
    if found.is_empty() {
        return Ok(leftovers);
    }
    let system = FileSystem::of_open(dir.file());
    let system = system.map_err(|e| Error::io("opening", dir.path(), e))?;
    for path in found {
        let lock = match hold(dir.at(&path)).map_err(|e| Error::io("locking", &*path, e))? {
            Hold::Gone => continue,
            Hold::Busy => {
                leftovers.left.push((path, "a stream to it is open".into()));
                continue;
            }
            _ if clearing.no_other_writers => None,
            Hold::Held(lock) if system.locks == Reach::EveryHost => Some(lock),
            _ => {
                let reason = format!(
                    "another process or host may be writing it, and no lock would show that ({}); if none is, run \
                     `ringstow prune --no-other-writers`",
                    system.why
                );
                leftovers.left.push((path, reason));
                continue;
            }
        };
        if clearing.removes {
            dir::remove(dir.at(&path))?;
        }
        drop(lock); // only now: its writer must find that it is gone
        leftovers.stale.push(path);
    }
    Ok(leftovers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn clearing(removes: bool) -> Clearing<'static> {
        Clearing { of: None, removes, no_other_writers: false }
    }

    #[test]
    fn only_uncommitted_names_are_leftovers() {
        let stem = |name: &str| stem_of(OsStr::new(name)).map(|stem| stem.to_owned());
        assert_eq!(stem("m.pt.0123456789abcdef.stream-part"), Some(b"m.pt.".to_vec()));
        for other in [
            "m.pt",
            "m.stream-part",
            "0123456789abcdef.stream-part",
            "m.0123456789ABCDEF.stream-part",
        ] {
            assert_eq!(stem(other), None, "{other}");
        }
        let long = PathBuf::from("x".repeat(255));
        assert!(name(&long).len() <= 255);
    }

    #[test]
    fn leftover_of_a_dead_writer_is_removed_and_a_living_one_s_stays() {
        let dir = tempfile::tempdir().unwrap();
        let living = Part::create(&dir.path().join("a")).unwrap();
        let dead = dir.path().join("a.0123456789abcdef.stream-part");
        let other = dir.path().join("b.0123456789abcdef.stream-part");
        [&dead, &other].iter().for_each(|path| fs::write(path, "x").unwrap());
        let planned = clear(&Dir::open(dir.path()).unwrap(), clearing(false)).unwrap();
        assert_eq!(planned.stale, [dead.clone(), other.clone()]);
        assert_eq!(planned.left[0].0, living.path());
        let of_a = Clearing { of: Some(Path::new("a")), ..clearing(true) };
        assert_eq!(
            clear(&Dir::open(dir.path()).unwrap(), of_a).unwrap().stale,
            std::slice::from_ref(&dead)
        );
        assert!(living.path().exists() && other.exists() && !dead.exists());
        clear(&Dir::open(dir.path()).unwrap(), clearing(true)).unwrap();
        drop(living);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn nothing_is_removed_where_locks_do_not_reach_other_hosts() {
        use crate::sys::file_system::play;
        let dir = tempfile::tempdir().unwrap();
        let dead = dir.path().join("a.0123456789abcdef.stream-part");
        fs::write(&dead, "x").unwrap();
        let _played = play(dir.path(), "nfs4", "nolock");
        let found = clear(&Dir::open(dir.path()).unwrap(), clearing(true)).unwrap();
        assert!(found.stale.is_empty() && found.left[0].1.contains("--no-other-writers"));
        let promised = Clearing { no_other_writers: true, ..clearing(true) };
        assert_eq!(clear(&Dir::open(dir.path()).unwrap(), promised).unwrap().stale, [dead]);
    }
}
