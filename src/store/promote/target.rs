//! Where a checkpoint is copied to: an object store, or a directory.

use crate::error::Result;
use crate::object::Version;
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

/// Waits until so many bytes may be sent.
pub(super) type Paced<'a> = &'a dyn Fn(u64);

/// A manifest as it was seen.
#[derive(Debug)]
pub(super) struct Seen {
    pub manifest: Vec<u8>,
    /// The store's name for this content; nothing in a directory.
    #[cfg_attr(not(feature = "object-store"), expect(dead_code))]
    pub version: Version,
}

/// Where a checkpoint is copied to. A file is there whole, or not at all.
///
/// A new kind of place needs the methods without a body: its manifest, its files, and uploads in parts. The others are for
/// places that lock, know their free space, or have a faster way.
pub(super) trait Target: Sync {
    /// The URL, or the directory.
    fn place(&self) -> &Path;

    /// The manifest that is there; `None` if there is none.
    ///
    /// # Errors
    /// What the store or the system says.
    fn manifest(&self) -> Result<Option<Seen>>;

    /// Commits: makes a manifest visible, in place of the one that was seen there, or of none. Of several promotions that
    /// have seen the same, one does.
    ///
    /// # Errors
    /// Of [`io::ErrorKind::AlreadyExists`] if another one is there by now, or none in place of the one that was seen.
    fn commit(&self, manifest: Vec<u8>, seen: Option<&Seen>) -> Result<()>;

    /// Which of these files, each with its bytes, are not there whole: their places in the list.
    ///
    /// # Errors
    /// What the store or the system says.
    fn missing(&self, files: &[(&str, u64)]) -> io::Result<Vec<usize>>;

    /// The names of the shards that are there whole, committed or not.
    ///
    /// # Errors
    /// What the store or the system says.
    fn shards(&self) -> io::Result<Vec<String>>;

    /// Removes a file; one that is not there is no error.
    ///
    /// # Errors
    /// What the store or the system says.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Begins to send a file of so many bytes in parts.
    ///
    /// # Errors
    /// What the store or the system says.
    fn begin(&self, name: &str, bytes: u64) -> io::Result<Upload>;

    /// Sends the part of this number, from 0, which begins at an offset, each piece when it may be sent. Returns what
    /// [`Target::finish`] needs of it.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such upload; what the store or the system says otherwise.
    fn put_part(
        &self,
        upload: &Upload,
        at: (usize, u64),
        blocks: Vec<Checked>,
        paced: Paced,
    ) -> io::Result<String>;

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

    /// Makes the place. What it returns keeps saves and clean-ups away from there, but no other promotion; a store has no
    /// locks.
    ///
    /// # Errors
    /// [`Error::Busy`](crate::Error::Busy) if one is in progress there; what the store or the system says.
    fn hold(&self) -> Result<Option<DirLock>> {
        Ok(None)
    }

    /// Makes the commit durable, and gives these files, which it has made visible, their final names. A store answers once
    /// that is so.
    ///
    /// # Errors
    /// What the system says of the commit.
    fn settle(&self, _names: &[String]) -> Result<()> {
        Ok(())
    }

    /// Bytes that are free there; `None` if that cannot be known.
    fn free(&self) -> Option<u64> {
        None
    }

    /// Bytes of those that an upload has taken already.
    fn taken(&self, _upload: &Upload) -> u64 {
        0
    }

    /// Whether a part that was sent with this answer, perhaps by an earlier process, is still there.
    fn keeps(&self, _answer: &str) -> bool {
        true
    }

    /// Sends a file at once, each piece when it may be sent. One of that name is replaced.
    ///
    /// # Errors
    /// What the store or the system says.
    fn send(&self, name: &str, blocks: Vec<Checked>, paced: Paced) -> io::Result<()> {
        let bytes = bytes_of(&blocks);
        let upload = self.begin(name, bytes)?;
        let sent = self.put_part(&upload, (0, 0), blocks, paced);
        let finished = sent.and_then(|part| self.finish(&upload, bytes, vec![part]));
        if finished.is_err() {
            let _gone = self.abort(&upload);
        }
        finished
    }
}

/// The bytes of blocks.
pub(super) fn bytes_of(blocks: &[Checked]) -> u64 {
    blocks.iter().map(|block| block.as_ref().len() as u64).sum()
}
