//! Who may use a file, compared before a save takes over an old one.

use crate::sys::file;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Who may read and write a file. An old file may come from another umask, directory or user, and its readers need
/// not be allowed to read the next checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::store) struct Access {
    owner: (u32, u32),
    mode: u32,
    acl: Option<Vec<u8>>,
}

impl Access {
    /// That of an open file.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File) -> io::Result<Self> {
        let found = file::look(file)?;
        let (owner, mode) = ((found.uid(), found.gid()), found.mode());
        Ok(Self { owner, mode, acl: file::acl(file)? })
    }
}
