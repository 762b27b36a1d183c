//! The header of one safetensors file, and the text of an index.

use crate::error::{Advice, Error, Result};
use crate::format::safetensors_header::Header;
use crate::sys::{dir, file};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the largest header that the safetensors format allows. A list of tensors and files is never larger.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// How a pointer begins that Git LFS leaves in place of a file, and the most bytes of one.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
const POINTER_BYTES_MAX: u64 = 1024;

/// What a file holds.
pub(super) struct Contents {
    /// Its real path: the hub's cache consists of links.
    pub path: PathBuf,
    pub header: Header,
    /// Where the data section begins.
    pub data: u64,
    /// The file's length.
    pub bytes: u64,
}

/// Reads a header, and checks that the file's length matches it.
pub(super) fn read_header(path: &Path) -> Result<Contents> {
    let path = dir::real(path)?;
    let (mut file, bytes) = open(&path)?;
    let mut read = |length: u64| -> Result<Vec<u8>> {
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(|e| Error::io("reading", &path, e))?;
        Ok(text)
    };
    let too_short = |expected: String| {
        let error = Error::corrupt(&path, bytes, "length in bytes", expected, bytes.to_string());
        Err(error.advising(Advice::Download))
    };
    if bytes < 8 {
        return too_short("that of a safetensors file, 8 or more".into());
    }
    let begin = read(8)?;
    let length = u64::from_le_bytes(begin[..].try_into().expect("8 bytes were read"));
    if length > HEADER_BYTES_MAX {
        if bytes <= POINTER_BYTES_MAX {
            refuse_pointer(&path, &[begin.clone(), read(bytes - 8)?].concat())?;
        }
        let what = match is_page(&begin) {
            true => {
                "it begins like a web page: a download got an error or a login in its place; download it again"
            }
            false => "its first 8 bytes are not the length of a header",
        };
        return Err(Error::format(path, format!("is not a safetensors file: {what}")));
    }
    if length > bytes - 8 {
        return too_short(format!("{} or more, by its header", 8 + length));
    }
    let header = Header::read(&read(length)?)
        .map_err(|why| Error::format(&path, format!("has no valid safetensors header: {why}")))?;
    let data = 8 + length;
    let expected = data.saturating_add(header.data_bytes);
    if expected != bytes {
        let (at, expected, got) = (expected.min(bytes), expected.to_string(), bytes.to_string());
        let error = Error::corrupt(&path, at, "length in bytes", expected, got);
        return Err(error.advising(Advice::Download));
    }
    Ok(Contents { path, header, data, bytes })
}

/// Whether a file begins as HTML and XML do.
fn is_page(begin: &[u8]) -> bool {
    let text = begin.trim_ascii_start();
    text.first() == Some(&b'<')
        && text.get(1).is_some_and(|b| b.is_ascii_alphabetic() || b"!?".contains(b))
}

fn refuse_pointer(path: &Path, text: &[u8]) -> Result<()> {
    if !text.starts_with(POINTER) {
        return Ok(());
    }
    let reason = "it is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, or download the \
                  file";
    Err(Error::MissingFiles { path: path.into(), reason: reason.into() })
}

/// The text of an index.
pub(super) fn read_text(path: &Path) -> Result<Vec<u8>> {
    let path = dir::real(path)?;
    let (mut file, bytes) = open(&path)?;
    if bytes > HEADER_BYTES_MAX {
        let reason = format!("has {bytes} bytes: too large for a list of tensors");
        return Err(Error::format(path, reason));
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(|e| Error::io("reading", &path, e))?;
    refuse_pointer(&path, &text)?;
    Ok(text)
}

/// Opens a regular file, and returns it with its length in bytes.
fn open(path: &Path) -> Result<(File, u64)> {
    let opened = file::open_read(path, false).and_then(|file| {
        let bytes = file::look(&file)?.len();
        Ok((file, bytes))
    });
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Error::format(path, "is not a regular file"),
        _ => Error::io("opening", path, error),
    })
}
