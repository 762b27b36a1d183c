//! Headers, read back by the safetensors library and compared with serde_json.

use super::*;
use crate::format::Region;
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

fn header<'a>(tensors: &[Placed<'a>], reader: Reader) -> Header {
    Header::new(reader, tensors.len(), |n| tensors[n].clone())
}

fn written(tensors: &[Placed], reader: Reader) -> Vec<u8> {
    let header = header(tensors, reader);
    let mut bytes = vec![0; header.bytes() as usize];
    header.write(0, &mut bytes, |n| tensors[n].clone());
    bytes
}

#[test]
fn safetensors_library_reads_a_header() {
    let tensors = [
        item("empty", Dtype::I64, &[0, 5]),
        item("größe \u{1F980}\n\"", Dtype::F32, &[2, 3]),
        item("", Dtype::BF16, &[]),
        item("z", Dtype::C128, &[3]),
        item("__metadata__", Dtype::U8, &[1]),
        Item { object: true, ..item("blob", Dtype::U8, &[7]) },
    ];
    let mut file = written(&placed(&tensors), Reader::Any);
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
fn region_has_its_offsets_in_the_header() {
    let region = Some(Region { shape: vec![4, 3], offsets: vec![2, 0] });
    let tensors = [Item { region, ..item("w", Dtype::U8, &[2, 3]) }, item("b", Dtype::U8, &[])];
    let header = written(&placed(&tensors), Reader::Any);
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
    let shape = prop::collection::vec(prop_oneof![0..3u64, any::<u16>().prop_map(u64::from)], 0..4);
    let dtype = prop::sample::select(Dtype::ALL);
    (name, dtype, shape, any::<(bool, bool)>()).prop_map(|(name, dtype, shape, (boxed, object))| {
        let region = boxed.then(|| Region {
            offsets: shape.iter().map(|&n| n * 7).collect(),
            shape: shape.clone(),
        });
        let (dtype, shape) =
            if dtype.nbytes(&shape).is_some() { (dtype, shape) } else { (Dtype::U8, vec![5]) };
        let region = region.filter(|region| region.shape.len() == shape.len());
        Item { region, object, ..item(&name, dtype, &shape) }
    })
}

proptest! {
    #[test]
    fn length_is_exact_except_for_digits_of_offsets(
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
        let built = written(&placed, reader);
        // The first of the sharding's items has no comma before it.
        let comma = u64::from(reader == Reader::Any && !items.is_empty());
        let json = built.trim_ascii_end().len() as u64 + spare + comma;
        prop_assert_eq!(length.bytes_max(), json.next_multiple_of(ALIGN as u64));
        prop_assert!(built.len() as u64 <= length.bytes_max());
        prop_assert_eq!(length.file_bytes_max(), length.bytes_max() + length.data);
    }

    #[test]
    fn header_is_the_same_in_runs_of_any_length(
        items in prop::collection::vec(any_item(), 0..80),
        reader in prop::sample::select(vec![Reader::Any, Reader::Model]),
        run in 1..5000usize,
    ) {
        let placed = placed(&items);
        let (header, whole) = (header(&placed, reader), written(&placed, reader));
        let mut runs = vec![0; whole.len()];
        for (number, to) in runs.chunks_mut(run).enumerate() {
            header.write((number * run) as u64, to, |n| placed[n].clone());
        }
        prop_assert_eq!(runs, whole);
    }

    #[test]
    fn header_is_compact_json(
        items in prop::collection::vec(any_item(), 0..40),
    ) {
        let mut offsets = String::from("{");
        let mut entries = String::new();
        for Placed { item, begin, end } in placed(&items) {
            let Stored { name, dtype, shape } = stored_as(item);
            let comma = if offsets.len() > 1 { "," } else { "" };
            let saved = json!({ "saved_offsets": saved_offsets(item) });
            offsets += &format!("{comma}{}:{saved}", json!(name));
            let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
            entries += &format!(",{}:{entry}", json!(name));
        }
        let metadata = json!({
            "format": "pt",
            "ringstow": "1",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": offsets + "}",
        });
        let header = written(&placed(&items), Reader::Any);
        let text = format!("{{\"__metadata__\":{metadata}{entries}}}");
        prop_assert_eq!(std::str::from_utf8(header[8..].trim_ascii_end()).unwrap(), text);
        prop_assert_eq!(u64::from_le_bytes(header[..8].try_into().unwrap()) + 8, header.len() as u64);
    }
}

#[test]
fn length_is_at_most_two_percent_too_long() {
    let items: Vec<Item> = (0..10_000)
        .map(|i| item(&format!("layers.{}.attention.weight", i), Dtype::F32, &[1 + i % 512, 16]))
        .collect();
    let length = |reader| {
        let with = |length: Length, item: &Item| length.with(item, item.info.nbytes().unwrap());
        items.iter().fold(Length::empty(reader), with).bytes_max()
    };
    for reader in [Reader::Any, Reader::Model] {
        let built = written(&placed(&items), reader).len() as u64;
        assert!((built..=built + built / 50).contains(&length(reader)), "{built}");
    }
}
