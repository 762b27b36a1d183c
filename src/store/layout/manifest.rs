//! The manifest file of a directory. Most directories that the store looks into have none, so its absence is
//! an answer here, not an error; [`diagnose`](crate::store::read::diagnose) finds out why there is none.

use crate::error::{Error, Result};
use crate::format::manifest::{self, Listed};
use crate::format::{Manifest, names, whole_text};
use crate::store::layout::summary;
use crate::sys::dir::{file_names, has, look};
use crate::sys::file;
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

/// [`read_files`] without their checksums. Reads only a manifest that this process has not read before.
///
/// # Errors
/// Those of [`read_files`].
pub(in crate::store) fn read_names(dir: &Path) -> Result<Option<Listed>> {
    match summary::read_before(dir) {
        Some(known) => Ok(Some(known.manifest.clone())),
        None => read_files(dir),
    }
}

/// Whether `dir` holds a committed checkpoint, or one rank's share of one. Reads the manifest: another program's file, or
/// anything but a file, may have its name.
pub(in crate::store) fn is_committed(dir: &Path) -> bool {
    matches!(read_files(dir), Ok(Some(_)))
}

/// Which files the manifest in `dir` listed before a removal renamed it. `None` if there is no such manifest,
/// `Some(None)` if it cannot be read.
pub(in crate::store) fn read_half_removed(dir: &Path) -> Option<Option<Listed>> {
    if let Some(known) = summary::read_as(dir, names::REMOVAL_MARK) {
        return Some(Some(known.manifest.clone()));
    }
    let path = dir.join(names::REMOVAL_MARK);
    let read = || Manifest::decode_files(file::read(&path).ok()?, &path).ok();
    has(&path).then(read)
}

/// Refuses a directory whose manifest, which cannot be read as one of ringstow's, is not ringstow's: a symbolic link, or
/// another program's whole text without the marks of ringstow's. Anything else is a damaged one of ringstow's.
///
/// # Errors
/// [`Error::Invalid`]; [`Error::Io`] if the system does not say.
pub(in crate::store) fn refuse_foreign(dir: &Path) -> Result<()> {
    let path = dir.join(names::MANIFEST);
    if crate::sys::dir::is_link(&path) {
        return Err(Error::invalid(format!(
            "{} is a symbolic link, which a save neither follows nor replaces: put the file that it leads to in its \
             place, remove the link, or save to another directory",
            path.display()
        )));
    }
    let bytes = match read_bytes(dir) {
        Err(error) if error.is_damage() => None,
        bytes => bytes?,
    };
    if !bytes.is_some_and(|bytes| is_foreign(&bytes)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} is another program's, and a save would replace it; save to another directory, or remove the file",
        path.display()
    )))
}

/// Whether all in `dir` that looks like a checkpoint is a manifest of another program's. Beside a shard of ringstow's, a
/// manifest that is not ringstow's is damage: somebody overwrote it.
pub(in crate::store) fn is_another_programs(dir: &Path) -> bool {
    let is_ours = |name: &String| name != names::MANIFEST && names::is_trace(name);
    let foreign = || read_bytes(dir).is_ok_and(|bytes| bytes.is_some_and(|b| is_foreign(&b)));
    file_names(dir).is_ok_and(|present| !present.iter().any(is_ours)) && foreign()
}

fn is_foreign(bytes: &[u8]) -> bool {
    whole_text(bytes).is_some_and(|text| !manifest::is_marked(text))
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
    use serde_json::value::RawValue;

    #[test]
    fn text_without_ringstows_marks_is_another_programs_and_what_is_cut_or_flipped_is_not() {
        for theirs in [
            r#"{"name": "my web app"}"#,
            "{}",
            "[]",
            "[1,2]",
            "\n{\"format\":7}",
            r#"{"format":"x"}"#,
            // What other programs write and read although it is no JSON by the book.
            r#"{"best": Infinity, "loss": NaN}"#,
            "\u{feff}{\"name\": \"app\"}\r\n",
            "// of the browser\n{\"name\": \"app\",}",
            r#"{"format": 1, "format": 2}"#,
            r#"{"crc32": "01234567", "name": "app"}"#,
        ] {
            assert!(is_foreign(theirs.as_bytes()), "{theirs}");
        }
        let tree = RawValue::from_string("{}".into()).unwrap();
        let ours: Manifest = Manifest::new(0, 1, 4096, Vec::new(), Vec::new(), tree);
        let ours = ours.encode().unwrap();
        let cleared = [&vec![0; 512][..], &ours[ours.len().min(512)..]].concat();
        let by_hand = b"{\n  \"format\": \"ringstow\",\n  \"version\": 1\n}\n";
        for damaged in [&b""[..], b"\0\0\0\0", b"rubbish", &cleared, by_hand] {
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

    #[test]
    fn manifest_is_not_called_ringstows_while_the_system_does_not_say() {
        use crate::sys::seam::{Call, fail_call};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(names::MANIFEST);
        std::fs::write(&path, "{}").unwrap();
        let refused = |errno| {
            let _failing = fail_call(Call::Read, &path, errno);
            refuse_foreign(dir.path()).err()
        };
        assert!(matches!(refused(nix::libc::EACCES), Some(Error::Io { .. })));
        assert!(refused(nix::libc::EIO).is_none(), "it is damaged");
        assert!(matches!(refuse_foreign(dir.path()), Err(Error::Invalid { .. })));
    }
}
