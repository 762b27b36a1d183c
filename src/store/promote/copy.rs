//! A checkpoint's copy: its names, what is in its place, and how it gets that.

use super::Promotion;
use super::journal::{Journal, Stale};
use super::target::{Seen, Target};
use crate::error::{Error, Result};
use crate::format::manifest::Age;
use crate::format::manifest::Listed;
use crate::format::{FileEntry, Manifest, SaveId, names};
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind};
use nix::errno::Errno;
use std::fmt::Display;
use std::io;
use std::time::Duration;

/// How often the manifest there may change between a look and the commit.
const LOOKS_MAX: usize = 10;

/// A checkpoint as it is to be there.
pub(super) struct Copy {
    /// What tells it from other checkpoints.
    pub id: u64,
    /// The names of its files there, in the order of the manifest's.
    pub names: Vec<String>,
    manifest: Vec<u8>,
    save: SaveId,
    /// How many parts it has lost.
    dropped: usize,
}

/// What is there.
pub(super) enum Place {
    Free,
    /// This checkpoint.
    Has,
    /// The same save under other file names, with all that this checkpoint has: the files there. It is what a plain copy
    /// (`cp -r`) or the copy of a step before it was slimmed leaves.
    HasWhole(Vec<FileEntry>),
    /// An older one, which is to be replaced, and its shards.
    Older(Seen, Vec<String>),
    /// Another checkpoint, which stays: the error.
    Taken(Error),
}

/// What became of a commit.
pub(super) enum Commit {
    /// The copy is there.
    Done,
    /// Another checkpoint has the place: the error.
    Lost(Error),
    /// The store has refused: perhaps another request was in progress.
    Refused,
}

impl Copy {
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        if checkpoint.kind() != CheckpointKind::Ringstow {
            return Err(Error::invalid("only ringstow's checkpoints are promoted"));
        }
        // Without the names of this copy: a copy of a copy is the same checkpoint.
        let id = id_of(&manifest_of(checkpoint.manifest(), 0).encode()?);
        let there = manifest_of(checkpoint.manifest(), id);
        let names = there.files.iter().map(|file| file.name.clone()).collect();
        let (save, dropped) = (SaveId::of(&there), there.dropped.len());
        Ok(Self { id, names, manifest: there.encode()?, save, dropped })
    }

    /// What is there.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Invalid`] for an older checkpoint that is striped over other disks.
    pub fn place(&self, target: &dyn Target, how: Promotion) -> Result<Place> {
        let seen = match target.manifest()? {
            None => return Ok(Place::Free),
            Some(seen) if seen.manifest == self.manifest => return Ok(Place::Has),
            Some(seen) => seen,
        };
        let path = target.place().join(names::MANIFEST);
        let other = match Manifest::decode_files(seen.manifest.clone(), &path) {
            Ok(other) => other,
            Err(error) if error.is_damage() && how.replace_older => {
                return Ok(Place::Older(seen, Vec::new()));
            }
            Err(error) if error.is_damage() => {
                let why = "a checkpoint is there whose manifest is damaged";
                return Ok(Place::Taken(taken(target, why, REPLACES)));
            }
            Err(error) => return Err(error),
        };
        let is_same_save = SaveId::of(&other) == self.save;
        if is_same_save && other.dropped.len() <= self.dropped {
            return Ok(Place::HasWhole(other.files));
        }
        let is_older = SaveId::of(&other).age < self.save.age;
        if is_same_save || !is_older || !how.replace_older {
            let why = format!("another checkpoint is there, {}", self.beside(&other));
            let remedy = if is_older { REPLACES } else { STAYS };
            return Ok(Place::Taken(taken(target, why, remedy)));
        }
        if !other.stripes.is_empty() {
            let why = "an older checkpoint is there, which is striped over other disks";
            return Ok(Place::Taken(taken(target, why, STAYS)));
        }
        Ok(Place::Older(seen, other.files.into_iter().map(|file| file.name).collect()))
    }

    /// Which checkpoint another one is, as seen from this one.
    fn beside(&self, other: &Listed) -> String {
        let step = other.step.map(|step| format!(" of step {step}")).unwrap_or_default();
        let (own, others) = (self.save.age, other.age());
        if SaveId::of(other) == self.save {
            return format!("the same save{step} with more parts dropped");
        }
        let ms = |age: Age| age.created_unix_ms.unwrap_or_default();
        let apart = Duration::from_millis(ms(own).abs_diff(ms(others))).as_secs_f64();
        let when = if others < own { "earlier" } else { "later" };
        format!("a save{step} that was committed {apart:.1} s {when} than this one")
    }

    /// The files that are not there.
    pub fn missing(&self, target: &dyn Target, files: &[FileEntry]) -> Result<Vec<usize>> {
        let all: Vec<usize> = (0..files.len()).collect();
        missing(target, &self.files_of(files, &all))
    }

    /// Whether all files are there, and the manifest.
    pub fn is_there(&self, target: &dyn Target, files: &[FileEntry]) -> Result<bool> {
        let all: Vec<usize> = (0..files.len()).collect();
        let mut wanted = self.files_of(files, &all);
        wanted.push((names::MANIFEST, self.manifest.len() as u64));
        Ok(missing(target, &wanted)?.is_empty())
    }

    /// The names and the lengths of files of the checkpoint.
    pub fn files_of(&self, files: &[FileEntry], chosen: &[usize]) -> Vec<(&str, u64)> {
        chosen.iter().map(|&file| (self.names[file].as_str(), files[file].bytes)).collect()
    }

    /// Creates the manifest, in place of an older checkpoint's if that is wanted. Of several promotions of different checkpoints
    /// one gets the place; then the others see that checkpoint there.
    ///
    /// # Errors
    /// As for [`Copy::place`]; what the store or the system says of the commit.
    pub fn commit(&self, target: &dyn Target, how: Promotion, journal: &Journal) -> Result<Commit> {
        for _ in 0..LOOKS_MAX {
            let seen = match self.place(target, how)? {
                Place::Has => return self.settle(target),
                Place::Taken(error) => return Ok(Commit::Lost(error)),
                Place::HasWhole(_) => return Ok(Commit::Lost(lacks_files(target))),
                Place::Free => None,
                Place::Older(seen, shards) => {
                    journal.replaces(shards)?;
                    Some(seen)
                }
            };
            match target.commit(self.manifest.clone(), seen.as_ref()) {
                Ok(()) => return self.settle(target),
                // Another promotion was faster; or it was this request's first attempt, whose answer was lost.
                Err(error) if error.is_taken() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Commit::Refused)
    }

    fn settle(&self, target: &dyn Target) -> Result<Commit> {
        target.settle(&self.names)?;
        Ok(Commit::Done)
    }

    /// Removes what checkpoints that had this place have left there; tells whether it could. Only for a copy that is committed.
    pub fn clear(&self, target: &dyn Target, journal: &Journal) -> bool {
        let cleared = clear(target, &journal.stale(), &self.names);
        if let Err(error) = &cleared {
            tracing::warn!(to = %target.place().display(), %error, "the copy is committed, but shards of a checkpoint that it replaces cannot be removed; the next promotion tries it again");
        }
        cleared.is_ok()
    }

    /// Removes what was sent of a copy whose place another checkpoint has got meanwhile.
    pub fn withdraw(&self, target: &dyn Target, journal: Journal) {
        for name in &self.names {
            if let Err(error) = target.remove(name) {
                let path = target.place().join(name);
                tracing::warn!(path = %path.display(), %error, "a shard that was sent cannot be removed");
            }
        }
        journal.end(target);
    }
}

/// What to do about an older checkpoint, or a damaged one.
const REPLACES: &str =
    "`replace_older` (`--replace-older`) replaces it, and another place leaves it alone";
/// What to do about a checkpoint that may be the only one of its save.
const STAYS: &str = "it stays, since it may be the only copy of that save: copy to another place";

/// The error for a place that another checkpoint has: which, and what to do.
fn taken(target: &dyn Target, why: impl Display, remedy: &str) -> Error {
    let error = Error::io("promoting to", target.place(), Errno::EEXIST.into());
    error.hinted(format!("{why}: {remedy}"))
}

/// The error for a place that has the same save under other file names, and lacks files of it.
pub(super) fn lacks_files(target: &dyn Target) -> Error {
    let why =
        "another checkpoint is there, the same save under other file names, which lacks files";
    taken(target, why, "copy to another place, or move what is there away")
}

/// Which of these files, by name and length, are not there.
///
/// # Errors
/// What the store or the system says.
pub(super) fn missing(target: &dyn Target, files: &[(&str, u64)]) -> Result<Vec<usize>> {
    target.missing(files).map_err(|error| Error::io("listing", target.place(), error))
}

/// Removes shards of earlier checkpoints from a place, except these.
///
/// # Errors
/// What the store or the system says.
pub(super) fn clear(target: &dyn Target, stale: &Stale, kept: &[String]) -> io::Result<()> {
    let listed = if stale.ids.is_empty() { Vec::new() } else { target.shards()? };
    let of_earlier = listed.iter().filter(|name| stale.ids.contains(&names::generation(name)));
    for name in stale.names.iter().chain(of_earlier).filter(|name| !kept.contains(name)) {
        target.remove(name)?;
    }
    Ok(())
}

/// The manifest of a checkpoint's copy with this id.
fn manifest_of(manifest: &Manifest, id: u64) -> Manifest {
    let promoted =
        |file: &FileEntry| FileEntry { name: names::promoted(&file.name, id), ..file.clone() };
    let files = manifest.files.iter().map(promoted).collect();
    let there = Manifest { files, generation: id, ..manifest.clone() };
    Manifest { stripes: Vec::new(), nodes: Vec::new(), ..there }
}

/// A number of 52 bits: as a generation it stays exact in every reader of JSON, and far above those of saves.
fn id_of(manifest: &[u8]) -> u64 {
    let hash = twox_hash::XxHash3_128::oneshot(manifest) as u64;
    hash >> 13 | names::PROMOTED_MIN
}
