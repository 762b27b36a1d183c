//! Moves a stream of bytes to or from one file, for callers that know neither its length nor its parts before.
//!
//! The caller's thread copies and checksums, the I/O thread moves full buffers meanwhile.

mod buffers;
pub(crate) mod read;
pub(crate) mod write;

use super::open::Opened;
use super::report::Moved;
use super::transfers::{OpenFile, OpenFiles};
use std::path::Path;
use std::sync::Arc;

/// The number of a stream's only file among its open files.
const FILE: usize = 0;

/// A stream's open file. Errors name `shown` instead of the path that it has now.
fn only(mut files: Vec<Option<OpenFile>>, shown: &Path) -> Vec<Option<OpenFile>> {
    debug_assert_eq!(files.len(), 1);
    files.iter_mut().flatten().for_each(|open| open.path = Arc::from(shown));
    files
}

/// Files opened without a note.
fn plainly(file: OpenFile) -> Opened {
    (vec![file], Vec::new())
}

/// Adds to `moved` what the engine could not get.
fn update(moved: &mut Moved, path: &Path, files: &OpenFiles) {
    super::open::update(moved, path.parent().unwrap_or(path), &files.queues());
}
