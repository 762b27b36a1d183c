//! Directories in object stores: S3, Google Cloud Storage, Azure. What a URL names here is a prefix of names, which serves
//! as a checkpoint's directory.
//!
//! Functions block. Requests run on two threads of the process' own ([`client`]), so that callers may be anywhere: also in
//! an async runtime, whose threads must not wait for themselves. An object is there whole or not at all; the store alone says
//! who created it first.

#[cfg(not(feature = "object-store"))]
mod absent;
#[cfg(feature = "object-store")]
mod answer;
#[cfg(feature = "object-store")]
mod client;
#[cfg(feature = "object-store")]
mod connect;
mod file;
#[cfg(feature = "object-store")]
mod open;
#[cfg(feature = "object-store")]
mod upload;

#[cfg(not(feature = "object-store"))]
use absent as client;
pub use client::Bucket;
pub use file::ObjectFile;
#[cfg(feature = "object-store")]
pub use upload::Payload;

use crate::error::{Error, Result};
use std::collections::HashMap;
#[cfg(feature = "object-store")]
use std::io;
use std::path::{Path, PathBuf};

/// What is directly in a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The objects' names, each with its bytes.
    pub objects: HashMap<String, u64>,
    /// The names of directories.
    pub dirs: Vec<String>,
}

/// What tells one content of an object from another, as the store says it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Version {
    pub(super) tag: Option<String>,
    pub(super) number: Option<String>,
}

pub(crate) use crate::sys::path::is_object as is_url;

/// Splits a path into the URL of its directory and its last part.
///
/// # Errors
/// [`Error::Invalid`] if it has no last part.
pub fn split(path: &Path) -> Result<(PathBuf, String)> {
    let name = path.file_name().and_then(|name| name.to_str());
    match (path.parent(), name) {
        (Some(dir), Some(name)) => Ok((dir.into(), name.into())),
        _ => Err(Error::invalid(format!("{} names no object in a directory", path.display()))),
    }
}

/// The error of a request, as the system's of the same meaning: readers of files know these.
#[cfg(feature = "object-store")]
fn failed(kind: io::ErrorKind, why: impl std::fmt::Display) -> io::Error {
    io::Error::new(kind, why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_stores_are_told_from_paths() {
        for url in ["s3://bucket/run", "gs://b", "az://container/x", "abfss://c@a/x"] {
            assert!(is_url(Path::new(url)), "{url}");
        }
        for path in ["/a/s3://x", "./s3://x", "s3:/bucket", "file:///x", "http://x/y", "s3", ""] {
            assert!(!is_url(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn url_is_split_into_directory_and_name() {
        let (dir, name) = split(Path::new("s3://bucket/run/step-1/a.safetensors")).unwrap();
        assert_eq!((dir.to_str().unwrap(), &*name), ("s3://bucket/run/step-1", "a.safetensors"));
    }
}
