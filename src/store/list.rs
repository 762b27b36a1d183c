//! Finding checkpoints in a directory.

use super::dir::{entries, file_names};
use super::open::{Checkpoint, read_manifest};
use super::places::companion_of;
use super::ranks;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{Manifest, PartOf, names};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A directory that is, or was to become, a checkpoint.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Whether it can be loaded.
    pub status: Status,
    /// Why not, if not.
    pub problem: Option<String>,
    /// The largest number at the end of its name: the step, in `step-00001000`.
    pub step: Option<u64>,
    /// When it was committed, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: Option<u64>,
    /// Number of tensors.
    pub tensors: Option<usize>,
    /// Bytes of its shards.
    pub file_bytes: Option<u64>,
    /// Which rank's part of what it is, if ranks saved each by itself and this is not the whole.
    pub part_of: Option<PartOf>,
    /// The parts of a whole that ranks saved each by itself, by rank: each a checkpoint of its own. Empty
    /// for any other.
    #[serde(with = "crate::path_text::list")]
    pub parts: Vec<PathBuf>,
}

/// Whether a checkpoint can be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Committed, and all files are there with their full length.
    Committed,
    /// Never committed, or a file is missing, or a rank's part.
    Incomplete,
    /// Its manifest or a file's length is not what was written.
    Damaged,
}

/// All checkpoints in `dir`: itself, if it is one, else those directly under it, by rising step.
///
/// A directory of the parts of ranks that saved each by itself is one checkpoint. It is committed if the
/// part of each rank is, and all are of one save.
///
/// Directories in which nothing of ringstow's is, or that cannot be read, are left out. Tensors' bytes
/// are not checked. Of striped checkpoints, files are looked for in the `stripe` of the configuration
/// that is [found](Config::found).
///
/// # Errors
/// [`Error::Io`] if `dir` cannot be listed; what [`Config::found`] gives.
pub fn list(dir: &Path) -> Result<Vec<Found>> {
    list_with(dir, &Config::found()?)
}

/// [`list`] with a configuration of the caller's.
///
/// # Errors
/// As for [`list`].
pub fn list_with(dir: &Path, config: &Config) -> Result<Vec<Found>> {
    if let Some(found) = look(dir, config)? {
        return Ok(vec![found]);
    }
    let mut all = Vec::new();
    for entry in entries(dir)? {
        let path = entry.path();
        if path.is_dir() {
            match look(&path, config) {
                Ok(found) => all.extend(found.filter(|found| found.is_there())),
                // Another process has just removed it.
                Err(error) if error.is_not_found() && !path.exists() => {}
                // Somebody else's (`lost+found`): no reason to find none of the others.
                Err(error) => tracing::warn!("{} is left out: {error}", path.display()),
            }
        }
    }
    all.sort_by(|a, b| {
        (a.step, a.created_unix_ms, &a.path).cmp(&(b.step, b.created_unix_ms, &b.path))
    });
    Ok(all)
}

/// The newest checkpoint in `dir` that can be loaded: that of the highest step, the number at the
/// end of its name; of equal or no numbers the one committed last. `None` if there is none. One that was
/// committed and cannot be loaded is passed over with a warning.
///
/// # Errors
/// As for [`list`].
pub fn latest(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    latest_with(dir, &Config::found()?)
}

/// [`latest`] with a configuration of the caller's.
///
/// # Errors
/// As for [`list`].
pub fn latest_with(dir: impl AsRef<Path>, config: &Config) -> Result<Option<PathBuf>> {
    let dir = dir.as_ref();
    // A rank's part beside checkpoints is none that all ranks can go on from.
    let whole = |found: &Found| found.path == dir || ranks::dir_rank(&found.path).is_none();
    for found in list_with(dir, config)?.into_iter().rev().filter(whole) {
        if found.status == Status::Committed {
            return Ok(Some(found.path));
        }
        let (path, problem) = (found.path.display(), found.problem.unwrap_or_default());
        match found.created_unix_ms {
            // What a killed save leaves, or one under way.
            None if found.status == Status::Incomplete => {
                tracing::info!("{path} is passed over, it was never committed: {problem}");
            }
            _ => tracing::warn!("{path} is passed over, it cannot be loaded: {problem}"),
        }
    }
    Ok(None)
}

impl Found {
    /// False for what another process has removed while it was looked at.
    fn is_there(&self) -> bool {
        self.status == Status::Committed || self.path.exists()
    }
}

fn look(dir: &Path, config: &Config) -> Result<Option<Found>> {
    let parts = ranks::parts(dir)?;
    if parts.is_empty() {
        look_at_one(dir, config)
    } else {
        look_at_parts(dir, parts, config).map(Some)
    }
}

/// The whole that these parts are to make up.
fn look_at_parts(dir: &Path, parts: Vec<PathBuf>, config: &Config) -> Result<Found> {
    let mut found = Vec::with_capacity(parts.len());
    for part in &parts {
        found.extend(look_at_one(part, config)?);
    }
    let (status, problem) = ranks::judge(dir, &found);
    Ok(Found {
        path: dir.into(),
        status,
        problem,
        step: step(dir),
        created_unix_ms: found.iter().filter_map(|part| part.created_unix_ms).max(),
        tensors: found.iter().filter_map(|part| part.tensors).reduce(|sum, n| sum + n),
        file_bytes: found.iter().filter_map(|part| part.file_bytes).reduce(|sum, n| sum + n),
        part_of: None,
        parts,
    })
}

/// What a directory holds by itself.
fn look_at_one(dir: &Path, config: &Config) -> Result<Option<Found>> {
    // What a checkpoint elsewhere has here is no checkpoint.
    if !file_names(dir)?.iter().any(|name| names::is_trace(name)) || companion_of(dir)?.is_some() {
        return Ok(None);
    }
    let opened = Checkpoint::open_with(dir, config);
    // One that cannot be loaded may still say what it was.
    let readable = if opened.is_err() { read_manifest(dir).ok() } else { None };
    let manifest = opened.as_ref().map(Checkpoint::manifest).ok().or(readable.as_ref());
    let (status, problem) = match &opened {
        Ok(_) => (Status::Committed, None),
        Err(error @ Error::Incomplete { .. }) => (Status::Incomplete, Some(error.to_string())),
        Err(error) => (Status::Damaged, Some(error.to_string())),
    };
    let of = |part: fn(&Manifest) -> u64| manifest.map(part);
    Ok(Some(Found {
        path: dir.into(),
        status,
        problem,
        step: step(dir),
        created_unix_ms: of(|m| m.created_unix_ms),
        tensors: manifest.map(|m| m.tensors.len()),
        file_bytes: of(|m| m.files.iter().map(|file| file.bytes).sum()),
        part_of: manifest.and_then(|m| m.part_of.clone()),
        parts: Vec::new(),
    }))
}

/// The number at the end of a directory's name.
fn step(dir: &Path) -> Option<u64> {
    let name = dir.file_name()?.to_string_lossy(); // the digits stay what they are
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn the_step_is_the_number_at_the_end_of_the_name() {
        assert_eq!(step(Path::new("/a/step-00001000")), Some(1000));
        assert_eq!(step(Path::new("run7/latest")), None);
        assert_eq!(step(Path::new("größe42")), Some(42));
        let latin_1 = Path::new(OsStr::from_bytes(b"gr\xf6\xdfe42"));
        assert_eq!(step(latin_1), Some(42));
    }
}
