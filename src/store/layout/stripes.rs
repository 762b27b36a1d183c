//! Where the files of a checkpoint lie: in its own directory, and in a companion directory on each of
//! the disks that it is striped over. The rest of the store asks here.
//!
//! `<parent>/<name>` has its companions at `<stripe>/<name>`, for each directory of the configuration's
//! `stripe`; what a manifest says of them is never followed. A companion holds shards, and a marker that
//! names the one directory that they belong to. Whoever holds the lock on that directory is therefore
//! alone in its companions too.

use crate::engine::fallback::Fallback;
use crate::error::{Error, Result};
use crate::format::names;
use crate::plan::save::Shard;
use crate::store::write::rollback::Parts;
use crate::sys::dir;
use crate::sys::file;
use crate::sys::lock::DirLock;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf, absolute};

/// The directories of one checkpoint.
#[derive(Debug)]
pub(in crate::store) struct Places {
    /// Its own.
    own: PathBuf,
    /// The same from the root and without links, as markers name it.
    marked: String,
    companions: Vec<Companion>,
    /// Why a directory of the configuration is not among the companions.
    left_out: Vec<String>,
    /// Directories of the configuration that are there, and hold no companion.
    vacant: Vec<PathBuf>,
}

/// A directory on another disk.
#[derive(Debug)]
struct Companion {
    dir: PathBuf,
    /// The configured directory that it is in.
    stripe: PathBuf,
}

/// The marker's content.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    /// The checkpoint's own directory.
    checkpoint: String,
}

/// Whose a companion directory is.
enum Holder {
    /// It is not there, or empty.
    Nobody,
    /// This checkpoint's.
    This,
    /// Another directory's; whether that one is there.
    Other(String, bool),
    /// It holds this, and does not say whose it is.
    Unknown(String),
}

impl Places {
    /// Only its own directory.
    pub fn alone(dir: &Path) -> Self {
        let marked = String::new();
        let (left_out, vacant) = (Vec::new(), Vec::new());
        Self { own: dir.into(), marked, companions: Vec::new(), left_out, vacant }
    }

    /// The places to save to. The own directory is there; companions are made by [`Places::make`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stripe that is not there, is the checkpoint's own parent, or where a
    /// directory of this name belongs to something else; also if `dir` is itself a companion.
    pub fn to_save(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        if let Some(checkpoint) = companion_of(dir)? {
            return Err(Error::invalid(format!(
                "{} holds shards of the checkpoint {checkpoint}, which is striped over it: save to \
                 another path",
                dir.display()
            )));
        }
        let mut places = Self::named(dir, stripe)?;
        for (index, Companion { dir: companion, stripe }) in places.companions.iter().enumerate() {
            check_stripe(stripe)?;
            let is = |other: &Path| same(companion, other);
            if is(dir) || places.companions[..index].iter().any(|c| is(&c.dir)) {
                return Err(Error::invalid(format!(
                    "Config.stripe names {}, in which {} lies already: name directories on other disks",
                    stripe.display(),
                    companion.display()
                )));
            }
            let whose = match places.holder(companion)? {
                Holder::Nobody | Holder::This => continue,
                Holder::Other(checkpoint, true) => {
                    format!(
                        "belongs to the checkpoint {checkpoint}: save under another name, or stripe over \
                         another directory"
                    )
                }
                Holder::Other(checkpoint, false) => format!(
                    "belongs to the checkpoint {checkpoint}, which is not there: if it was deleted, remove \
                     {} too; if it was moved here, put this path into the {} there",
                    companion.display(),
                    names::COMPANION
                ),
                Holder::Unknown(name) => format!(
                    "holds {name} and no {}, so that it is nobody's companion: stripe over another \
                     directory, or move that away",
                    names::COMPANION
                ),
            };
            return Err(Error::invalid(format!(
                "{} cannot be striped over {}: {} {whose}",
                dir.display(),
                stripe.display(),
                companion.display()
            )));
        }
        places.left_out = Vec::new();
        Ok(places)
    }

    /// The places in which to look for what was committed. Never fails: whoever misses a file there
    /// says why with [`Places::left_out`].
    pub fn to_read(dir: &Path, stripe: &[PathBuf]) -> Self {
        Self::filtered(dir, stripe, |holder, companion| match holder {
            // One that was moved or copied with its checkpoint is as good; checksums tell.
            Holder::Nobody | Holder::This | Holder::Other(_, false) => None,
            Holder::Unknown(_) if !dir::has(&companion.join(names::MANIFEST)) => None,
            Holder::Unknown(_) => Some("is a checkpoint itself".into()),
            Holder::Other(checkpoint, true) => Some(format!("belongs to {checkpoint}")),
        })
    }

    /// The places to clear up: no companion but those that say that they are this checkpoint's.
    pub fn to_sweep(dir: &Path, stripe: &[PathBuf]) -> Self {
        Self::filtered(dir, stripe, |holder, _| match holder {
            Holder::This => None,
            Holder::Nobody => Some("is not there, or empty".into()),
            Holder::Other(checkpoint, false) => Some(format!(
                "belongs to {checkpoint}, which is not there: if it was moved here, put this path into the \
                 {} there",
                names::COMPANION
            )),
            _ => Some("is not this checkpoint's".into()),
        })
    }

    /// Those companions for which `refuse` gives no reason.
    fn filtered(
        dir: &Path,
        stripe: &[PathBuf],
        refuse: impl Fn(&Holder, &Path) -> Option<String>,
    ) -> Self {
        let Ok(mut places) = Self::named(dir, stripe) else { return Self::alone(dir) };
        for companion in std::mem::take(&mut places.companions) {
            if same(&companion.dir, dir) {
                continue;
            }
            let holder =
                check_stripe(&companion.stripe).and_then(|()| places.holder(&companion.dir));
            if matches!(holder, Ok(Holder::Nobody)) {
                places.vacant.push(companion.stripe.clone());
            }
            let why = match holder {
                Ok(holder) => refuse(&holder, &companion.dir)
                    .map(|why| format!("{} {why}", companion.dir.display())),
                Err(error) => Some(error.to_string()),
            };
            match why {
                None => places.companions.push(companion),
                Some(why) => places.left_out.push(why),
            }
        }
        places
    }

    /// All places by name, none of them looked at.
    fn named(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        if stripe.is_empty() {
            return Ok(Self::alone(dir));
        }
        let own = dir::real(dir)?;
        let name = companion_name(&own).ok_or_else(|| {
            Error::invalid(format!("{} has no name: it cannot be striped", own.display()))
        })?;
        let marked = own.to_str().ok_or_else(|| {
            Error::invalid(format!(
                "{} cannot be striped: the companions' markers are to name it, and it is no UTF-8; save to \
                 another path, or without Config.stripe",
                own.display()
            ))
        })?;
        let companion = |stripe: &PathBuf| {
            let stripe = absolute(stripe).map_err(|e| Error::io("opening", stripe, e))?;
            Ok(Companion { dir: stripe.join(&name), stripe })
        };
        Ok(Self {
            own: dir.into(),
            marked: marked.into(),
            companions: stripe.iter().map(companion).collect::<Result<_>>()?,
            left_out: Vec::new(),
            vacant: Vec::new(),
        })
    }

    /// The checkpoint's own directory, in which its manifest is.
    pub fn own(&self) -> &Path {
        &self.own
    }

    /// All directories, its own first.
    pub fn dirs(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(self.own.as_path()).chain(self.companions())
    }

    /// The directories on other disks.
    pub fn companions(&self) -> impl Iterator<Item = &Path> {
        self.companions.iter().map(|companion| companion.dir.as_path())
    }

    /// The directories that are there. One that cannot be reached is not taken for one that is not there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn there(&self) -> Result<Vec<&Path>> {
        let there = |dir| Ok(dir::is_there(dir)?.then_some(dir));
        self.dirs().map(there).filter_map(Result::transpose).collect()
    }

    /// Why directories of the configuration are not looked into.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Those of the directories that a manifest notes in which a companion may be that is not among these: they are
    /// not configured, not there, or hold another's. None if there are as many as it notes, wherever their disks
    /// are now.
    pub fn unseen(&self, noted: &[String]) -> Vec<String> {
        if self.companions.len() >= noted.len() {
            return Vec::new();
        }
        let companions = self.companions.iter().map(|companion| &companion.stripe);
        let seen: Vec<_> =
            companions.chain(&self.vacant).map(|stripe| stripe.to_string_lossy()).collect();
        noted.iter().filter(|dir| !seen.iter().any(|seen| seen == *dir)).cloned().collect()
    }

    /// How many files are written at the same time, with so many a directory.
    pub fn lanes(&self, files: u32) -> usize {
        files.max(1) as usize * (1 + self.companions.len())
    }

    /// The directory in which a rank writes this shard: its lanes go round them. Ranks start at different
    /// ones, so that those with few tensors do not all write to the first disk.
    pub fn dir_of(&self, shard: &Shard, rank: u32) -> &Path {
        let number = (shard.lane + rank as usize) % (1 + self.companions.len());
        match number.checked_sub(1) {
            None => &self.own,
            Some(companion) => &self.companions[companion].dir,
        }
    }

    /// The path in one of the places of a file of which just one has it.
    pub fn find(&self, name: &str) -> Option<PathBuf> {
        let paths = self.dirs().map(|dir| dir.join(name));
        paths.into_iter().find(|path| dir::has(path))
    }

    /// What the manifest notes of the stripes: for messages.
    pub fn noted<'a>(&self, parts: impl IntoIterator<Item = &'a Path>) -> Vec<String> {
        let elsewhere = parts.into_iter().any(|part| part.parent() != Some(&self.own));
        let stripes = self.companions.iter().filter(|_| elsewhere);
        stripes.map(|companion| companion.stripe.to_string_lossy().into_owned()).collect()
    }

    /// Makes the companions, each with its marker. Called by who holds the lock on the own directory.
    ///
    /// # Errors
    /// [`Error::Busy`] if another checkpoint of this name claims one at this moment; [`Error::Invalid`]
    /// if it was quicker; [`Error::Io`].
    pub fn make(&self, parts: &mut Parts) -> Result<()> {
        for dir in self.companions() {
            parts.make_dir(dir)?;
            // Only while the marker is not there can two want the same directory.
            let _claiming = match DirLock::take(dir) {
                // A clean-up has removed it just now.
                Err(error) if error.is_not_found() => {
                    parts.make_dir(dir)?;
                    DirLock::take(dir)?
                }
                lock => lock?,
            };
            match self.holder(dir)? {
                Holder::This => {}
                Holder::Nobody => self.mark(dir, parts)?,
                Holder::Other(checkpoint, _) | Holder::Unknown(checkpoint) => {
                    return Err(Error::invalid(format!(
                        "{} was taken for {checkpoint} just now: save under another name",
                        dir.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// The companions are there: the coordinator of a save by several ranks has made them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if not.
    pub fn check_made(&self) -> Result<()> {
        for dir in self.companions() {
            if !matches!(self.holder(dir)?, Holder::This) {
                return Err(Error::invalid(format!(
                    "the coordinator has not made {} for this checkpoint: begin its session before any \
                     rank writes, with the same Config.stripe on all ranks",
                    dir.display()
                )));
            }
        }
        Ok(())
    }

    fn mark(&self, dir: &Path, parts: &mut Parts) -> Result<()> {
        let (part, path) = (dir.join(names::COMPANION_PART), dir.join(names::COMPANION));
        let text = serde_json::json!(Marker { checkpoint: self.marked.clone() }).to_string();
        parts.files.extend([part.clone(), path.clone()]);
        file::write_durably(&part, |mut file| writeln!(file, "{text}"))?;
        dir::rename(&part, &path)?;
        // Before any shard: without the marker, nobody would know whose the shards are.
        dir::sync(dir)
    }

    /// Makes the names of all files in the companions durable, and those of the companions.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync_companions(&self) -> Result<()> {
        for Companion { dir, stripe } in &self.companions {
            dir::sync(dir)?;
            dir::sync(stripe)?;
        }
        Ok(())
    }

    /// What is to be said of directories that share a disk.
    pub fn shared_disk(&self) -> Option<Fallback> {
        let device = |dir: &Path| dir::look(dir).ok().map(|found| found.dev());
        let devices: Vec<(Option<u64>, &Path)> =
            self.dirs().map(|dir| (device(dir), dir)).collect();
        let (dir, other) = devices.iter().enumerate().find_map(|(index, (device, dir))| {
            let same = |(other, _): &&(Option<u64>, &Path)| device.is_some() && other == device;
            devices[..index].iter().find(same).map(|(_, other)| (dir, other))
        })?;
        Some(Fallback {
            wanted: "stripes on disks of their own".into(),
            got: "several stripes on one disk".into(),
            reason: format!("{} and {} are on one file system", other.display(), dir.display()),
            remedy:
                "name directories on other disks in `stripe`: striping over one disk wins nothing"
                    .into(),
        })
    }

    fn holder(&self, companion: &Path) -> Result<Holder> {
        let entries = match dir::entries(companion) {
            Err(error) if error.is_not_found() => return Ok(Holder::Nobody),
            entries => entries?,
        };
        if let Some(checkpoint) = companion_of(companion)? {
            if checkpoint == self.marked {
                return Ok(Holder::This);
            }
            let is_there = dir::is_dir(Path::new(&checkpoint));
            return Ok(Holder::Other(checkpoint, is_there));
        }
        let other = entries.iter().find_map(|entry| {
            let name = entry.file_name();
            (name != names::COMPANION_PART).then(|| name.to_string_lossy().into_owned())
        });
        Ok(other.map_or(Holder::Nobody, Holder::Unknown))
    }
}

/// A path, and some words around it.
const MARKER_BYTES_MAX: u64 = 65_536;

/// The checkpoint whose companion a directory says it is.
///
/// # Errors
/// [`Error::Io`] for a marker that is there and cannot be read: what lies beside it may be somebody's.
pub(in crate::store) fn companion_of(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(names::COMPANION);
    match file::read_start(&path, MARKER_BYTES_MAX) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok().map(|marker: Marker| marker.checkpoint)),
        Err(e) if is_no_marker(&e) => Ok(None),
        Err(e) => Err(Error::io("reading", path, e)),
    }
}

/// It is not there, or a link, or no file.
fn is_no_marker(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotADirectory, NotFound};
    [NotFound, NotADirectory, InvalidInput].contains(&error.kind()) || file::is_link(error)
}

/// The own directory's name; of the directory of a rank that saves by itself, which has the same name
/// in every checkpoint, with the checkpoint's before it: `step-7.rank00003`.
fn companion_name(own: &Path) -> Option<OsString> {
    let name = own.file_name()?;
    let above = own.parent().and_then(Path::file_name);
    Some(match above.filter(|_| name.to_str().is_some_and(names::is_rank_dir)) {
        Some(above) => [above, ".".as_ref(), name].into_iter().collect(),
        None => name.into(),
    })
}

/// A stripe must be there: making it could fill the disk that its own is not mounted on.
fn check_stripe(stripe: &Path) -> Result<()> {
    match dir::look(stripe) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(Error::invalid(format!(
            "Config.stripe names {}, which is no directory",
            stripe.display()
        ))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Error::invalid(format!(
            "Config.stripe names {}, which is not there: mount its disk, or make the directory; it is \
             not made by a save, which would fill another disk where this one is not mounted",
            stripe.display()
        ))),
        Err(e) => Err(Error::io("opening", stripe, e)),
    }
}

/// Whether two paths are one directory.
pub(in crate::store) fn same(one: &Path, other: &Path) -> bool {
    match (dir::look(one), dir::look(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => one == other,
    }
}
