//! Takes small numbers and pieces out of arbitrary bytes.

/// Bytes that are not taken yet. Once there are none left, every number is 0.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// A number below `end`, which is at most 256 and at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// A number of eight bytes, the first of them the lowest.
    pub fn u64(&mut self) -> u64 {
        (0..8).fold(0, |number, place| number | u64::from(self.byte()) << (8 * place))
    }

    /// The next bytes, at most this many.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// The lines of a text, and what follows an empty line.
pub fn lines_and_rest(data: &[u8]) -> Option<(Vec<&str>, &str)> {
    let text = std::str::from_utf8(data).ok()?;
    let (lines, rest) = text.split_once("\n\n")?;
    Some((lines.split('\n').collect(), rest))
}
