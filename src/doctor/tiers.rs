//! Checks the places that a configuration copies checkpoints to: creates a small file or object there, and removes it.

use crate::config::Config;
use crate::doctor::Check;
use crate::doctor::directory::{self, nearest, trial_name};
use crate::error::Error;
use crate::object::{Bucket, is_url};
use crate::sys::{dir, environment};
use std::io;
use std::path::Path;

/// One check for each tier.
pub(crate) fn checks(dir: &Path, config: &Config) -> Vec<Check> {
    let check = |tier| if is_url(tier) { store(tier) } else { directory(tier, dir, config) };
    config.tiers.iter().map(|tier| check(tier)).collect()
}

fn name(tier: &Path) -> String {
    format!("tier {}", tier.display())
}

/// A tier that is a directory; `first` is that of the saves.
fn directory(tier: &Path, first: &Path, config: &Config) -> Check {
    let name = &name(tier);
    let there = nearest(tier);
    if let Err(refused) = directory::trial(there) {
        return Check { name: name.clone(), ..refused };
    }
    let space = directory::space(there, config);
    let found = format!("files can be created; {}", space.found);
    if is_one_file_system(there, nearest(first)) {
        let found = format!("{found}; on the same file system as {}", first.display());
        return Check::warn(
            name,
            found,
            "copies there are lost together with the checkpoints: mount the disk that was meant, or name another \
             directory",
        );
    }
    if there != tier {
        let there = there.display();
        let found = format!("does not exist yet, and a copy creates it in {there}; {found}");
        return Check::warn(name, found, "check that its disk is mounted");
    }
    Check { name: name.clone(), found, ..space }
}

fn is_one_file_system(one: &Path, other: &Path) -> bool {
    let device = dir::device(one);
    device.is_some() && device == dir::device(other)
}

/// A tier in an object store.
fn store(tier: &Path) -> Check {
    let name = &name(tier);
    // It waits for seconds, not for minutes, until a store answers.
    let bucket = match Bucket::retried_by_caller(tier) {
        Ok(bucket) => bucket,
        Err(Error::Unsupported { what, remedy }) => return Check::fail(name, what, remedy),
        Err(error) => {
            let remedy = "give scheme, bucket and directory: s3://bucket/run; docs/tiers.md names the schemes";
            return Check::fail(name, error.to_string(), remedy);
        }
    };
    let mut trial = Trial { bucket, name: trial_name(), is_created: false, upload: None };
    let tried = trial.run();
    let left = trial.remove();
    let found = match &tried {
        Err((doing, error)) => format!("{doing}: {error}"),
        Ok(true) => "objects can be listed, created, read, and removed".into(),
        Ok(false) => {
            "the store ignores If-None-Match: it replaced an object instead of refusing the request"
                .into()
        }
    };
    let found = left.iter().fold(found, |found, left| format!("{found}; {left}"));
    match tried {
        Err(_) => Check::fail(name, found, rights(tier)),
        Ok(_) if !left.is_empty() => Check::warn(
            name,
            found,
            "allow removals: a copy removes what it replaces, and retention what is old",
        ),
        Ok(false) => Check::warn(
            name,
            found,
            "use a store that supports conditional requests, or copy from one run only: otherwise the later of two \
             copies to one place replaces the other",
        ),
        Ok(true) => Check::ok(name, found),
    }
}

/// What to do about a store that refuses.
fn rights(tier: &Path) -> String {
    let is_s3 = tier.to_string_lossy().starts_with("s3://");
    let keys = match is_s3 && environment::var_os("AWS_ACCESS_KEY_ID").is_none() {
        true => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (without them, ringstow uses the role of this machine, if \
             it has one; it never reads ~/.aws); "
        }
        false => "",
    };
    format!(
        "{keys}check URL, endpoint and credentials (docs/tiers.md), and their rights: a copy lists, reads, creates, \
         uploads in parts and removes"
    )
}

/// What a store refused, and how.
type Refused = (&'static str, io::Error);

/// An object that comes and goes.
struct Trial {
    bucket: Bucket,
    name: String,
    /// Whether the store may have it.
    is_created: bool,
    /// An upload that was begun and not aborted.
    upload: Option<String>,
}

impl Trial {
    /// Makes the requests of a promotion, but for those that send parts. Returns whether the store refuses to create an
    /// object twice, as it must.
    fn run(&mut self) -> Result<bool, Refused> {
        let failed = |doing: &'static str| move |error: io::Error| (doing, error);
        let (bucket, name) = (&self.bucket, &*self.name);
        bucket.list().map_err(failed("listing"))?;
        let bytes = b"made by `ringstow doctor`, which removes it";
        self.is_created = true;
        bucket.create(name, bytes.to_vec()).map_err(failed("creating an object"))?;
        let read = bucket.read(name, bytes.len() as u64).map_err(failed("reading an object"))?;
        if read != bytes {
            let error = io::Error::other("the store returned other bytes than it was sent");
            return Err(("reading an object", error));
        }
        let upload = bucket.begin(name).map_err(failed("beginning an upload in parts"))?;
        self.upload = Some(upload.clone());
        bucket.abort((name, &upload)).map_err(failed("aborting an upload in parts"))?;
        self.upload = None;
        match bucket.create(name, bytes.to_vec()) {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(true),
            Err(error) => Err(("creating an object that exists", error)),
        }
    }

    /// Removes what was made. Returns what is left, and why.
    fn remove(&self) -> Vec<String> {
        let mut left = Vec::new();
        if self.is_created {
            let removed = self.bucket.remove(&self.name);
            left.extend(removed.err().map(|error| format!("{} is left there: {error}", self.name)));
        }
        if self.upload.is_some() {
            left.push(format!(
                "an unfinished upload of {} is left there, and may be billed",
                self.name
            ));
        }
        left
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
        let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
            return eprintln!("skipped: no /dev/shm");
        };
        let elsewhere = Path::new(env!("CARGO_MANIFEST_DIR"));
        let found = check(&memory.path().join("tier"), elsewhere);
        assert_eq!(found.status, Status::Warn, "{found:?}");
        assert!(found.found.contains("does not exist yet"), "{found:?}");
        let found = check(memory.path(), elsewhere);
        assert_eq!(found.status, Status::Warn, "{found:?}");
        assert!(found.remedy.unwrap().contains("in memory is lost"), "{:?}", found.found);
    }

    #[test]
    fn tier_without_space_is_warned_of() {
        let elsewhere = Path::new("/proc");
        let tier = vec![env!("CARGO_MANIFEST_DIR").into()];
        let config = Config { tiers: tier, pool_bytes: 1 << 62, ..Config::default() };
        let found = checks(elsewhere, &config).remove(0);
        assert_eq!(found.status, Status::Warn, "{found:?}");
        assert!(found.remedy.unwrap().contains("free some space"));
    }

    #[test]
    fn tier_that_cannot_be_written_to_fails() {
        let found = check(Path::new("/proc/tier"), Path::new("/proc"));
        assert_eq!(found.status, Status::Fail, "{found:?}");
        assert!(found.found.contains("no file can be created in /proc"), "{found:?}");
    }
}
