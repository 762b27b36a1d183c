//! Drops a part of a committed checkpoint, such as the optimizer's state, and frees its disk space.
//!
//! The tensors of that part must lie in files of their own. A new manifest, which no longer lists them, takes the place of
//! the old one by a rename; then the files go. If the process is killed in between, the next save into the directory or
//! `prune` removes them. A load that has opened them ends well.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::store::catalog::found::Found;
use crate::store::catalog::links::Links;
use crate::store::cleanup::look::Look;
use crate::store::layout::rank_dirs;
use crate::store::layout::stripes::Stripes;
use crate::store::read::checkpoint::{Checkpoint, OpenOptions};
use crate::store::write::rollback::Rollback;
use crate::store::write::swept::Left;
use crate::store::write::transaction::Transaction;
use crate::sys::open_dir::{Dir, refuse_link};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What [`Store::slim`](crate::Store::slim) did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Slimmed {
    /// The checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Names that were dropped; without those that an earlier call had dropped.
    pub names: Vec<String>,
    /// Tensors, arrays and objects that were dropped.
    pub tensors: usize,
    /// Bytes of the files that held nothing else.
    pub file_bytes: u64,
    /// What was removed.
    #[serde(with = "crate::path_text::list")]
    pub removed: Vec<PathBuf>,
    /// Files that could not be removed, and why.
    pub left: Vec<Left>,
}

/// See [`Store::slim`](crate::Store::slim).
pub fn slim(dir: &Path, drop: &[String], config: &Config) -> Result<Slimmed> {
    refuse_link(dir)?;
    if let Some(empty) = drop.iter().find(|name| name.is_empty() || name.ends_with('.')) {
        return Err(Error::invalid(format!(
            "{empty:?} is no name to drop: a name and all below it is dropped, as in \"optimizer\""
        )));
    }
    whole(dir, config)?; // so that the lock creates no directory
    let held = Rollback::of_existing(&Dir::open_real(dir)?)?;
    let transaction = Transaction::begin_change(held, Stripes::to_clear(dir, &config.stripe)?)?;
    let checkpoint = whole(dir, config)?;
    let mut slimmer = checkpoint.manifest().clone();
    let dropped = slimmer.slim(drop)?;
    let swept = match dropped.names.is_empty() {
        true => transaction.clear_but(&slimmer.files), // what a killed call left
        false => {
            let is_unchanged = || checkpoint.check_unchanged(false);
            transaction.commit_change(&slimmer, &dropped.files, is_unchanged)?
        }
    };
    Ok(Slimmed {
        path: dir.into(),
        names: dropped.names,
        tensors: dropped.tensors,
        file_bytes: dropped.files.iter().map(|file| file.bytes).sum(),
        removed: swept.removed,
        left: swept.left,
    })
}

/// The steps of a run that a trainer does not resume from soon, oldest first: all that can be loaded, except the newest
/// `after`, and the last `after` that were saved. They differ after the run went back to an earlier step. What a link
/// leads to is not among them: something may rely on it.
///
/// # Errors
/// As for [`steps`](crate::steps).
pub fn older_steps<'a>(look: &'a Look, after: usize, config: &Config) -> Result<Vec<&'a Found>> {
    let mut found = look.committed(config)?;
    if found.is_empty() {
        return Ok(found);
    }
    let links = Links::of(&look.dir)?;
    let mut last_saves: Vec<usize> = (0..found.len()).collect();
    last_saves.sort_by_key(|&number| found[number].order.age); // a stable sort
    last_saves.drain(..found.len().saturating_sub(after));
    let newest = found.len().saturating_sub(after);
    let mut numbers = 0..;
    found.retain(|step| {
        let number = numbers.next().expect("numbers have no end");
        number < newest && !last_saves.contains(&number) && links.to(&step.path).is_none()
    });
    Ok(found)
}

/// Opens a checkpoint of which all files are there.
///
/// # Errors
/// As for [`Checkpoint::open`]; [`Error::Unsupported`] if several ranks saved it each by itself, or it is the share of one
/// of them.
fn whole(dir: &Path, config: &Config) -> Result<Checkpoint> {
    let shares = || Error::Unsupported {
        what: format!("slimming {}, which several ranks saved each by itself", dir.display()),
        remedy: "remove the older checkpoints instead".into(),
    };
    if !rank_dirs::parts(dir)?.is_empty() {
        return Err(shares());
    }
    let checkpoint = OpenOptions::of(config).open(dir)?;
    if checkpoint.manifest().part_of.is_some() { Err(shares()) } else { Ok(checkpoint) }
}
