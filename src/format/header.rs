//! The header of a shard, a valid safetensors file: 8 bytes of length (little endian), then JSON
//! padded with spaces so that the data section starts on a multiple of 4096.

use super::{Dtype, Item, names};
use crate::config::ALIGN;
use serde_json::{Map, Value, json};

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

/// The name and type under which an item lies in its shard: its own, or bytes under a reserved name
/// where safetensors has no word for it.
pub fn stored_as(item: &Item) -> (String, safetensors::Dtype, Option<Vec<u64>>) {
    let info = &item.info;
    match info.dtype.safetensors() {
        Some(dtype) if is_plain(item) => (info.name.clone(), dtype, None),
        dtype => {
            let name = format!("{}{}", names::RESERVED_PREFIX, info.name);
            match dtype {
                Some(dtype) => (name, dtype, None),
                None => (name, safetensors::Dtype::U8, info.nbytes().ok().map(|n| vec![n])),
            }
        }
    }
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
    let mut sharding = Map::with_capacity(tensors.len());
    for tensor in tensors {
        let (name, _, raw_shape) = stored_as(tensor.item);
        let offsets = match (raw_shape, &tensor.item.part) {
            (Some(_), _) => vec![0],
            (None, Some(part)) => part.offsets.clone(),
            (None, None) => vec![0; tensor.item.info.shape.len()],
        };
        sharding.insert(name, json!({ "saved_offsets": offsets }));
    }
    // `format` is asked for by Hugging Face transformers, `DCP_SHARDING_INFO` by the Hugging Face
    // reader of torch.distributed.checkpoint. Values are strings: safetensors allows no others.
    let metadata = json!({
        "format": "pt",
        "ringstow": super::manifest::VERSION.to_string(),
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": Value::Object(sharding).to_string(),
    });
    encode(tensors, metadata)
}

/// [`build`] for a file of a model's weights, as Hugging Face's programs write them.
pub fn build_model(tensors: &[Placed]) -> Vec<u8> {
    encode(tensors, json!({ "format": "pt" }))
}

fn encode(tensors: &[Placed], metadata: Value) -> Vec<u8> {
    let mut entries = Map::with_capacity(tensors.len() + 1);
    entries.insert("__metadata__".into(), metadata);
    for tensor in tensors {
        let (name, dtype, raw_shape) = stored_as(tensor.item);
        let entry = json!({
            "dtype": dtype.to_string(),
            "shape": raw_shape.as_ref().unwrap_or(&tensor.item.info.shape),
            "data_offsets": [tensor.begin, tensor.end],
        });
        entries.insert(name, entry);
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    let padded = (8 + json.len()).next_multiple_of(ALIGN) - 8;
    json.resize(padded, b' ');
    let mut header = (padded as u64).to_le_bytes().to_vec();
    header.append(&mut json);
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
    use super::super::{Part, TensorInfo};
    use super::*;

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
