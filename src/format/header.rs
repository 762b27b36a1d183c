//! The header of a shard, a valid safetensors file: 8 bytes of length (little endian), then JSON
//! padded with spaces so that the data section starts on a multiple of 4096.

use super::{Dtype, Item, TensorInfo, names};
use crate::config::ALIGN;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::borrow::Cow;

/// What comes before the JSON: its length.
const LENGTH_BYTES: usize = 8;

/// A tensor's place in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed<'a> {
    /// What it is.
    pub item: &'a Item,
    /// First byte, from the start of the data section.
    pub begin: u64,
    /// One past its last byte.
    pub end: u64,
}

/// Who the header of a shard is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// Ringstow, and whoever else reads its checkpoints' shards.
    Any,
    /// Hugging Face's programs, which load a model's weights from it.
    Model,
}

/// How long the header of a shard gets, while it is not known yet where in it each item will lie.
///
/// Exact but for the items' offsets, which are counted as if each had as many digits as the end of
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
    /// That of a shard without items.
    pub fn empty(reader: Reader) -> Self {
        let fixed = in_json(&Header { metadata: &reader.metadata(&[]), tensors: &[] }).len() as u64;
        Self { reader, fixed, items: 0, data: 0 }
    }

    /// The same with one more item, of `nbytes` bytes.
    pub fn with(self, item: &Item, nbytes: u64) -> Self {
        let fixed = self.fixed + entry_bytes(item, self.reader);
        Self { fixed, items: self.items + 1, data: self.data.saturating_add(nbytes), ..self }
    }

    /// Bytes of the header at most: length, JSON, padding.
    pub fn bytes_max(&self) -> u64 {
        (LENGTH_BYTES as u64 + self.fixed + 2 * self.items * digits(self.data))
            .next_multiple_of(ALIGN as u64)
    }

    /// Bytes of the file at most.
    pub fn file_bytes_max(&self) -> u64 {
        self.bytes_max().saturating_add(self.data)
    }
}

/// Bytes that an item adds to the header's JSON, besides the digits of its offsets.
fn entry_bytes(item: &Item, reader: Reader) -> u64 {
    let Stored { name, dtype: _, shape } = stored_as(item);
    let dtype = item.info.dtype.safetensors().map_or("U8", |_| item.info.dtype.name());
    let (name, name_within) = escaped(&name);
    let entry = ",\"\":{\"dtype\":\"\",\"shape\":,\"data_offsets\":[,]}".len() + dtype.len();
    let entry = entry as u64 + name + list_bytes(&shape);
    match reader {
        Reader::Model => entry,
        Reader::Any => {
            // Quotes are escaped, as this is JSON within JSON.
            let within = r#",\"\":{\"saved_offsets\":}"#.len() as u64 + name_within;
            let offsets = match item.part {
                Some(_) => list_bytes(&saved_offsets(item)),
                None => "[]".len() as u64 + (2 * shape.len() as u64).saturating_sub(1), // zeros
            };
            entry + within + offsets
        }
    }
}

/// Bytes of a text in JSON, without its quotes; and of that JSON in JSON.
fn escaped(text: &str) -> (u64, u64) {
    let bytes_of = |byte: u8| match byte {
        b'"' | b'\\' => (2, 4),
        b'\x08' | b'\t' | b'\n' | b'\x0c' | b'\r' => (2, 3),
        0..0x20 => (6, 7),
        _ => (1, 1),
    };
    // Of nearly all names, and told without a branch a byte.
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

/// What an item is in its shard: itself, or bytes under a reserved name where safetensors has no
/// word for it.
#[derive(Debug)]
pub struct Stored<'a> {
    /// Name in the shard.
    pub name: Cow<'a, str>,
    /// Element type in the shard.
    pub dtype: safetensors::Dtype,
    /// Elements a dimension in the shard; owned where they are the item's bytes.
    pub shape: Cow<'a, [u64]>,
}

/// What an item is in its shard.
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

/// Names that mean something else to a reader of safetensors, or could be taken for ours.
fn is_reserved(name: &str) -> bool {
    name == "__metadata__" || name.starts_with(names::RESERVED_PREFIX)
}

/// Whether safetensors has a word for an item, and its name is free there: it lies in a file as what
/// it is.
pub fn is_plain(item: &Item) -> bool {
    !item.object && !is_reserved(&item.info.name) && item.info.dtype.safetensors().is_some()
}

/// Builds the first bytes of a shard, up to its data section. Length: a multiple of 4096.
pub fn build(tensors: &[Placed], reader: Reader) -> Vec<u8> {
    encode(tensors, &reader.metadata(tensors))
}

impl Reader {
    fn metadata(self, tensors: &[Placed]) -> Metadata {
        // `format` is asked for by Hugging Face transformers, `DCP_SHARDING_INFO` by the Hugging Face
        // reader of torch.distributed.checkpoint. Values are strings: safetensors allows no others.
        let own = self == Self::Any;
        Metadata {
            format: "pt",
            ringstow: own.then(|| super::manifest::VERSION.to_string()),
            dcp_version: own.then_some("1.0"),
            dcp_sharding_info: own.then(|| in_json(&Sharding(tensors))),
        }
    }
}

// Serialized from where they lie, rather than by way of a tree of JSON values: for a million tensors
// that tree was most of the work of planning a save.

#[derive(Serialize)]
struct Metadata {
    format: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ringstow: Option<String>,
    #[serde(rename = "DCP_VERSION", skip_serializing_if = "Option::is_none")]
    dcp_version: Option<&'static str>,
    #[serde(rename = "DCP_SHARDING_INFO", skip_serializing_if = "Option::is_none")]
    dcp_sharding_info: Option<String>,
}

/// Where in their tensors the items lie, as the reader of torch.distributed.checkpoint has it.
struct Sharding<'a>(&'a [Placed<'a>]);

#[derive(Serialize)]
struct Saved<'a> {
    saved_offsets: Cow<'a, [u64]>,
}

impl Serialize for Sharding<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|tensor| {
            (stored_as(tensor.item).name, Saved { saved_offsets: saved_offsets(tensor.item) })
        }))
    }
}

fn saved_offsets(item: &Item) -> Cow<'_, [u64]> {
    match (item.info.dtype.safetensors(), &item.part) {
        (None, _) => vec![0].into(),
        (Some(_), Some(part)) => part.offsets.as_slice().into(),
        (Some(_), None) => vec![0; item.info.shape.len()].into(),
    }
}

struct Header<'a> {
    metadata: &'a Metadata,
    tensors: &'a [Placed<'a>],
}

#[derive(Serialize)]
struct Entry<'a> {
    dtype: safetensors::Dtype,
    shape: Cow<'a, [u64]>,
    data_offsets: [u64; 2],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(self.tensors.len() + 1))?;
        map.serialize_entry("__metadata__", self.metadata)?;
        for &Placed { item, begin, end } in self.tensors {
            let Stored { name, dtype, shape } = stored_as(item);
            map.serialize_entry(&name, &Entry { dtype, shape, data_offsets: [begin, end] })?;
        }
        map.end()
    }
}

const SAYABLE: &str = "text, numbers and maps of them can be said in JSON";

fn in_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect(SAYABLE)
}

fn encode(tensors: &[Placed], metadata: &Metadata) -> Vec<u8> {
    let mut header = vec![0; LENGTH_BYTES];
    // In place: of a million tensors it is 150 MB.
    serde_json::to_writer(&mut header, &Header { metadata, tensors }).expect(SAYABLE);
    header.resize(header.len().next_multiple_of(ALIGN), b' ');
    let length = (header.len() - LENGTH_BYTES) as u64;
    header[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    header
}

/// Alignment that a tensor of this many bytes gets when larger powers of two come first: the
/// largest power of two that divides its size, 4096 at most.
///
/// Every dtype of a whole number of bytes divides its tensor's size, so each tensor is aligned to
/// its dtype, and most to far more, without a hole between any two.
pub fn natural_alignment(nbytes: u64, dtype: Dtype) -> u64 {
    debug_assert!(dtype.bits() < 8 || nbytes.is_multiple_of(dtype.bits() / 8));
    match nbytes {
        0 => ALIGN as u64,
        n => (1 << n.trailing_zeros()).min(ALIGN as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Part;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn item(name: &str, dtype: Dtype, shape: &[u64]) -> Item {
        TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }.into()
    }

    fn placed(items: &[Item]) -> Vec<Placed<'_>> {
        let mut at = 0;
        items
            .iter()
            .map(|item| {
                let begin = at;
                at += item.info.nbytes().unwrap();
                Placed { item, begin, end: at }
            })
            .collect()
    }

    #[test]
    fn the_safetensors_library_reads_it() {
        let tensors = [
            item("empty", Dtype::I64, &[0, 5]),
            item("größe \u{1F980}\n\"", Dtype::F32, &[2, 3]),
            item("", Dtype::BF16, &[]),
            item("z", Dtype::C128, &[3]),
            item("__metadata__", Dtype::U8, &[1]),
            Item { object: true, ..item("blob", Dtype::U8, &[7]) },
        ];
        let mut file = build(&placed(&tensors), Reader::Any);
        assert_eq!(file.len() % ALIGN, 0);
        let data: u64 = tensors.iter().map(|t| t.info.nbytes().unwrap()).sum();
        file.resize(file.len() + data as usize, 1);
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.len(), tensors.len());
        assert_eq!(read.tensor("größe \u{1F980}\n\"").unwrap().shape(), [2, 3]);
        assert_eq!(read.tensor("").unwrap().dtype(), safetensors::Dtype::BF16);
        assert_eq!(read.tensor("__ringstow__.z").unwrap().shape(), [48]);
        assert_eq!(read.tensor("__ringstow__.__metadata__").unwrap().shape(), [1]);
        assert_eq!(read.tensor("__ringstow__.blob").unwrap().shape(), [7]);
    }

    #[test]
    fn a_box_says_where_it_lies() {
        let part = Some(Part { shape: vec![4, 3], offsets: vec![2, 0] });
        let tensors = [Item { part, ..item("w", Dtype::U8, &[2, 3]) }, item("b", Dtype::U8, &[])];
        let header = build(&placed(&tensors), Reader::Any);
        let read: Value = serde_json::from_slice(&header[8..]).unwrap();
        let sharding = read["__metadata__"]["DCP_SHARDING_INFO"].as_str().unwrap();
        let sharding: Value = serde_json::from_str(sharding).unwrap();
        assert_eq!(sharding["w"], json!({ "saved_offsets": [2, 0] }));
        assert_eq!(sharding["b"], json!({ "saved_offsets": [] }));
        assert_eq!(read["w"]["shape"], json!([2, 3]));
    }

    fn any_item() -> impl Strategy<Value = Item> {
        let name =
            prop_oneof![".*", "[a-z.0-9]{0,40}", "[\"\\\\\u{0}-\u{20}\u{7f}]{0,9}", "__metadata__"];
        let shape =
            prop::collection::vec(prop_oneof![0..3u64, any::<u16>().prop_map(u64::from)], 0..4);
        let dtype = prop::sample::select(Dtype::ALL);
        (name, dtype, shape, any::<(bool, bool)>()).prop_map(
            |(name, dtype, shape, (boxed, object))| {
                let part = boxed.then(|| Part {
                    offsets: shape.iter().map(|&n| n * 7).collect(),
                    shape: shape.clone(),
                });
                let (dtype, shape) = if dtype.nbytes(&shape).is_some() {
                    (dtype, shape)
                } else {
                    (Dtype::U8, vec![5])
                };
                let part = part.filter(|part| part.shape.len() == shape.len());
                Item { part, object, ..item(&name, dtype, &shape) }
            },
        )
    }

    proptest! {
        #[test]
        fn a_header_is_as_long_as_was_said_but_for_the_digits_of_its_offsets(
            items in prop::collection::vec(any_item(), 0..40),
            reader in prop::sample::select(vec![Reader::Any, Reader::Model]),
        ) {
            let nbytes = |item: &Item| item.info.nbytes().unwrap();
            let length = items
                .iter()
                .fold(Length::empty(reader), |length, item| length.with(item, nbytes(item)));
            let placed = placed(&items);
            let offset_digits: u64 = placed.iter().map(|p| digits(p.begin) + digits(p.end)).sum();
            let spare = 2 * length.items * digits(length.data) - offset_digits;
            let built = encode(&placed, &reader.metadata(&placed));
            // The first of the sharding's items has no comma before it.
            let comma = u64::from(reader == Reader::Any && !items.is_empty());
            let json = built.trim_ascii_end().len() as u64 + spare + comma;
            prop_assert_eq!(length.bytes_max(), json.next_multiple_of(ALIGN as u64));
            prop_assert!(built.len() as u64 <= length.bytes_max());
            prop_assert_eq!(length.file_bytes_max(), length.bytes_max() + length.data);
        }
    }

    #[test]
    fn the_length_of_a_header_of_many_tensors_is_a_few_per_cent_too_long_at_most() {
        let items: Vec<Item> = (0..10_000)
            .map(|i| {
                item(&format!("layers.{}.attention.weight", i), Dtype::F32, &[1 + i % 512, 16])
            })
            .collect();
        let length = |reader| {
            let with = |length: Length, item: &Item| length.with(item, item.info.nbytes().unwrap());
            items.iter().fold(Length::empty(reader), with).bytes_max()
        };
        for reader in [Reader::Any, Reader::Model] {
            let built = build(&placed(&items), reader).len() as u64;
            assert!((built..=built + built / 50).contains(&length(reader)), "{built}");
        }
    }
}
