//! Takes over the files of an earlier checkpoint whose tensors have not changed.
//!
//! Files are linked before their tensors are compared. From then on they have a name that no other process removes. The
//! links of files that have changed are removed again. The base's manifest must be the same after the links as before:
//! then the names were those of its own files.
//!
//! Nobody writes to a file with two names. A save writes to new files, and to recycled ones only if they have one name:
//! see [`recycled`](crate::store::layout::recycled).

use crate::engine::fallback::{Fallback, FallbackKind};
use crate::error::Result;
use crate::format::{FileEntry, names};
use crate::pipeline::fallbacks::warn_once_of;
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::trace::What;
use crate::plan::unchanged::{LinkedFile, Unchanged};
use crate::state::Contents;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::write::base::{self, Earlier, candidates, earlier};
use crate::store::write::compare::compare;
use crate::store::write::link::{Destination, link, make_durable};
use crate::sys::dir;
use crate::units::size;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// What a save takes over from its base.
#[derive(Debug, Default)]
pub(in crate::store) struct Reuse {
    pub unchanged: Unchanged,
    /// The linked files: where they are, and their entries in the new manifest.
    pub files: Vec<(PathBuf, FileEntry)>,
    /// Bytes of the tensors that have not changed, linked or not.
    pub unchanged_bytes: u64,
    /// How long opening, linking and comparing took.
    pub seconds: f64,
    /// Why files were not linked although their tensors have not changed.
    pub fallbacks: Vec<Fallback>,
}

impl Reuse {
    /// Adds what was taken over to the report of what was written.
    pub fn add_to(self, report: &mut SaveReport) {
        report.linked_bytes = self.files.iter().map(|(_, entry)| entry.bytes).sum();
        report.file_bytes += report.linked_bytes;
        report.files += self.files.len();
        report.unchanged_bytes = self.unchanged_bytes;
        report.seconds.compare = self.seconds;
        report.moved.fallbacks.extend(self.fallbacks);
    }
}

impl Contents<'_> {
    /// Links the files of the state's base whose tensors have not changed. Calls `note` with each path once its
    /// link is there.
    ///
    /// # Errors
    /// Those of [`base::open`]; a source's or a GPU's; [`Error::Io`](crate::Error::Io) if a link cannot be removed or made
    /// durable.
    pub(in crate::store) fn reuse(
        &self,
        runtime: &Runtime,
        to: &Destination<'_>,
        note: impl FnMut(&Path),
        job: &Arc<Job>,
    ) -> Result<Reuse> {
        let Some(wanted) = self.base else { return Ok(Reuse::default()) };
        let started = Instant::now();
        let mut reuse = match base::open(runtime, wanted, to.stripes.own())? {
            (None, why) => Reuse { fallbacks: why.into_iter().collect(), ..Reuse::default() },
            (Some(base), _) => self.take_over(runtime, &base, (to, wanted.links()), note, job)?,
        };
        for fallback in &reuse.fallbacks {
            warn_once_of(to.stripes.own(), &fallback.wanted, fallback);
        }
        reuse.seconds = started.elapsed().as_secs_f64();
        job.note(What::Compare, started, None, reuse.unchanged_bytes);
        Ok(reuse)
    }

    fn take_over(
        &self,
        runtime: &Runtime,
        base: &Checkpoint,
        (to, links): (&Destination<'_>, bool),
        note: impl FnMut(&Path),
        job: &Arc<Job>,
    ) -> Result<Reuse> {
        let (files, earlier) = (&base.manifest.files, earlier(self.items, base));
        let candidates = match links {
            true => candidates(self, &earlier, base, runtime.config().shard_bytes)?,
            false => Vec::new(),
        };
        let mut linked = link(base, &candidates, to, note)?;
        if let Err(error) = base.check_unchanged(true) {
            for at in &mut linked {
                if let Ok(path) = std::mem::replace(at, Err(error.to_string())) {
                    dir::remove(&path)?;
                }
            }
        }
        let of = (&**files, base.manifest.block_bytes);
        let is_same = compare(runtime, self.sources, &earlier, of, (to.stripes.own(), job))?;
        let mut reuse = Reuse { unchanged_bytes: bytes_of(&earlier, &is_same), ..Reuse::default() };
        let mut refused = BTreeMap::new();
        for (number, (candidate, at)) in candidates.into_iter().zip(linked).enumerate() {
            let entry = &files[candidate.file];
            match (at, candidate.items.iter().all(|item| is_same[*item])) {
                (Ok(path), true) => {
                    make_durable(&path)?;
                    let name = names::shard(to.rank, number, to.generation);
                    reuse.files.push((path, FileEntry { name, ..entry.clone() }));
                    let begin = |item: usize| earlier[item].map_or(0, |chunk| chunk.begin);
                    let items = candidate.items.iter().map(|&item| (item, begin(item))).collect();
                    reuse.unchanged.linked.push(LinkedFile { number, items });
                }
                (Ok(path), false) => dir::remove(&path)?,
                (Err(why), true) => *refused.entry(why).or_default() += entry.bytes,
                (Err(_), false) => {}
            }
        }
        reuse.unchanged.items = is_same;
        reuse.fallbacks = refused.into_iter().map(|why| not_linked(base.path(), why)).collect();
        Ok(reuse)
    }
}

/// Bytes of the items that have not changed.
fn bytes_of(earlier: &[Option<Earlier>], is_same: &[bool]) -> u64 {
    let same = earlier.iter().zip(is_same).filter(|(_, is_same)| **is_same);
    same.filter_map(|(chunk, _)| Some(chunk.as_ref()?.nbytes)).sum()
}

/// The fallback for files of so many bytes that could not be linked.
fn not_linked(base: &Path, (why, bytes): (String, u64)) -> Fallback {
    Fallback {
        kind: FallbackKind::Base,
        wanted: "links to the unchanged files of the base".into(),
        got: format!("new files, {} of them", size(bytes)),
        reason: format!("those of {} cannot be linked: {why}", base.display()),
        remedy:
            "keep base and checkpoint on one file system that has hard links, and save as one user"
                .into(),
    }
}
