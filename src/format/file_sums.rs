//! The checksums of one file, as the file beside it holds them. No I/O.

use super::manifest::hex_words;
use super::trailer;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io;
use std::path::Path;

const FORMAT: &str = "ringstow-checksums";
const VERSION: u32 = 1;

/// What the file's name has in addition.
pub(crate) const SUFFIX: &str = ".ringstow";

/// The checksums of a file, and which content of it they are of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileSums<'a> {
    format: Cow<'a, str>,
    version: u32,
    /// Length of the file.
    pub bytes: u64,
    /// When the file was changed last, in nanoseconds since 1970-01-01 UTC. A file with another time has another content.
    pub modified_ns: i64,
    /// Bytes that one checksum covers; the last one may cover fewer.
    pub chunk_bytes: u64,
    /// CRC-32 (ISO-HDLC, as in zip) of each chunk.
    #[serde(rename = "chunk_crc32", with = "hex_words")]
    pub crc32: Vec<u32>,
}

impl FileSums<'_> {
    pub fn new((bytes, modified_ns): (u64, i64), chunk_bytes: u64, crc32: Vec<u32>) -> Self {
        let format = FORMAT.into();
        Self { format, version: VERSION, bytes, modified_ns, chunk_bytes, crc32 }
    }

    /// One line of JSON with a trailer.
    ///
    /// # Errors
    /// None but the serializer's own.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        trailer::write(self, &mut text)?;
        Ok(text)
    }

    /// Reads what [`FileSums::encode`] wrote. `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; [`Error::Format`].
    pub fn decode(text: &[u8], path: &Path) -> Result<Self> {
        let wrong = |what: String| Error::format(path, what);
        trailer::check(text, path)?;
        let sums: Self = serde_json::from_slice(text).map_err(|e| wrong(e.to_string()))?;
        if sums.format != FORMAT || sums.version != VERSION {
            return Err(wrong("is not of this version's checksums".into()));
        }
        let chunks =
            sums.bytes.checked_div(sums.chunk_bytes).map(|_| sums.bytes.div_ceil(sums.chunk_bytes));
        match chunks == Some(sums.crc32.len() as u64) {
            true => Ok(sums),
            false => Err(wrong("has another number of checksums than the file has chunks".into())),
        }
    }
}

/// The checksum of `bytes` bytes, of those of their chunks.
pub(crate) fn of_all(crc32: &[u32], bytes: u64, chunk_bytes: u64) -> u32 {
    let mut all = crc32fast::Hasher::new();
    for (chunk, begin) in crc32.iter().zip((0..bytes).step_by(chunk_bytes as usize)) {
        let len = chunk_bytes.min(bytes - begin);
        all.combine(&crc32fast::Hasher::new_with_initial_len(*chunk, len));
    }
    all.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(bytes: &[u8]) -> FileSums<'static> {
        let crc32 = bytes.chunks(10).map(crc32fast::hash).collect();
        FileSums::new((bytes.len() as u64, 7), 10, crc32)
    }

    #[test]
    fn checksums_are_read_as_they_were_written_and_add_up() {
        for len in [0, 1, 10, 25] {
            let data: Vec<u8> = (0..len).collect();
            let text = sums(&data).encode().unwrap();
            let read = FileSums::decode(&text, Path::new("x")).unwrap();
            assert_eq!(read, sums(&data));
            assert_eq!(of_all(&read.crc32, read.bytes, 10), crc32fast::hash(&data));
        }
    }

    #[test]
    fn flipped_bits_and_wrong_counts_are_refused() {
        let text = sums(&[7; 25]).encode().unwrap();
        for at in 0..text.len() {
            let mut flipped = text.clone();
            flipped[at] ^= 1;
            assert!(FileSums::decode(&flipped, Path::new("x")).is_err(), "byte {at}");
            assert!(FileSums::decode(&text[..at], Path::new("x")).is_err(), "cut at {at}");
        }
        for (bytes, chunk_bytes) in [(25, 0), (31, 10), (20, 10)] {
            let other = FileSums::new((bytes, 7), chunk_bytes, vec![0; 3]).encode().unwrap();
            assert!(FileSums::decode(&other, Path::new("x")).is_err(), "{bytes}");
        }
    }
}
