//! Refuses URLs and `~`: they would become directories of that name in the current one.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Refuses a URL, and a path that begins with `~`.
///
/// # Errors
/// [`Error::Invalid`], which says what to write instead.
pub(crate) fn check(path: &Path) -> Result<()> {
    refuse_empty(path)?;
    let shown = path.display();
    if is_url(path) {
        return Err(Error::invalid(format!(
            "{shown} is a URL, and checkpoints are saved to and loaded from directories: mount the store and \
             give the directory, or copy the checkpoint there once it is saved (a directory of this name \
             is ./{shown})"
        )));
    }
    if path.as_os_str().as_encoded_bytes().starts_with(b"~") {
        return Err(Error::invalid(format!(
            "{shown} begins with ~, which is a home directory to a shell only: write that out (a directory of \
             this name is ./{shown})"
        )));
    }
    Ok(())
}

/// Refuses an empty path, which names of files would turn into names in the current directory.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn refuse_empty(path: &Path) -> Result<()> {
    match path.as_os_str().is_empty() {
        true => Err(Error::invalid("the path is empty: name a directory (. is the current one)")),
        false => Ok(()),
    }
}

/// The path from the root: background work must not follow a later change of the current directory.
///
/// # Errors
/// As [`check`]; the system's, where the current directory is gone.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf> {
    check(path)?;
    std::path::absolute(path).map_err(|e| Error::io("finding the directory of", path, e))
}

/// [`absolute`] of what is read, which may be in an object store.
///
/// # Errors
/// As [`absolute`].
pub(crate) fn absolute_or_object(path: &Path) -> Result<PathBuf> {
    if is_object(path) { Ok(path.into()) } else { absolute(path) }
}

/// Whether a path is the URL of an object store: `s3://bucket/run`.
pub(crate) fn is_object(path: &Path) -> bool {
    const SCHEMES: [&str; 6] = ["s3", "s3a", "gs", "az", "abfs", "abfss"];
    let url = path.to_str().and_then(|path| path.split_once("://"));
    url.is_some_and(|(scheme, _)| SCHEMES.contains(&scheme))
}

/// Whether it begins as URLs do: `s3://bucket/x`, or `s3:/bucket/x`, which joining paths makes of it.
fn is_url(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    let Some(scheme) = bytes.iter().position(|&byte| byte == b':').map(|end| &bytes[..end]) else {
        return false;
    };
    let of_a_scheme = |byte: &u8| byte.is_ascii_alphanumeric() || b"+.-".contains(byte);
    scheme.len() > 1
        && scheme[0].is_ascii_alphabetic()
        && scheme.iter().all(of_a_scheme)
        && bytes.get(scheme.len() + 1) == Some(&b'/')
}

#[cfg(test)]
mod tests {
    use crate::sys::path::*;

    #[test]
    fn urls_and_homes_are_refused_with_what_to_write() {
        for url in ["s3://bucket/x", "gs://b", "file:///tmp/x", "s3:/bucket/x", "hdfs+x://a/b"] {
            let why = check(Path::new(url)).unwrap_err().to_string();
            assert!(why.contains(&format!("{url} is a URL")), "{why}");
        }
        for home in ["~", "~/x", "~user/x"] {
            let why = check(Path::new(home)).unwrap_err().to_string();
            assert!(why.contains("write that out") && why.contains(&format!("./{home}")), "{why}");
        }
        for path in ["/a/s3://x", "./s3://x", "a:b", "step:1/x", "a/~", "x~", "C:/x", "1a://x"] {
            assert!(check(Path::new(path)).is_ok(), "{path}");
        }
    }
}
