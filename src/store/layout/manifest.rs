//! The manifest file of a directory. Most directories that the store looks into have none, so its absence is
//! an answer here, not an error; [`diagnose`](crate::store::read::diagnose) finds out why there is none.

use crate::error::{Error, Result};
use crate::format::manifest::Listed;
use crate::format::{Manifest, names};
use crate::sys::dir::{has, look};
use crate::sys::file;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use std::io;
use std::path::Path;

/// Reads the bytes of the manifest in `dir`; `None` if there is no manifest.
///
/// # Errors
/// [`Error::Io`], also if `dir` itself is missing or is not a directory; [`Error::Format`] for a link.
pub(in crate::store) fn read_bytes(dir: &Path) -> Result<Option<Vec<u8>>> {
    crate::sys::path::refuse_empty(dir)?;
    let path = dir.join(names::MANIFEST);
    match file::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            check_directory(dir).map(|()| None)
        }
        Err(e) if file::is_link(&e) => {
            check_directory(dir)?; // the path to it may be a circle of links
            Err(Error::format(path, "is a symbolic link, which is refused"))
        }
        Err(e) if e.kind() == io::ErrorKind::FileTooLarge => {
            Err(Error::format(path, e.to_string()))
        }
        Err(e) => Err(Error::io("reading", path, e)),
    }
}

/// Reads and checks the manifest in `dir`; `None` if there is no manifest.
///
/// # Errors
/// Those of [`read_bytes`] and [`Manifest::decode`].
pub(in crate::store) fn read(dir: &Path) -> Result<Option<Manifest>> {
    let bytes = read_bytes(dir)?;
    bytes.map(|bytes| Manifest::decode(bytes, &dir.join(names::MANIFEST))).transpose()
}

/// Reads only which files the manifest in `dir` lists; `None` if there is no manifest.
///
/// # Errors
/// Those of [`read_bytes`] and [`Manifest::decode_files`].
pub(in crate::store) fn read_files(dir: &Path) -> Result<Option<Listed>> {
    let bytes = read_bytes(dir)?;
    bytes.map(|bytes| Manifest::decode_files(bytes, &dir.join(names::MANIFEST))).transpose()
}

/// Which files the manifest in `dir` listed before a removal renamed it. `None` if there is no such manifest,
/// `Some(None)` if it cannot be read.
pub(in crate::store) fn read_half_removed(dir: &Path) -> Option<Option<Listed>> {
    let path = dir.join(names::REMOVAL_MARK);
    let read = || Manifest::decode_files(file::read(&path).ok()?, &path).ok();
    has(&path).then(read)
}

/// Refuses a directory whose manifest, which cannot be read as one of ringstow's, is another program's: JSON without the
/// marks of ringstow's. What is no JSON is a damaged one of ringstow's.
///
/// # Errors
/// [`Error::Invalid`].
pub(in crate::store) fn refuse_foreign(dir: &Path) -> Result<()> {
    let bytes = read_bytes(dir).ok().flatten().unwrap_or_default();
    if !is_foreign(&bytes) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} is another program's, and a save would replace it; save to another directory, or remove the file",
        dir.join(names::MANIFEST).display()
    )))
}

fn is_foreign(bytes: &[u8]) -> bool {
    /// The first field and the last one of ringstow's manifests: a flipped bit damages one of them at most.
    #[derive(Deserialize)]
    struct Marks<'a> {
        #[serde(borrow)]
        format: Option<&'a RawValue>,
        crc32: Option<IgnoredAny>,
    }
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return serde_json::from_slice::<IgnoredAny>(bytes).is_ok();
    }
    let is_unmarked = |marks: Marks<'_>| {
        marks.crc32.is_none() && marks.format.is_none_or(|it| it.get() != r#""ringstow""#)
    };
    serde_json::from_slice(bytes).is_ok_and(is_unmarked)
}

/// Checks that `dir` is a directory.
///
/// # Errors
/// [`Error::Io`] naming `dir`; [`Error::Invalid`] for a URL.
pub(in crate::store) fn check_directory(dir: &Path) -> Result<()> {
    let error = match look(dir) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => io::Error::from_raw_os_error(nix::libc::ENOTDIR),
        Err(error) => {
            crate::sys::path::check(dir)?; // a path that exists may have any name
            error
        }
    };
    Err(Error::io("opening", dir, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_without_ringstows_marks_is_another_programs_and_what_is_cut_or_flipped_is_not() {
        for theirs in [
            r#"{"name": "my web app"}"#,
            "{}",
            "[]",
            "[1,2]",
            "7",
            "\n{\"format\":7}",
            r#"{"format":"x"}"#,
        ] {
            assert!(is_foreign(theirs.as_bytes()), "{theirs}");
        }
        let tree = RawValue::from_string("{}".into()).unwrap();
        let ours: Manifest = Manifest::new(0, 1, 4096, Vec::new(), Vec::new(), tree);
        let ours = ours.encode().unwrap();
        for damaged in [&b""[..], b"\0\0\0\0", b"rubbish", b"{\"format\":\"ringstow\"}"] {
            assert!(!is_foreign(damaged));
        }
        for at in 0..ours.len() {
            assert!(!is_foreign(&ours[..at]), "cut at {at}");
            for bit in 0..8 {
                let mut flipped = ours.clone();
                flipped[at] ^= 1 << bit;
                assert!(!is_foreign(&flipped), "bit {bit} of byte {at}");
            }
        }
    }
}
