//! Compares what was read with its checksums.

/// A checksum chunk that is not what was written.
pub(crate) struct Differing {
    number: usize,
    /// Byte offset in its file.
    pub offset: u64,
    pub bytes: usize,
    pub expected: u32,
    pub got: u32,
}

impl Differing {
    /// What was compared, for messages.
    pub fn what(&self) -> String {
        format!("crc32 of checksum chunk {} ({} bytes)", self.number, self.bytes)
    }
}

/// The chunks of `bytes` that differ. `bytes` begin with the chunk numbered `first` of their file, whose chunks have
/// `chunk_bytes` bytes and these checksums.
pub(crate) fn differing<'b, 'c>(
    bytes: &'b [u8],
    (chunk_bytes, crc32): (usize, &'c [u32]),
    first: usize,
) -> impl Iterator<Item = Differing> + use<'b, 'c> {
    bytes.chunks(chunk_bytes).zip(first..).filter_map(move |(chunk, number)| {
        let (expected, got) = (crc32[number], crc32fast::hash(chunk));
        let offset = (number * chunk_bytes) as u64;
        (got != expected).then_some(Differing { number, offset, bytes: chunk.len(), expected, got })
    })
}
