//! The header of a shard, a valid safetensors file: 8 bytes of length (little endian), then JSON
//! padded with spaces so that the data section starts on a multiple of 4096.

use super::{Dtype, Item, TensorInfo, names};
use crate::config::ALIGN;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::borrow::Cow;

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

/// Bytes a tensor adds to the header, at most: for deciding when a shard has enough of them.
///
/// The name stands twice, the second time (in `DCP_SHARDING_INFO`) as JSON within JSON, where a
/// control character takes seven bytes.
pub fn entry_bytes_max(item: &Item) -> u64 {
    let info = &item.info;
    let name = info.name.len() as u64 + names::RESERVED_PREFIX.len() as u64;
    name * 13 + info.shape.len() as u64 * 42 + 160
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
pub fn build(tensors: &[Placed]) -> Vec<u8> {
    // `format` is asked for by Hugging Face transformers, `DCP_SHARDING_INFO` by the Hugging Face
    // reader of torch.distributed.checkpoint. Values are strings: safetensors allows no others.
    let metadata = Metadata {
        format: "pt",
        ringstow: Some(super::manifest::VERSION.to_string()),
        dcp_version: Some("1.0"),
        dcp_sharding_info: Some(in_json(&Sharding(tensors))),
    };
    encode(tensors, &metadata)
}

/// [`build`] for a file of a model's weights, as Hugging Face's programs write them.
pub fn build_model(tensors: &[Placed]) -> Vec<u8> {
    let metadata =
        Metadata { format: "pt", ringstow: None, dcp_version: None, dcp_sharding_info: None };
    encode(tensors, &metadata)
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
            let stored = stored_as(tensor.item);
            let saved_offsets = match (&stored.shape, &tensor.item.part) {
                (Cow::Owned(_), _) => vec![0].into(),
                (Cow::Borrowed(_), Some(part)) => part.offsets.as_slice().into(),
                (Cow::Borrowed(shape), None) => vec![0; shape.len()].into(),
            };
            (stored.name, Saved { saved_offsets })
        }))
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

fn in_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("text, numbers and maps of them can be said in JSON")
}

fn encode(tensors: &[Placed], metadata: &Metadata) -> Vec<u8> {
    let json = in_json(&Header { metadata, tensors });
    let padded = (8 + json.len()).next_multiple_of(ALIGN) - 8;
    let mut header = Vec::with_capacity(8 + padded);
    header.extend_from_slice(&(padded as u64).to_le_bytes());
    header.extend_from_slice(json.as_bytes());
    header.resize(8 + padded, b' ');
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
        let mut file = build(&placed(&tensors));
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
        let header = build(&placed(&tensors));
        let read: Value = serde_json::from_slice(&header[8..]).unwrap();
        let sharding = read["__metadata__"]["DCP_SHARDING_INFO"].as_str().unwrap();
        let sharding: Value = serde_json::from_str(sharding).unwrap();
        assert_eq!(sharding["w"], json!({ "saved_offsets": [2, 0] }));
        assert_eq!(sharding["b"], json!({ "saved_offsets": [] }));
        assert_eq!(read["w"]["shape"], json!([2, 3]));
    }

    #[test]
    fn an_entry_is_never_larger_than_its_estimate() {
        let long = [u64::MAX >> 1, 1, 1, 1];
        for tensor in [
            item("a", Dtype::F8_E4M3FNUZ, &[]),
            item(&"\u{1}".repeat(100), Dtype::F32, &[1, 2, 3]),
            item(&"\"".repeat(50), Dtype::C128, &[7]),
            item("long", Dtype::BOOL, &long),
        ] {
            let shape = tensor.info.shape.clone();
            let part = Some(Part { offsets: shape.clone(), shape });
            let tensor = Item { part, ..tensor };
            let with = Placed { item: &tensor, begin: u64::MAX / 4, end: u64::MAX / 2 };
            let grown = unpadded(&[with]) - unpadded(&[]);
            assert!(grown as u64 <= entry_bytes_max(&tensor), "{} {grown}", tensor.info.name.len());
        }
    }

    fn unpadded(tensors: &[Placed]) -> usize {
        build(tensors).trim_ascii_end().len()
    }
}
