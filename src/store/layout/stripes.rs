//! The directories that hold a checkpoint's files: its own, and a stripe directory on each disk that it is striped
//! over. The rest of the store asks [`Stripes`] where a file is.
//!
//! The checkpoint `<parent>/<name>` has the stripe directories `<stripe>/<name>`, one for each directory of
//! `Config.stripe`. A manifest also notes them, for messages only: no path in it is ever followed. A stripe
//! directory holds shards, and a marker that names the checkpoint they belong to. The lock on the checkpoint's
//! own directory therefore covers its stripe directories too.

use crate::engine::fallback::{Fallback, FallbackKind};
use crate::error::{Error, Result};
use crate::format::names;
use crate::plan::save::Shard;
use crate::store::layout::stripe_marker::{self, stripe_owner};
use crate::sys::file_system::{FileSystem, Hosts};
use crate::sys::open_dir::Dir;
use crate::sys::{dir, file, lock};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;

/// The directories of one checkpoint.
#[derive(Debug)]
pub(in crate::store) struct Stripes {
    /// The checkpoint's own directory.
    own: PathBuf,
    /// The same directory from the root and without links, as markers name it.
    marked: String,
    stripe_dirs: Vec<StripeDir>,
    /// Why a directory of the configuration is not among the stripe directories.
    left_out: Vec<String>,
    /// Directories of the configuration that exist and hold no stripe directory.
    vacant: Vec<PathBuf>,
    /// The first directory of which the system did not say whose it is, and what it said.
    refused: Option<(PathBuf, Error)>,
}

/// A checkpoint's directory on another disk.
#[derive(Debug)]
struct StripeDir {
    dir: PathBuf,
    /// The configured directory that it is in.
    stripe: PathBuf,
}

/// The checkpoint that a stripe directory belongs to.
pub(in crate::store) enum Owner {
    /// The directory is missing or empty, or holds only what was left by a kill: a marker without its name yet, and what
    /// a rank that outlived its session was writing.
    Nobody,
    /// This checkpoint.
    This,
    /// Another checkpoint; whether that exists.
    Other(String, bool),
    /// The directory holds this file and no marker.
    Unknown(String),
}

impl Stripes {
    /// The own directory alone.
    pub fn alone(dir: &Path) -> Self {
        let marked = String::new();
        let (stripe_dirs, left_out, vacant) = (Vec::new(), Vec::new(), Vec::new());
        Self { own: dir.into(), marked, stripe_dirs, left_out, vacant, refused: None }
    }

    /// The directories to save to. The own one exists; a save creates the stripe directories.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stripe that does not exist or is the checkpoint's own parent, where a
    /// directory of this name belongs to something else, and if `dir` is itself a stripe directory.
    pub fn to_save(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        if let Some(checkpoint) = stripe_owner(dir)? {
            return Err(Error::invalid(format!(
                "{} holds shards of the checkpoint {checkpoint}, which is striped over it: save to \
                 another path",
                dir.display()
            )));
        }
        let stripes = Self::named(dir, stripe)?;
        for (index, StripeDir { dir: stripe_dir, stripe }) in stripes.stripe_dirs.iter().enumerate()
        {
            check_stripe(stripe)?;
            if let Some(why) = why_apart(dir, stripe) {
                return Err(Error::invalid(format!("{} cannot be striped: {why}", dir.display())));
            }
            let is = |other: &Path| dir::is_same(stripe_dir, other);
            if is(dir) || stripes.stripe_dirs[..index].iter().any(|other| is(&other.dir)) {
                return Err(Error::invalid(format!(
                    "Config.stripe names {}, in which {} lies already: name directories on other disks",
                    stripe.display(),
                    stripe_dir.display()
                )));
            }
            if let Some(why) = why_taken(stripes.owner(stripe_dir)?, stripe_dir, &stripes.marked) {
                return Err(Error::invalid(format!(
                    "{} cannot be striped over {}: {} {why}",
                    dir.display(),
                    stripe.display(),
                    stripe_dir.display()
                )));
            }
        }
        Ok(stripes)
    }

    /// The directories in which to look for committed files. Never fails: if a file is missing,
    /// [`Stripes::left_out`] and [`Stripes::refused`] say where nobody looked.
    pub fn to_read(dir: &Path, stripe: &[PathBuf]) -> Self {
        Self::filtered(dir, stripe, |owner, stripe_dir, _| match owner {
            // One that was moved or copied with its checkpoint is as good, and one whose marker cannot be read; checksums
            // tell.
            Ok(Owner::Nobody | Owner::This | Owner::Other(_, false))
            | Err(Error::Io { doing: "reading", .. }) => None,
            Ok(Owner::Unknown(_)) => {
                let is_checkpoint = dir::leads_somewhere(&stripe_dir.join(names::MANIFEST));
                is_checkpoint.then(|| format!("{} is a checkpoint itself", stripe_dir.display()))
            }
            Ok(Owner::Other(checkpoint, true)) => {
                Some(format!("{} belongs to {checkpoint}", stripe_dir.display()))
            }
            Err(error) => Some(error.to_string()),
        })
    }

    /// The directories from which to remove files: only stripe directories whose marker names this checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`] if the system does not say whose one is: once the checkpoint's own directory is cleared, nothing
    /// leads to its files there.
    pub fn to_clear(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        let mut stripes = Self::filtered(dir, stripe, |owner, stripe_dir, own| {
            let why = match owner {
                Ok(Owner::This) => why_apart(dir, stripe_dir)?,
                Ok(Owner::Nobody) => "is not there, or empty".into(),
                Ok(Owner::Other(checkpoint, false)) => format!(
                    "belongs to {checkpoint}, which is not there: if you moved that to {own}, set \"checkpoint\" in \
                     its {} to {own}",
                    names::STRIPE_MARKER
                ),
                Ok(_) => "does not belong to this checkpoint".into(),
                Err(error) => return Some(error.to_string()),
            };
            Some(format!("{} {why}", stripe_dir.display()))
        });
        stripes.refused.take().map_or(Ok(stripes), |(_, error)| Err(error))
    }

    /// The stripe directories for which `refuse`, given owner, path and this checkpoint's own path, has no reason; first
    /// those whose marker names this checkpoint.
    fn filtered(
        dir: &Path,
        stripe: &[PathBuf],
        refuse: impl Fn(&Result<Owner>, &Path, &str) -> Option<String>,
    ) -> Self {
        let is_refusal = |error: &Error| matches!(error, Error::Io { .. });
        let mut stripes = match Self::named(dir, stripe) {
            Ok(stripes) => stripes,
            Err(error) => {
                let refused = is_refusal(&error).then(|| (dir.into(), error));
                return Self { refused, ..Self::alone(dir) };
            }
        };
        let mut unsure = Vec::new();
        for stripe_dir in std::mem::take(&mut stripes.stripe_dirs) {
            if dir::is_same(&stripe_dir.dir, dir) {
                continue;
            }
            let owner =
                check_stripe(&stripe_dir.stripe).and_then(|()| stripes.owner(&stripe_dir.dir));
            if matches!(owner, Ok(Owner::Nobody)) {
                stripes.vacant.push(stripe_dir.stripe.clone());
            }
            match refuse(&owner, &stripe_dir.dir, &stripes.marked) {
                Some(why) => {
                    stripes.left_out.push(why);
                    let refusal = owner.err().filter(is_refusal).map(|e| (stripe_dir.dir, e));
                    stripes.refused = stripes.refused.or(refusal);
                }
                None if matches!(owner, Ok(Owner::This)) => stripes.stripe_dirs.push(stripe_dir),
                None => unsure.push(stripe_dir),
            }
        }
        // Another checkpoint's files have the same names.
        stripes.stripe_dirs.append(&mut unsure);
        stripes
    }

    /// All directories by name, whatever is there.
    fn named(dir: &Path, stripe: &[PathBuf]) -> Result<Self> {
        if stripe.is_empty() {
            return Ok(Self::alone(dir));
        }
        let own = dir::real(dir)?;
        let name = stripe_dir_name(&own).ok_or_else(|| {
            Error::invalid(format!("{} has no name: it cannot be striped", own.display()))
        })?;
        let marked = own.to_str().ok_or_else(|| {
            Error::invalid(format!(
                "{} cannot be striped: a marker in each stripe directory names it, and the path is no UTF-8; \
                 save to another path, or without Config.stripe",
                own.display()
            ))
        })?;
        let stripe_dir = |stripe: &PathBuf| {
            let stripe = absolute(stripe).map_err(|e| Error::io("opening", stripe, e))?;
            Ok(StripeDir { dir: stripe.join(&name), stripe })
        };
        Ok(Self {
            marked: marked.into(),
            stripe_dirs: stripe.iter().map(stripe_dir).collect::<Result<_>>()?,
            ..Self::alone(dir)
        })
    }

    /// The checkpoint's own directory, which holds its manifest.
    pub fn own(&self) -> &Path {
        &self.own
    }

    /// All directories, the own one first.
    pub fn dirs(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(self.own.as_path()).chain(self.stripe_dirs())
    }

    /// The directories on other disks.
    pub fn stripe_dirs(&self) -> impl Iterator<Item = &Path> {
        self.stripe_dirs.iter().map(|stripe_dir| stripe_dir.dir.as_path())
    }

    /// The directories that exist. One that cannot be reached is an error, and not taken for missing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn existing(&self) -> Result<Vec<&Path>> {
        let existing = |dir| Ok(dir::is_there(dir)?.then_some(dir));
        self.dirs().map(existing).filter_map(Result::transpose).collect()
    }

    /// The directories that exist, and the names of the files in each. A stripe directory that a clean-up removes meanwhile
    /// is left out.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn listed(&self) -> Result<Vec<(&Path, Vec<String>)>> {
        let listed = |dir| match dir::file_names(dir) {
            Err(error) if error.is_not_found() && dir != self.own => None,
            names => Some(names.map(|names| (dir, names))),
        };
        self.existing()?.into_iter().filter_map(listed).collect()
    }

    /// The directories that exist, open, to remove files from them: the own one, which the caller has locked, and the
    /// stripe directories, whose name may not be a link.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Invalid`] for a link.
    pub fn opened(&self, own: &Arc<Dir>) -> Result<Vec<Arc<Dir>>> {
        let mut opened = vec![Arc::clone(own)];
        for dir in self.stripe_dirs() {
            match Dir::open_real(dir) {
                Err(error) if error.is_not_found() => {}
                dir => opened.push(dir?),
            }
        }
        Ok(opened)
    }

    /// Why directories of the configuration are not searched.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// A directory of which the system did not say whose it is, and so was not searched, and what it said.
    pub fn refused(&self) -> Option<(&Path, &io::Error)> {
        match &self.refused {
            Some((dir, Error::Io { cause, .. })) => Some((dir, cause)),
            _ => None,
        }
    }

    /// The stripes in a manifest's note that may hold a stripe directory which is not among these: they are not
    /// configured, do not exist, or hold another's. None if there are as many as the note lists, wherever
    /// their disks are mounted now.
    pub fn unseen(&self, noted: &[String]) -> Vec<String> {
        if self.stripe_dirs.len() >= noted.len() {
            return Vec::new();
        }
        let used = self.stripe_dirs.iter().map(|stripe_dir| &stripe_dir.stripe);
        let seen: Vec<_> =
            used.chain(&self.vacant).map(|stripe| stripe.to_string_lossy()).collect();
        noted.iter().filter(|dir| !seen.iter().any(|seen| seen == *dir)).cloned().collect()
    }

    /// How many files a save writes at the same time, with `files` per directory.
    pub fn lanes(&self, files: u32) -> usize {
        files.max(1) as usize * (1 + self.stripe_dirs.len())
    }

    /// The directory in which a rank writes this shard: its lanes take the directories by turns. Each rank starts
    /// at another one, so that ranks with few tensors do not all write to the first disk.
    pub fn dir_of(&self, shard: &Shard, rank: u32) -> &Path {
        let number = (shard.lane + rank as usize) % (1 + self.stripe_dirs.len());
        match number.checked_sub(1) {
            None => &self.own,
            Some(number) => &self.stripe_dirs[number].dir,
        }
    }

    /// The path of a file that one of the directories holds.
    ///
    /// # Errors
    /// [`Error::Io`] if none is known to hold it and the system does not say for one.
    pub fn find(&self, name: &str) -> Result<Option<PathBuf>> {
        let mut refused = Ok(None);
        for path in self.dirs().map(|dir| dir.join(name)) {
            match dir::look_at(&path) {
                Ok(_) => return Ok(Some(path)),
                Err(error) if file::is_absent(&error) => {}
                Err(error) => refused = refused.and(Err(Error::io("opening", path, error))),
            }
        }
        refused
    }

    /// The manifest's note of the stripes, if any of these files is in one: for messages.
    pub fn noted<'a>(&self, files: impl IntoIterator<Item = &'a Path>) -> Vec<String> {
        let elsewhere = files.into_iter().any(|file| file.parent() != Some(&self.own));
        let stripe_dirs = self.stripe_dirs.iter().filter(|_| elsewhere);
        stripe_dirs.map(|stripe_dir| stripe_dir.stripe.to_string_lossy().into_owned()).collect()
    }

    /// Checks that the coordinator of a save by several ranks has created the stripe directories.
    ///
    /// # Errors
    /// [`Error::Invalid`] if not.
    pub fn check_created(&self) -> Result<()> {
        for dir in self.stripe_dirs() {
            if !matches!(self.owner(dir)?, Owner::This) {
                return Err(Error::invalid(format!(
                    "the coordinator has not made {} for this checkpoint: begin its session before any \
                     rank writes, with the same Config.stripe on all ranks",
                    dir.display()
                )));
            }
        }
        Ok(())
    }

    /// The content of the marker that says whose a stripe directory is.
    pub fn marker(&self) -> String {
        stripe_marker::text_of(&self.marked)
    }

    /// Makes the names of all files in the stripe directories durable, and those of the directories.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync_stripe_dirs(&self) -> Result<()> {
        for StripeDir { dir, stripe } in &self.stripe_dirs {
            dir::sync(dir)?;
            dir::sync(stripe)?;
        }
        Ok(())
    }

    /// The warning for two directories on one disk.
    pub fn shared_disk(&self) -> Option<Fallback> {
        let devices: Vec<(Option<u64>, &Path)> =
            self.dirs().map(|dir| (dir::device(dir), dir)).collect();
        let (dir, other) = devices.iter().enumerate().find_map(|(index, (device, dir))| {
            let same = |(other, _): &&(Option<u64>, &Path)| device.is_some() && other == device;
            devices[..index].iter().find(same).map(|(_, other)| (dir, other))
        })?;
        Some(Fallback {
            kind: FallbackKind::Stripes,
            wanted: "stripes on disks of their own".into(),
            got: "several stripes on one disk".into(),
            reason: format!("{} and {} are on one file system", other.display(), dir.display()),
            remedy:
                "name directories on other disks in `stripe`: striping over one disk wins nothing"
                    .into(),
        })
    }

    /// The checkpoint that a stripe directory belongs to.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn owner(&self, stripe_dir: &Path) -> Result<Owner> {
        let entries = match dir::entries(stripe_dir) {
            Err(error) if error.is_not_found() => return Ok(Owner::Nobody),
            entries => entries?,
        };
        if let Some(checkpoint) = stripe_owner(stripe_dir)? {
            if checkpoint == self.marked {
                return Ok(Owner::This);
            }
            let exists = dir::is_dir(Path::new(&checkpoint));
            return Ok(Owner::Other(checkpoint, exists));
        }
        let mut names =
            entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let is_other = |name: &String| name != lock::FILE && !names::is_left_unmarked(name);
        Ok(names.find(is_other).map_or(Owner::Nobody, Owner::Unknown))
    }
}

/// Why a checkpoint's own directory and a stripe cannot belong together: checkpoints of one path on the disks of two
/// hosts would have one stripe directory on the network file system, and the lock of neither keeps out the other.
fn why_apart(own: &Path, stripe: &Path) -> Option<String> {
    let [own_system, system] = [own, stripe].map(|dir| FileSystem::of(dir).ok());
    let (own_system, system) = (own_system?, system?);
    (!own_system.is_shared() && system.hosts == Hosts::Many).then(|| {
        format!(
            "{} is on {}, which several hosts share, and {} is on {}, which this host has alone: \
             a checkpoint of the same path on another host would have the same stripe directory; keep both on the \
             shared file system, or stripe over disks of this host",
            stripe.display(),
            system.name,
            own.display(),
            own_system.name
        )
    })
}

/// Why a stripe directory cannot be used, and what to do; `None` if it can.
fn why_taken(owner: Owner, stripe_dir: &Path, own: &str) -> Option<String> {
    match owner {
        Owner::Nobody | Owner::This => None,
        Owner::Other(checkpoint, true) => Some(format!(
            "belongs to the checkpoint {checkpoint}: save under another name, or stripe over another directory"
        )),
        Owner::Other(checkpoint, false) => Some(format!(
            "belongs to the checkpoint {checkpoint}, which is not there: if you deleted that, remove {} too; if you \
             moved it to {own}, set \"checkpoint\" in its {} to {own}",
            stripe_dir.display(),
            names::STRIPE_MARKER
        )),
        Owner::Unknown(name) => Some(format!(
            "holds {name} and no {}, so that it is nobody's stripe directory: stripe over another directory, or move \
             that away",
            names::STRIPE_MARKER
        )),
    }
}

/// The own directory's name. The directory of a rank that saves by itself has the same name in every checkpoint,
/// so the checkpoint's name goes before it: `step-7.rank00003`.
fn stripe_dir_name(own: &Path) -> Option<OsString> {
    let name = own.file_name()?;
    let above = own.parent().and_then(Path::file_name);
    Some(match above.filter(|_| name.to_str().is_some_and(names::is_rank_dir)) {
        Some(above) => [above, ".".as_ref(), name].into_iter().collect(),
        None => name.into(),
    })
}

/// A stripe must exist. If a save created it, it could fill the disk below an unmounted mount point.
fn check_stripe(stripe: &Path) -> Result<()> {
    match dir::look(stripe) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(Error::invalid(format!(
            "Config.stripe names {}, which is no directory",
            stripe.display()
        ))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Error::invalid(format!(
            "Config.stripe names {}, which is not there: mount its disk, or make the directory; a save does \
             not make it, since it would fill another disk where this one is not mounted",
            stripe.display()
        ))),
        Err(e) => Err(Error::io("opening", stripe, e)),
    }
}
