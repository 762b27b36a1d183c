//! Checks the places that a configuration copies checkpoints to: does with a small trial file or object what a
//! promotion does, and removes it.

use crate::config::Config;
use crate::doctor::directory::{self, nearest, trial_name};
use crate::doctor::{Check, binary_size};
use crate::object::{Bucket, is_url};
use crate::sys::file_system::FileSystem;
use crate::sys::{dir, space};
use std::io;
use std::path::Path;

/// One check for each tier.
pub(crate) fn checks(dir: &Path, config: &Config) -> Vec<Check> {
    let check = |tier| if is_url(tier) { store(tier) } else { directory(tier, dir) };
    config.tiers.iter().map(|tier| check(tier)).collect()
}

fn name(tier: &Path) -> String {
    format!("tier {}", tier.display())
}

/// A tier that is a directory; `first` is that of the saves.
fn directory(tier: &Path, first: &Path) -> Check {
    let name = &name(tier);
    let there = nearest(tier);
    if let Err(refused) = directory::trial(there) {
        return Check { name: name.clone(), ..refused };
    }
    let kind = FileSystem::of(there).map_or("unknown file system".into(), |found| found.name);
    let free = space::free_at(there).ok().flatten();
    let free = free.map_or("reports no size".into(), |free| format!("{} free", binary_size(free)));
    let found = format!("can be written to; {kind}, {free}");
    if is_one_disk(there, nearest(first)) {
        let found = format!("{found}; on the same file system as {}", first.display());
        return Check::warn(
            name,
            found,
            "copies there are lost together with the checkpoints: mount the disk that was meant, or name another \
             directory",
        );
    }
    if there != tier {
        let found =
            format!("does not exist yet, and a copy creates it in {}; {found}", there.display());
        return Check::warn(name, found, "check that its disk is mounted");
    }
    Check::ok(name, found)
}

fn is_one_disk(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path| dir::look(path).ok().map(|found| found.dev());
    device(one).is_some() && device(one) == device(other)
}

/// A tier in an object store.
fn store(tier: &Path) -> Check {
    let name = &name(tier);
    let bucket = match Bucket::at(tier) {
        Ok(bucket) => bucket,
        Err(error) => {
            return Check::fail(name, error.to_string(), "see docs/tiers.md, Credentials");
        }
    };
    let trial = trial_name();
    let tried = try_store(&bucket, &trial);
    let left = bucket.remove(&trial).err().filter(|_| tried.is_ok());
    match (tried, left) {
        (Err((doing, error)), _) => Check::fail(
            name,
            format!("{doing}: {error}"),
            "check the URL, the credentials and their rights in docs/tiers.md: a copy lists, reads, creates, uploads \
             in parts and removes",
        ),
        (_, Some(error)) => Check::warn(
            name,
            format!("copies can be sent there, but {trial} can't be removed: {error}"),
            "allow that: a copy removes what it replaces, and retention what is old",
        ),
        (Ok(false), None) => Check::warn(
            name,
            "the store created an object twice under one name, which it was asked not to do (If-None-Match)",
            "use one that takes conditional requests, or let one run alone copy there: of two copies to one place the \
             later would replace the other",
        ),
        (Ok(true), None) => Check::ok(name, "can be listed, read, written to, and removed from"),
    }
}

/// What a store refused, and how.
type Refused = (&'static str, io::Error);

/// Does what a promotion does. Returns whether the store refuses to create an object twice, as it must.
fn try_store(bucket: &Bucket, trial: &str) -> Result<bool, Refused> {
    let failed = |doing: &'static str| move |error: io::Error| (doing, error);
    bucket.list().map_err(failed("listing"))?;
    let bytes = b"made by `ringstow doctor`, which removes it";
    bucket.create(trial, bytes.to_vec()).map_err(failed("creating an object"))?;
    let read = bucket.read(trial, bytes.len() as u64).map_err(failed("reading an object"))?;
    if read != bytes {
        let error = io::Error::other("the store returned other bytes than it was sent");
        return Err(("reading an object", error));
    }
    let upload = bucket.begin(trial).map_err(failed("beginning an upload in parts"))?;
    bucket.abort((trial, &upload)).map_err(failed("aborting an upload in parts"))?;
    match bucket.create(trial, bytes.to_vec()) {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(true),
        Err(error) => Err(("creating an object that exists", error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn check(tier: &Path, first: &Path) -> Check {
        let config = Config { tiers: vec![tier.into()], ..Config::default() };
        let [check] = <[Check; 1]>::try_from(checks(first, &config)).unwrap();
        assert_eq!(check.name, format!("tier {}", tier.display()));
        check
    }

    #[test]
    fn tier_on_the_disk_of_the_saves_is_warned_of() {
        let root = tempfile::tempdir().unwrap();
        let found = check(&root.path().join("tier"), &root.path().join("run"));
        assert_eq!(found.status, Status::Warn, "{found:?}");
        assert!(found.found.contains("on the same file system as"), "{found:?}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn tier_that_does_not_exist_may_be_a_disk_that_is_not_mounted() {
        let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
        let root = tempfile::tempdir().unwrap();
        let found = check(&memory.path().join("tier"), root.path());
        assert_eq!(found.status, Status::Warn, "{found:?}");
        assert!(found.found.contains("does not exist yet"), "{found:?}");
        assert_eq!(check(memory.path(), root.path()).status, Status::Ok);
    }

    #[test]
    fn tier_that_cannot_be_written_to_fails() {
        let found = check(Path::new("/proc/tier"), Path::new("/proc"));
        assert_eq!(found.status, Status::Fail, "{found:?}");
        assert!(found.found.contains("no file can be created in /proc"), "{found:?}");
    }
}
