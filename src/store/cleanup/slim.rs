//! Drops a part of a committed checkpoint, such as the optimizer's state, and frees its disk space.
//!
//! The tensors of that part must lie in files of their own. A new manifest, which no longer lists them, takes the place of
//! the old one by a rename; then the files go. If the process is killed in between, the next save into the directory or
//! `prune` removes them. A load that has opened them ends well.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{Manifest, names};
use crate::store::cleanup::remove;
use crate::store::layout::{manifest, rank_dirs};
use crate::store::read::diagnose;
use crate::store::read::fingerprint::Fingerprint;
use crate::store::write::swept::Left;
use crate::store::write::transaction::Transaction;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What [`slim`](crate::slim()) did.
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

/// See [`slim`](crate::slim()).
pub fn slim(dir: &Path, drop: &[String], config: &Config) -> Result<Slimmed> {
    remove::refuse_link(dir)?;
    if !rank_dirs::parts(dir)?.is_empty() {
        return Err(Error::Unsupported {
            what: format!("slimming {}, which several ranks saved each by itself", dir.display()),
            remedy: "remove it, or save by a session (in DCP: with collectives) to slim later"
                .into(),
        });
    }
    if let Some(empty) = drop.iter().find(|name| name.is_empty() || name.ends_with('.')) {
        return Err(Error::invalid(format!(
            "{empty:?} is no name to drop: a name and all below it is dropped, as in \"optimizer\""
        )));
    }
    read(dir)?; // so that the lock creates no directory
    let stripes = remove::found(dir, &config.stripe)?;
    let transaction = Transaction::begin_change(dir, stripes)?;
    let (mut slimmer, fingerprint) = read(dir)?;
    let dropped = slimmer.slim(drop)?;
    let mut done = Slimmed {
        path: dir.into(),
        names: dropped.names,
        tensors: dropped.tensors,
        file_bytes: dropped.files.iter().map(|file| file.bytes).sum(),
        removed: Vec::new(),
        left: Vec::new(),
    };
    if !done.names.is_empty() {
        let is_unchanged = || fingerprint.check(dir, false);
        let swept = transaction.commit_change(&slimmer, is_unchanged)?;
        (done.removed, done.left) = (swept.removed, swept.left);
    }
    Ok(done)
}

/// Reads the manifest, and its fingerprint.
fn read(dir: &Path) -> Result<(Manifest, Fingerprint)> {
    let bytes = manifest::read_bytes(dir)?.ok_or_else(|| diagnose::no_manifest(dir))?;
    let fingerprint = Fingerprint::of(&bytes);
    let manifest = Manifest::decode(bytes, &dir.join(names::MANIFEST))?;
    Ok((manifest, fingerprint.expect("a manifest that was read has a trailer")))
}
