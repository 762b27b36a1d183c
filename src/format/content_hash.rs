//! Hashes of tensor chunks, by which a later save recognizes bytes that have not changed. A checksum of 32 bits finds
//! damage, and is too short for that. No I/O.

use serde::{Deserialize, Deserializer, Serializer, de::Error as _};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::ops::Range;
use twox_hash::XxHash3_128;

/// The hash of a tensor chunk, and the offset of its first byte in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHash {
    /// Offset in the file.
    pub begin: u64,
    /// See [`of_runs`].
    pub hash: u128,
}

/// Hex digits of an entry in the manifest: offset, then hash.
const DIGITS: usize = 16 + 32;

/// The runs into which the file's checksum chunks cut a tensor chunk of `len` bytes at `begin`, counted from its first
/// byte. Several threads can hash the runs, in any order.
pub fn runs(begin: u64, len: u64, block_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let from = at;
        at = len.min(from + block_bytes - (begin + from) % block_bytes);
        (from < len).then_some(from..at)
    })
}

/// The hash of one run: XXH3 with 128 bits, seed 0.
pub fn of_run(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// The hash of a tensor chunk: that of the hashes of its runs, 16 bytes each, big-endian.
pub fn of_runs(runs: &[u128]) -> u128 {
    let bytes: Vec<u8> = runs.iter().flat_map(|run| run.to_be_bytes()).collect();
    of_run(&bytes)
}

/// Checks that the offsets rise, and that a file of `bytes` bytes has them.
///
/// # Errors
/// What is wrong, as a sentence.
pub(super) fn check(hashes: &[ChunkHash], bytes: u64) -> Result<(), String> {
    let rises = hashes.windows(2).all(|pair| pair[0].begin < pair[1].begin);
    match rises && hashes.last().is_none_or(|last| last.begin < bytes) {
        true => Ok(()),
        false => Err("hashes are not in the order of the file".into()),
    }
}

pub(super) fn serialize<S: Serializer>(hashes: &[ChunkHash], to: S) -> Result<S::Ok, S::Error> {
    let mut text = String::with_capacity(hashes.len() * DIGITS);
    for ChunkHash { begin, hash } in hashes {
        let _ = write!(text, "{begin:016x}{hash:032x}");
    }
    to.serialize_str(&text)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ChunkHash>, D::Error> {
    let text = Cow::<str>::deserialize(from)?;
    if !text.len().is_multiple_of(DIGITS) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(D::Error::custom("hashes are 48 hex digits per tensor chunk"));
    }
    let mut hashes = Vec::with_capacity(text.len() / DIGITS);
    for at in (0..text.len()).step_by(DIGITS) {
        let (begin, hash) = (&text[at..at + 16], &text[at + 16..at + DIGITS]);
        let begin = u64::from_str_radix(begin, 16).map_err(D::Error::custom)?;
        let hash = u128::from_str_radix(hash, 16).map_err(D::Error::custom)?;
        hashes.push(ChunkHash { begin, hash });
    }
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_checksum_chunks_of_the_file_do() {
        let of = |begin, len| runs(begin, len, 4096).collect::<Vec<_>>();
        assert_eq!(of(4096, 5000), [0..4096, 4096..5000]);
        assert_eq!(of(5000, 5000), [0..3192, 3192..5000]);
        assert_eq!(of(4095, 1).as_slice(), std::slice::from_ref(&(0..1)));
        assert_eq!(of(4095, 2), [0..1, 1..2]);
        assert!(of(77, 0).is_empty());
    }

    /// The format's page says these; another reader must find the same.
    #[test]
    fn hash_is_xxh3_of_128_bits_of_the_hashes_of_the_runs() {
        assert_eq!(of_run(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
        assert_ne!(of_runs(&[of_run(b"ab")]), of_runs(&[of_run(b"a"), of_run(b"b")]));
        let run = of_run(b"a");
        assert_eq!(of_runs(&[run]), of_run(&run.to_be_bytes()));
    }

    #[test]
    fn hashes_out_of_order_or_outside_of_the_file_are_refused() {
        let at = |begins: &[u64]| {
            let hashes: Vec<_> = begins.iter().map(|&begin| ChunkHash { begin, hash: 1 }).collect();
            check(&hashes, 100)
        };
        assert_eq!((at(&[]), at(&[3, 99])), (Ok(()), Ok(())));
        for wrong in [&[3, 3][..], &[4, 3], &[100]] {
            assert!(at(wrong).is_err(), "{wrong:?}");
        }
    }
}
