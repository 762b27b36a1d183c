//! Which earlier checkpoint a save may take files from.

use std::path::{Path, PathBuf};

/// An earlier checkpoint, the base of a save. Its files whose tensors have not changed are linked into the new checkpoint
/// instead of being written again. See [`StateDict::base`](crate::StateDict::base).
///
/// A save with a base stores a hash of each tensor. So the base of a first save is [`Base::none`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Base {
    path: Option<PathBuf>,
    is_optional: bool,
    rewrites: bool,
}

impl Base {
    /// No base yet: the save writes all, and hashes it for the next one.
    pub fn none() -> Self {
        Self::default()
    }

    /// The checkpoint at a path. The save fails if there is none, unless the save itself goes to this path.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), ..Self::default() }
    }

    /// Writes all files of the checkpoint if the base cannot be opened, and reports why.
    pub fn or_none(self) -> Self {
        Self { is_optional: true, ..self }
    }

    /// Links nothing, so that the new checkpoint shares no file with another one. Tensors that have not changed still get
    /// files of their own, which the next save can link.
    pub fn rewritten(self) -> Self {
        Self { rewrites: true, ..self }
    }

    /// Where the base is.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    pub(crate) fn is_optional(&self) -> bool {
        self.is_optional
    }

    pub(crate) fn links(&self) -> bool {
        !self.rewrites
    }
}
