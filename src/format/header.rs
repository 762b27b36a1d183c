//! The header of a shard, a valid safetensors file: 8 bytes of length (little endian), then JSON
//! padded with spaces so that the data section starts on a multiple of 4096.
//!
//! The header of a million tensors takes 150 MB, so it is never in memory as a whole: laying out a shard only
//! measures it, and writing a run of it makes the text of that run alone.

use super::manifest::VERSION;
use super::{Dtype, Item, TensorInfo, names};
use crate::limits::ALIGN;
use serde::Serialize;
use std::borrow::Cow;

/// Bytes before the JSON: its length.
const LENGTH_BYTES: u64 = 8;

/// Most passages that are made and dropped to start in the middle of a header.
const PASSAGES_A_MARK: usize = 16;

/// A tensor's place in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed<'a> {
    /// The item.
    pub item: &'a Item,
    /// First byte, from the start of the data section.
    pub begin: u64,
    /// One past its last byte.
    pub end: u64,
}

/// The readers that a shard's header is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// Ringstow and every other reader of its shards.
    Any,
    /// Hugging Face's programs, which load a model's weights from it.
    Model,
}

/// The length of a shard's header, before the offsets of its items are known.
///
/// Exact except for the items' offsets, which are counted as if each had as many digits as the end of
/// the data.
#[derive(Debug, Clone, Copy)]
pub struct Length {
    reader: Reader,
    /// Bytes of JSON besides the digits of offsets.
    fixed: u64,
    items: u64,
    /// Bytes of tensor data.
    data: u64,
}

impl Length {
    /// The length of the header of an empty shard.
    pub fn empty(reader: Reader) -> Self {
        let fixed = reader.opening().len() + reader.middle().len() + CLOSING.len();
        Self { reader, fixed: fixed as u64, items: 0, data: 0 }
    }

    /// The same with one more item, of `nbytes` bytes.
    pub fn with(self, item: &Item, nbytes: u64) -> Self {
        let offsets = if self.reader.wants_offsets() { offsets_bytes(item) } else { 0 };
        let fixed = self.fixed + offsets + entry_bytes(item);
        Self { fixed, items: self.items + 1, data: self.data.saturating_add(nbytes), ..self }
    }

    /// Most bytes of the header: length, JSON, padding.
    pub fn bytes_max(&self) -> u64 {
        (LENGTH_BYTES + self.fixed + 2 * self.items * digits(self.data))
            .next_multiple_of(ALIGN as u64)
    }

    /// Most bytes of the file.
    pub fn file_bytes_max(&self) -> u64 {
        self.bytes_max().saturating_add(self.data)
    }
}

/// Bytes of an item's [`Passage::Entry`], besides the digits of its offsets.
fn entry_bytes(item: &Item) -> u64 {
    let Stored { name, dtype: _, shape } = stored_as(item);
    let dtype = item.info.dtype.safetensors().map_or("U8", |_| item.info.dtype.name());
    let others = r#","":{"dtype":"","shape":,"data_offsets":[,]}"#.len() + dtype.len();
    others as u64 + escaped(&name).0 + list_bytes(&shape)
}

/// Bytes of an item's [`Passage::Offsets`], with its comma.
fn offsets_bytes(item: &Item) -> u64 {
    let Stored { name, shape, .. } = stored_as(item);
    let offsets = match item.region {
        Some(_) => list_bytes(&saved_offsets(item)),
        None => "[]".len() as u64 + (2 * shape.len() as u64).saturating_sub(1), // zeros
    };
    r#",\"\":{\"saved_offsets\":}"#.len() as u64 + escaped(&name).1 + offsets
}

/// Bytes of a text in JSON, without its quotes; and of that JSON in JSON.
fn escaped(text: &str) -> (u64, u64) {
    let bytes_of = |byte: u8| match byte {
        b'"' | b'\\' => (2, 4),
        b'\x08' | b'\t' | b'\n' | b'\x0c' | b'\r' => (2, 3),
        0..0x20 => (6, 7),
        _ => (1, 1),
    };
    // True for nearly all names, and found without a branch per byte.
    let is_plain =
        text.bytes().fold(true, |plain, b| plain & (b >= 0x20 && b != b'"' && b != b'\\'));
    if is_plain {
        return (text.len() as u64, text.len() as u64);
    }
    text.bytes().map(bytes_of).fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1))
}

/// Bytes of a list of numbers in JSON.
fn list_bytes(numbers: &[u64]) -> u64 {
    let commas = numbers.len().saturating_sub(1) as u64;
    "[]".len() as u64 + commas + numbers.iter().copied().map(digits).sum::<u64>()
}

fn digits(number: u64) -> u64 {
    1 + u64::from(number.checked_ilog10().unwrap_or(0))
}

/// How an item is stored in its shard: as itself, or as bytes under a reserved name if safetensors cannot express it.
#[derive(Debug)]
pub struct Stored<'a> {
    /// Name in the shard.
    pub name: Cow<'a, str>,
    /// Element type in the shard.
    pub dtype: safetensors::Dtype,
    /// Elements per dimension in the shard; owned if it counts the item's bytes.
    pub shape: Cow<'a, [u64]>,
}

/// Returns how an item is stored in its shard.
pub fn stored_as(item: &Item) -> Stored<'_> {
    let TensorInfo { name, dtype, shape } = &item.info;
    let (dtype, shape) = match dtype.safetensors() {
        Some(dtype) => (dtype, Cow::from(shape)),
        // A size that overflows is refused before anything is laid out.
        None => (safetensors::Dtype::U8, vec![item.info.nbytes().unwrap_or(0)].into()),
    };
    let name = match is_plain(item) {
        true => Cow::from(name),
        false => format!("{}{name}", names::RESERVED_PREFIX).into(),
    };
    Stored { name, dtype, shape }
}

/// Whether a name means something else to readers of safetensors, or looks like a reserved name.
fn is_reserved(name: &str) -> bool {
    name == "__metadata__" || name.starts_with(names::RESERVED_PREFIX)
}

/// Whether an item is stored as itself: safetensors has its type, and its name is not reserved.
pub fn is_plain(item: &Item) -> bool {
    !item.object && !is_reserved(&item.info.name) && item.info.dtype.safetensors().is_some()
}

/// The first bytes of a shard, up to its data section: length, JSON, padding. Knows their length, and makes them on
/// demand.
#[derive(Debug, Clone)]
pub struct Header {
    reader: Reader,
    tensors: usize,
    /// Bytes without the padding.
    unpadded: u64,
    /// Where the first of each [`PASSAGES_A_MARK`] passages begins.
    marks: Vec<u64>,
}

/// A section of the header, in order.
#[derive(Debug, Clone, Copy)]
enum Passage {
    /// The length, and the metadata before the offsets of regions.
    Opening,
    /// The offsets of the item of this number in its tensor: JSON in a string in JSON.
    Offsets(usize),
    /// The metadata's end.
    Middle,
    /// The item of this number.
    Entry(usize),
    Closing,
}

const CLOSING: &str = "}";

impl Header {
    /// Measures the header of `tensors` tensors. `tensor` returns each by its number.
    pub fn new<'a>(reader: Reader, tensors: usize, tensor: impl Fn(usize) -> Placed<'a>) -> Self {
        let mut header = Self { reader, tensors, unpadded: 0, marks: Vec::new() };
        header.marks.reserve_exact(header.passage_count().div_ceil(PASSAGES_A_MARK));
        for number in 0..header.passage_count() {
            if number.is_multiple_of(PASSAGES_A_MARK) {
                header.marks.push(header.unpadded);
            }
            header.unpadded += header.passage_bytes(header.passage(number), &tensor);
        }
        header
    }

    /// No header at all: of a file whose header another process writes.
    pub fn none() -> Self {
        Self { reader: Reader::Model, tensors: 0, unpadded: 0, marks: Vec::new() }
    }

    /// Its length, a multiple of 4096.
    pub fn bytes(&self) -> u64 {
        self.unpadded.next_multiple_of(ALIGN as u64)
    }

    /// Writes its bytes from an offset on. `tensor` returns the same as for [`Header::new`].
    pub fn write<'a>(&self, from: u64, to: &mut [u8], tensor: impl Fn(usize) -> Placed<'a>) {
        let mark = self.marks.partition_point(|&mark| mark <= from) - 1;
        let (mut skip, mut filled) = ((from - self.marks[mark]) as usize, 0);
        let mut text = Vec::new();
        for number in mark * PASSAGES_A_MARK..self.passage_count() {
            if filled == to.len() {
                return;
            }
            let passage = self.passage(number);
            text.clear();
            self.push_passage(passage, &tensor, &mut text);
            debug_assert_eq!(text.len() as u64, self.passage_bytes(passage, &tensor));
            let wanted = &text[skip.min(text.len())..];
            skip -= text.len() - wanted.len();
            let len = wanted.len().min(to.len() - filled);
            to[filled..filled + len].copy_from_slice(&wanted[..len]);
            filled += len;
        }
        to[filled..].fill(b' ');
    }

    fn passage_count(&self) -> usize {
        self.offsets_count() + self.tensors + 3
    }

    fn offsets_count(&self) -> usize {
        if self.reader.wants_offsets() { self.tensors } else { 0 }
    }

    fn passage(&self, number: usize) -> Passage {
        let middle = 1 + self.offsets_count();
        let closing = middle + 1 + self.tensors;
        match number {
            0 => Passage::Opening,
            _ if number < middle => Passage::Offsets(number - 1),
            _ if number == middle => Passage::Middle,
            _ if number < closing => Passage::Entry(number - middle - 1),
            _ => Passage::Closing,
        }
    }

    /// Bytes that [`Header::push_passage`] would push.
    fn passage_bytes<'a>(&self, passage: Passage, tensor: impl Fn(usize) -> Placed<'a>) -> u64 {
        match passage {
            Passage::Opening => LENGTH_BYTES + self.reader.opening().len() as u64,
            Passage::Offsets(0) => offsets_bytes(tensor(0).item) - 1, // no comma
            Passage::Offsets(number) => offsets_bytes(tensor(number).item),
            Passage::Middle => self.reader.middle().len() as u64,
            Passage::Entry(number) => {
                let Placed { item, begin, end } = tensor(number);
                entry_bytes(item) + digits(begin) + digits(end)
            }
            Passage::Closing => CLOSING.len() as u64,
        }
    }

    fn push_passage<'a>(
        &self,
        passage: Passage,
        tensor: impl Fn(usize) -> Placed<'a>,
        to: &mut Vec<u8>,
    ) {
        match passage {
            Passage::Opening => {
                to.extend((self.bytes() - LENGTH_BYTES).to_le_bytes());
                to.extend(self.reader.opening().bytes());
            }
            Passage::Offsets(number) => {
                let item = tensor(number).item;
                if number > 0 {
                    to.push(b',');
                }
                let name = in_json(&in_json(&stored_as(item).name));
                to.extend_from_slice(&name.as_bytes()[1..name.len() - 1]);
                to.extend_from_slice(br#":{\"saved_offsets\":"#);
                push_json(to, &saved_offsets(item));
                to.push(b'}');
            }
            Passage::Middle => to.extend(self.reader.middle().bytes()),
            Passage::Entry(number) => {
                let Placed { item, begin, end } = tensor(number);
                let Stored { name, dtype, shape } = stored_as(item);
                to.push(b',');
                push_json(to, &name);
                to.push(b':');
                push_json(to, &Entry { dtype, shape, data_offsets: [begin, end] });
            }
            Passage::Closing => to.extend(CLOSING.bytes()),
        }
    }
}

impl Reader {
    /// Whether the header stores the offset of each region in its tensor.
    fn wants_offsets(self) -> bool {
        self == Self::Any
    }

    /// The text before the offsets. Hugging Face transformers needs `format`, and the Hugging Face reader of
    /// torch.distributed.checkpoint `DCP_SHARDING_INFO`. Values are strings: safetensors allows no others.
    fn opening(self) -> String {
        match self {
            Self::Any => format!(
                r#"{{"__metadata__":{{"format":"pt","ringstow":"{VERSION}","DCP_VERSION":"1.0","DCP_SHARDING_INFO":"{{"#
            ),
            Self::Model => r#"{"__metadata__":{"format":"pt""#.into(),
        }
    }

    /// The text between the offsets and the first tensor.
    fn middle(self) -> &'static str {
        match self {
            Self::Any => r#"}"}"#,
            Self::Model => "}",
        }
    }
}

fn saved_offsets(item: &Item) -> Cow<'_, [u64]> {
    match (item.info.dtype.safetensors(), &item.region) {
        (None, _) => vec![0].into(),
        (Some(_), Some(region)) => region.offsets.as_slice().into(),
        (Some(_), None) => vec![0; item.info.shape.len()].into(),
    }
}

#[derive(Serialize)]
struct Entry<'a> {
    dtype: safetensors::Dtype,
    shape: Cow<'a, [u64]>,
    data_offsets: [u64; 2],
}

const IS_JSON: &str = "text, numbers and lists of them are valid JSON";

fn in_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect(IS_JSON)
}

fn push_json(to: &mut Vec<u8>, value: &impl Serialize) {
    serde_json::to_writer(to, value).expect(IS_JSON);
}

/// The alignment of a tensor of this many bytes in its shard: the largest power of two that divides its size, at most
/// 4096.
///
/// A shard holds the tensors with larger alignments first, so each is aligned to its elements, and most to far more,
/// without padding between them.
pub fn natural_alignment(nbytes: u64, dtype: Dtype) -> u64 {
    debug_assert!(dtype.bits() < 8 || nbytes.is_multiple_of(dtype.bits() / 8));
    match nbytes {
        0 => ALIGN as u64,
        n => (1 << n.trailing_zeros()).min(ALIGN as u64),
    }
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
