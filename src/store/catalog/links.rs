//! Symbolic links among checkpoints.

use crate::error::Result;
use crate::sys::dir;
use std::path::{Path, PathBuf};

/// Whether a path is a link, and where it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Link {
    /// Not a link.
    None,
    /// To something in the same directory: a second name for it.
    Inside,
    /// To something elsewhere, or to nothing.
    Outside,
}

impl Link {
    pub fn of(path: &Path) -> Self {
        if !dir::is_link(path) {
            return Self::None;
        }
        let to = dir::real(path);
        let above = path
            .parent()
            .map(|above| if above.as_os_str().is_empty() { Path::new(".") } else { above });
        match (to, above.map(dir::real)) {
            (Ok(to), Some(Ok(above))) if to.starts_with(&above) => Self::Inside,
            _ => Self::Outside,
        }
    }
}

/// The links in a directory and where they lead.
#[derive(Debug, Default)]
pub(in crate::store) struct Links(Vec<(PathBuf, PathBuf)>);

impl Links {
    /// Finds the links in `dir` that are not broken.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be listed.
    pub fn of(dir: &Path) -> Result<Self> {
        let mut links = Vec::new();
        for entry in dir::entries(dir)? {
            let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
            if is_link && let Ok(to) = dir::real(&entry.path()) {
                links.push((entry.path(), to));
            }
        }
        links.sort();
        Ok(Self(links))
    }

    /// A link to `checkpoint` or to something in it.
    pub fn to(&self, checkpoint: &Path) -> Option<&Path> {
        if self.0.is_empty() {
            return None;
        }
        let checkpoint = dir::real(checkpoint).ok()?;
        let found = self.0.iter().find(|(_, to)| to.starts_with(&checkpoint))?;
        Some(&found.0)
    }
}
