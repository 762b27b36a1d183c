//! Where a call finds a file.

use rustix::fs::CWD;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// Where a call finds a file: by its path or, in an open directory (`Dir::at`).
#[derive(Debug, Clone, Copy)]
pub struct At<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    /// As the system gets it.
    pub(crate) name: &'a Path,
    /// For messages and the [seam](crate::sys::seam).
    pub(crate) path: &'a Path,
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for At<'a> {
    fn from(path: &'a P) -> Self {
        let path = path.as_ref();
        Self { dir: CWD, name: path, path }
    }
}
