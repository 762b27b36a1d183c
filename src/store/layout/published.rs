//! Files that appear in a directory whole or not at all: the manifest of a copy, and labels, which say what a directory is.

use crate::error::{Error, Result};
use crate::format::names;
use crate::sys::chance::unique;
use crate::sys::dir;
use crate::sys::file;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Longer labels are not read.
pub(in crate::store) const LABEL_BYTES_MAX: u64 = 4096;

/// Reads a label; `None` if the directory has none.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn read_label(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    match file::read_start(&path, LABEL_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(e) if file::is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io("reading", path, e)),
    }
}

/// Writes a label durably, and makes the directory if it is missing. Without `replaces`, leaves a label that is there.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn write_label(
    dir: &Path,
    name: &str,
    text: &str,
    replaces: bool,
) -> Result<()> {
    /// How often others may take its file for one that a killed writer has left.
    const TRIES_MAX: usize = 100;
    dir::make_all(dir)?;
    for left in uncommitted_labels(dir).unwrap_or_default() {
        let _gone = dir::try_remove(&left);
    }
    let mut tries = 1;
    loop {
        match publish(dir, name, text.as_bytes(), replaces) {
            Err(error) if error.is_not_found() && tries < TRIES_MAX => tries += 1,
            Err(error) if error.is_taken() => break,
            published => {
                published?;
                break;
            }
        }
    }
    dir::sync(dir)
}

/// What writers of labels have in a directory, or have left there when they were killed. Anybody may remove it: a writer
/// whose file is gone begins again.
///
/// # Errors
/// [`Error::Io`].
pub(in crate::store) fn uncommitted_labels(dir: &Path) -> Result<Vec<PathBuf>> {
    let names = dir::file_names(dir)?.into_iter();
    Ok(names.filter(|name| names::is_uncommitted_label(name)).map(|name| dir.join(name)).collect())
}

/// Writes a file under another name, syncs it and renames it. The caller syncs the directory.
///
/// # Errors
/// [`Error::Io`], without `replaces` of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if there is a file of this name.
pub(in crate::store) fn publish(
    dir: &Path,
    name: &str,
    content: &[u8],
    replaces: bool,
) -> Result<()> {
    let part = dir.join(format!("{name}.{}{}", unique(), names::UNCOMMITTED_SUFFIX));
    let path = dir.join(name);
    let published =
        file::write_durably(&part, |mut file| file.write_all(content)).and_then(
            |()| match replaces {
                true => dir::rename(&part, &path),
                false => dir::rename_once(&part, &path),
            },
        );
    if published.is_err() {
        let _gone = dir::try_remove(&part);
    }
    published
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn label_s_writer_removes_what_a_killed_one_left_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join(format!("{}.0123456789abcdef.part", names::RUN));
        let others = ["label.0123456789abcdef.part", ".ringstow-run.json.part"];
        fs::write(&left, "{").unwrap();
        others.iter().for_each(|name| fs::write(dir.path().join(name), "a user's").unwrap());
        write_label(dir.path(), names::RUN, "{}", false).unwrap();
        assert!(!left.exists());
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
        assert_eq!(fs::read(dir.path().join(names::RUN)).unwrap(), b"{}");
    }

    #[test]
    fn labels_are_written_while_another_process_clears_up() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4)
                .map(|writer: u64| {
                    let dir = dir.path();
                    scope.spawn(move || {
                        (0..50).try_for_each(|_| {
                            write_label(dir, names::RUN, &writer.to_string(), true)
                        })
                    })
                })
                .collect();
            for writer in writers {
                writer.join().unwrap().unwrap();
            }
        });
        assert_eq!(dir::file_names(dir.path()).unwrap(), [names::RUN]);
    }
}
