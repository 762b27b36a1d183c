//! Checks a directory: its file system, free space, and a trial file in it.

use crate::config::{Config, Switch};
use crate::doctor::Check;
use crate::error::{NO_INODES, is_full};
use crate::limits::ALIGN;
use crate::pool::Buffer;
use crate::sys::file_system::{FileSystem, Reach};
use crate::sys::{dir, file, inodes, space};
use crate::units::size;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "directory";

pub(crate) fn checks(asked: &Path, config: &Config) -> Vec<Check> {
    let dir = nearest(asked);
    let trial = match trial(dir) {
        Ok(trial) => trial,
        Err(refused) => return vec![refused],
    };
    let writable = match dir == asked || asked.as_os_str().is_empty() {
        true => format!("{} can be written to", dir.display()),
        false => format!(
            "{} does not exist yet: a save will create it in {}, which can be written to",
            asked.display(),
            dir.display()
        ),
    };
    let writable = Check::ok(NAME, writable);
    let (space, locks, path) = (space(dir, config), locks(dir), &trial.0);
    vec![writable, space, locks, direct(path, config), reserve(path)]
}

/// The nearest directory that exists: a save makes the others.
pub(crate) fn nearest(asked: &Path) -> &Path {
    let exists = |path: &&Path| dir::has(path);
    let found = asked.ancestors().filter(|dir| !dir.as_os_str().is_empty()).find(exists);
    found.unwrap_or(Path::new("."))
}

/// A file to try things with, removed when it is dropped.
pub(crate) struct Trial(PathBuf);

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = dir::remove(&self.0);
    }
}

/// Creates an empty file in a directory, or says why that cannot be.
pub(crate) fn trial(dir: &Path) -> Result<Trial, Check> {
    if !dir::is_dir(dir) {
        let found = format!("{} is not a directory", dir.display());
        let remedy = "name a directory, or a path that does not exist yet";
        return Err(Check::fail(NAME, found, remedy));
    }
    let trial = dir.join(trial_name());
    // Only a new file: an existing one may be somebody's.
    match file::create_new(&trial, false) {
        Ok(_) => Ok(Trial(trial)),
        Err(error) => {
            let found = format!("no file can be created in {}: {error}", dir.display());
            let remedy = match is_full(&error) {
                true if inodes::are_used_up(&trial) => NO_INODES,
                true => FREE_SPACE,
                false => "check its owner, its mode and how it is mounted, or save elsewhere",
            };
            Err(Check::fail(NAME, found, remedy))
        }
    }
}

/// A name that nothing else has.
pub(crate) fn trial_name() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!(".ringstow-doctor-{}-{now}", std::process::id())
}

/// What is free, and whether it lasts.
pub(crate) fn space(dir: &Path, config: &Config) -> Check {
    let name = "file system";
    match space::free_at(dir) {
        Ok(free) => {
            let kind = FileSystem::of(dir).map_or("of unknown type".into(), |found| found.name);
            let space =
                free.map_or("reports no size".into(), |free| format!("{} free", size(free)));
            let found = format!("{kind}, {space}");
            if kind == "tmpfs" || kind == "ramfs" {
                let remedy = "a checkpoint in memory is lost at the next boot: save to a disk";
                return Check::warn(name, found, remedy);
            }
            // A disk with less space than the pool is too small for all but tiny checkpoints.
            if free.is_some_and(|free| free < config.staging_bytes()) {
                return Check::warn(name, found, "free some space, or save elsewhere");
            }
            Check::ok(name, found)
        }
        Err(error) => Check::warn(name, format!("its free space is unknown: {error}"), "see `df`"),
    }
}

/// Whether a save here keeps out other hosts, which decides how much it clears up.
fn locks(dir: &Path) -> Check {
    let name = "locks";
    match FileSystem::of(dir) {
        Ok(found) if found.locks == Reach::EveryHost => {
            let found = format!("{}; saves clean up after killed ones", found.why);
            Check::ok(name, found)
        }
        Ok(found) => Check::warn(
            name,
            format!("{}; a save removes only its own files and those that it replaces", found.why),
            "see docs/network.md; after killed saves, and if no other host saves there, run \
             `ringstow prune --no-other-writers`",
        ),
        Err(error) => {
            Check::warn(name, format!("the file system is unknown: {error}"), "see `findmnt`")
        }
    }
}

fn direct(trial: &Path, config: &Config) -> Check {
    let name = "O_DIRECT";
    let align = file::dio_align(trial);
    let announced = align.as_ref().map_or("no alignment announced".into(), |align| {
        format!("needs {} in memory, {} in the file", align.mem, align.offset)
    });
    match (write_direct(trial), align) {
        (Err(error), _) if is_full(&error) => {
            Check::fail(name, format!("not tried: the disk is full ({error})"), FREE_SPACE)
        }
        (Err(error), _) => {
            let found = format!("refused ({error}); {announced}");
            let remedy = "save to a file system with direct I/O (ext4, XFS, btrfs, NFS); \
                          otherwise files are written through the page cache";
            Check::short(config.direct == Switch::On, name, found, remedy)
        }
        (Ok(()), Some(align)) if align.offset.max(align.mem) as usize > ALIGN => {
            let found = format!(
                "works, though the file system asks for an alignment of {} in memory and {} in \
                 the file, more than the {ALIGN} bytes that ringstow keeps",
                align.mem, align.offset
            );
            Check::warn(name, found, "set direct = off if transfers fail")
        }
        (Ok(()), _) if file::is_checksummed_by_btrfs(trial) => Check::warn(
            name,
            format!(
                "works; {announced}; but btrfs keeps checksums, for which newer kernels write through the page cache"
            ),
            "save into a directory without them, made by `mkdir DIR && chattr +C DIR`: a checkpoint has checksums \
             of its own",
        ),
        (Ok(()), _) => Check::ok(name, format!("works; {announced}")),
    }
}

/// Tries a write: some file systems accept O_DIRECT at open and refuse it at the first write.
fn write_direct(path: &Path) -> io::Result<()> {
    let file = file::create(path, true)?;
    let block = Buffer::alone(ALIGN)?;
    file.write_all_at(&block, 0)
}

fn reserve(trial: &Path) -> Check {
    let name = "preallocation";
    let done = file::create(trial, false).and_then(|file| space::preallocate(&file, ALIGN as u64));
    match done {
        Ok(space::Preallocated::Allocated) => Check::ok(name, "works"),
        Ok(space::Preallocated::SizeOnly) => Check::warn(
            name,
            "the file system cannot reserve space, writes are slower and may run out of it",
            "save to a file system with fallocate (ext4, XFS, btrfs)",
        ),
        Err(error) if is_full(&error) => {
            Check::fail(name, format!("not tried: the disk is full ({error})"), FREE_SPACE)
        }
        Err(error) => Check::fail(
            name,
            format!("failed: {error}"),
            "see the kernel's log (dmesg), or save elsewhere",
        ),
    }
}

/// For a disk that is full, or a quota that is used up.
const FREE_SPACE: &str = "free some space, raise the quota, or save elsewhere: until then every save here fails, before \
                          it writes a byte where the file system can preallocate";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn first(dir: &Path) -> Check {
        checks(dir, &Config::default()).swap_remove(0)
    }

    #[test]
    fn directory_that_a_save_would_create_is_checked_at_its_parent() {
        let root = tempfile::tempdir().unwrap();
        let check = first(&root.path().join("run/a"));
        assert_eq!(check.status, Status::Ok, "{check:?}");
        assert!(check.found.contains("a save will create it in"), "{check:?}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn full_disk_is_called_full_and_not_unfit_for_direct_io() {
        use crate::sys::seam::{Call, fail_if, on_thread};
        for errno in [nix::libc::ENOSPC, nix::libc::EDQUOT] {
            // No file can be created; or an empty one can, and there is no block for it.
            for empty_files in [0, 1] {
                let root = tempfile::tempdir().unwrap();
                let mut created = 0;
                let _full = on_thread(fail_if(errno, move |call, _| {
                    created += u64::from(call == Call::Create);
                    call == Call::Create && created > empty_files
                }));
                let checks = checks(root.path(), &Config::default());
                let failed: Vec<&Check> =
                    checks.iter().filter(|check| check.status == Status::Fail).collect();
                assert!(!failed.is_empty(), "{checks:?}");
                for check in failed {
                    assert_eq!(check.remedy.as_deref(), Some(FREE_SPACE), "{check:?}");
                    assert!(!check.found.contains("refused"), "{check:?}");
                }
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn file_system_that_reports_no_size_is_not_called_full() {
        let check = space(Path::new("/proc"), &Config::default());
        assert_eq!(check.status, Status::Ok, "{check:?}");
        assert!(check.found.contains("reports no size"), "{check:?}");
    }

    #[test]
    fn remedy_does_not_create_what_exists() {
        for (path, text) in
            [("/proc", "no file can be created"), ("/etc/passwd", "not a directory")]
        {
            let check = first(Path::new(path));
            assert_eq!(check.status, Status::Fail, "{check:?}");
            assert!(check.found.contains(text), "{check:?}");
            assert!(
                !check.remedy.as_deref().unwrap_or_default().contains("create the"),
                "{check:?}"
            );
        }
    }
}
