//! Whether a checkpoint that was listed has been removed since.

use crate::format::{Stem, StepName, names};
use crate::object::{Bucket, is_url};
use crate::store::catalog::found::{Found, Status};
use crate::store::layout::rank_dirs;
use crate::store::read::object::read_manifest;
use crate::sys::{dir, lock, removal_note};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Whether a checkpoint that was there is gone, or its removal has begun: another process may have saved a newer one
/// meanwhile, and a look that met this must look again. False if the system does not say.
pub fn has_gone(path: &Path) -> bool {
    if is_url(path) {
        return Bucket::at(path).is_ok_and(|bucket| matches!(read_manifest(&bucket), Ok(None)));
    }
    let parts = rank_dirs::dirs(path).unwrap_or_default();
    parts.iter().any(|part| is_going(part)) || is_going(path)
}

/// Whether a removal has begun in a directory. Checks in the order in which a removal proceeds, since it may go on
/// meanwhile. A removal empties a step's directory before it removes it, and not every
/// file system can keep the note that says so.
fn is_going(path: &Path) -> bool {
    let may_be_step = || name_of(path).is_some() && lock::is_empty(path);
    dir::has(&path.join(names::REMOVAL_MARK))
        || removal_note::is_left_empty(path)
        || may_be_step()
        || dir::is_gone(path)
}

/// Whether a listing may lack the newest checkpoint: one that went while the listing was read may be newer than all in
/// it, and the one that replaced it may not have been there yet.
pub(in crate::store) fn may_lack_newest(all: &[Found], gone: &[PathBuf]) -> bool {
    let mut newest: BTreeMap<Stem, u64> = BTreeMap::new();
    let committed = all.iter().filter(|found| found.status == Status::Committed);
    for name in committed.filter_map(|found| name_of(&found.path)) {
        let step = newest.entry(name.stem).or_default();
        *step = name.step.max(*step);
    }
    let is_older = |gone: StepName| newest.get(&gone.stem).is_some_and(|step| gone.step < *step);
    gone.iter().any(|path| !name_of(path).is_some_and(is_older))
}

fn name_of(path: &Path) -> Option<StepName> {
    StepName::of(path.file_name()?.as_bytes()).ok()
}
