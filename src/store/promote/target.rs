//! Where a checkpoint is copied to: an object store, or a directory.

use crate::error::Result;
use crate::pipeline::blocks::Checked;
use crate::sys::lock::DirLock;
use std::io;
use std::path::Path;

/// A file that is sent in parts. Nobody sees it before it is finished; one that is begun and never finished must be aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Upload {
    /// The file's name.
    pub name: String,
    /// What tells this upload from others of the name.
    pub id: String,
}

/// Where a checkpoint is copied to. A file is there whole, or not at all.
pub(super) trait Target: Sync {
    /// The URL, or the directory.
    fn place(&self) -> &Path;

    /// Makes the place. What it returns keeps saves and clean-ups away from there, but no other promotion.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) if one is in progress there; what the store or the system says.
    fn hold(&self) -> Result<Option<DirLock>>;

    /// The manifest that is there; `None` if there is none.
    ///
    /// # Errors
    /// What the store or the system says.
    fn manifest(&self) -> Result<Option<Vec<u8>>>;

    /// Commits: makes a manifest visible. With `replaces` in place of the one that is there.
    ///
    /// # Errors
    /// Of [`io::ErrorKind::AlreadyExists`] if there is one, which is not to be replaced.
    fn commit(&self, manifest: Vec<u8>, replaces: bool) -> Result<()>;

    /// Makes the commit durable, and gives these files, which it has made visible, their final names.
    ///
    /// # Errors
    /// What the system says of the commit.
    fn settle(&self, names: &[String]) -> Result<()>;

    /// Which of these files, each with its bytes, are not there whole: their places in the list.
    ///
    /// # Errors
    /// What the store or the system says.
    fn missing(&self, files: &[(&str, u64)]) -> io::Result<Vec<usize>>;

    /// Removes a file; one that is not there is no error.
    ///
    /// # Errors
    /// What the store or the system says.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Sends a file at once. One of that name is replaced.
    ///
    /// # Errors
    /// What the store or the system says.
    fn send(&self, name: &str, blocks: Vec<Checked>) -> io::Result<()>;

    /// Begins to send a file of so many bytes in parts.
    ///
    /// # Errors
    /// What the store or the system says.
    fn begin(&self, name: &str, bytes: u64) -> io::Result<Upload>;

    /// Sends the part of this number, from 0, which begins at an offset. Returns what [`Target::finish`] needs of it.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such upload; what the store or the system says otherwise.
    fn put_part(
        &self,
        upload: &Upload,
        at: (usize, u64),
        blocks: Vec<Checked>,
    ) -> io::Result<String>;

    /// Whether a part that was sent with this answer, perhaps by an earlier process, is still there.
    fn keeps(&self, answer: &str) -> bool;

    /// Makes the parts a file of so many bytes, durably.
    ///
    /// # Errors
    /// As for [`Target::put_part`].
    fn finish(&self, upload: &Upload, bytes: u64, parts: Vec<String>) -> io::Result<()>;

    /// Frees what an upload has sent. One that is not known is no error.
    ///
    /// # Errors
    /// What the store or the system says.
    fn abort(&self, upload: &Upload) -> io::Result<()>;
}
