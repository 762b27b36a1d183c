//! Where a stream's file is, once links to it are followed.

use crate::error::{Error, Result};
use crate::sys::{dir, path};
use nix::libc;
use std::io;
use std::path::{Path, PathBuf};

/// The absolute path of the file that is to be written. A link stays, and the file that it leads to is replaced.
///
/// # Errors
/// [`Error::Invalid`] for a URL, or a link that leads nowhere; [`Error::Io`] for a directory, or anything else that is
/// not a file; if a file is there and `overwrite` is false; if the directory is missing.
pub(super) fn to_write(given: &Path, overwrite: bool) -> Result<PathBuf> {
    let path = path::absolute(given)?;
    let refused = |errno| Error::io("opening", given, io::Error::from_raw_os_error(errno));
    match dir::look(&path) {
        _ if !overwrite && dir::has(&path) => {
            Err(refused(libc::EEXIST).hinted("remove it, or write with overwrite (the default)"))
        }
        Ok(found) if found.is_dir() => Err(refused(libc::EISDIR)),
        Ok(found) if !found.is_file() => Err(Error::invalid(format!(
            "{} is a device, FIFO or socket: a stream replaces a file as a whole; open it as any other program does",
            given.display()
        ))),
        Ok(_) => dir::real(&path),
        Err(_) if dir::is_link(&path) => Err(Error::invalid(format!(
            "{} is a link that leads nowhere: remove it, or create the directory that it leads to and an empty file \
             in it",
            given.display()
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => in_directory(given, &path),
        Err(error) => Err(Error::io("opening", given, error)),
    }
}

/// A new file's path, in the directory that its own leads to.
fn in_directory(given: &Path, path: &Path) -> Result<PathBuf> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid(format!("{} names no file", given.display())));
    };
    let ends_in_slash = given.as_os_str().as_encoded_bytes().ends_with(b"/");
    if ends_in_slash {
        return Err(Error::invalid(format!("{} names a directory, not a file", given.display())));
    }
    Ok(dir::real(parent)?.join(name))
}

/// The absolute path of the file that is to be read.
///
/// # Errors
/// [`Error::Invalid`] for a URL; [`Error::Io`] if it is missing.
pub(super) fn to_read(given: &Path) -> Result<PathBuf> {
    let path = path::absolute(given)?;
    match dir::look(&path) {
        Ok(found) if found.is_dir() => {
            Err(Error::io("opening", given, io::Error::from_raw_os_error(libc::EISDIR)))
        }
        Ok(_) => dir::real(&path),
        Err(error) => Err(Error::io("opening", given, error)),
    }
}
