//! The trailer of a manifest: its last field, the checksum of everything before it.

use crate::error::{Error, Result};
use serde::Serialize;
use std::io::{self, Write};
use std::path::Path;

const KEY: &str = ",\"crc32\":\"";
pub(super) const LEN: usize = KEY.len() + 8 + "\"}\n".len();

/// Writes a JSON object as one line that ends with the trailer.
pub(super) fn write(object: &impl Serialize, to: impl Write) -> io::Result<()> {
    // The serializer writes a few bytes at a time.
    let open = Open { to, crc32: crc32fast::Hasher::new(), held: None };
    let mut buffered = io::BufWriter::with_capacity(64 << 10, open);
    serde_json::to_writer(&mut buffered, object)?;
    let Open { mut to, crc32, held } = buffered.into_inner()?;
    debug_assert_eq!(held, Some(b'}'), "only an object can have a trailer");
    to.write_all(of(crc32.finalize()).as_bytes())
}

/// Returns the text that the trailer checksum covers, if it matches. `path` is for the message.
pub(super) fn check<'a>(bytes: &'a [u8], path: &Path) -> Result<&'a [u8]> {
    let corrupt = |offset, what, expected, got| Error::corrupt(path, offset, what, expected, got);
    if bytes.is_empty() {
        return Err(corrupt(0, "the manifest's length in bytes", "more than 0", "0"));
    }
    let at = bytes.len().saturating_sub(LEN);
    let (body, found) = bytes.split_at(at);
    let actual = of(crc32fast::hash(body));
    if found == actual.as_bytes() {
        return Ok(body);
    }
    let stored = String::from_utf8_lossy(found);
    Err(match stored.starts_with(KEY) {
        true => corrupt(0, "the manifest's closing checksum", stored.trim_end(), actual.trim_end()),
        false => {
            corrupt(at as u64, "the manifest's end", "its closing checksum", stored.trim_end())
        }
    })
}

/// Whether a text ends with a trailer, whatever its checksum.
pub(super) fn is_at_end(text: &str) -> bool {
    text.len()
        .checked_sub(LEN)
        .and_then(|at| text.get(at..))
        .is_some_and(|end| end.starts_with(KEY))
}

fn of(crc32: u32) -> String {
    format!("{KEY}{crc32:08x}\"}}\n")
}

/// Passes on what is written except the last byte, which closes the object, so that a field can follow.
struct Open<W> {
    to: W,
    /// The checksum of what was passed on.
    crc32: crc32fast::Hasher,
    held: Option<u8>,
}

impl<W: Write> Open<W> {
    fn pass(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc32.update(bytes);
        self.to.write_all(bytes)
    }
}

impl<W: Write> Write for Open<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some((&last, before)) = bytes.split_last() else { return Ok(0) };
        if let Some(held) = self.held.replace(last) {
            self.pass(&[held])?;
        }
        self.pass(before)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}
