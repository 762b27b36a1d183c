//! The header of a safetensors file: read as the crate safetensors reads it, and written by a save.

use super::SLACK;
use crate::memory;
use ringstow::internals::format::header::{self, Placed, Reader, stored_as};
use ringstow::internals::format::safetensors_header::{Header, Sharding};
use ringstow::{Item, TensorEntry};
use safetensors::tensor::Metadata;
use std::collections::HashSet;

pub fn run(data: &[u8]) {
    let ours = memory::bounded(data.len(), SLACK, || Header::read(data));
    let theirs = serde_json::from_slice::<Metadata>(data);
    let Ok(ours) = ours else { return };
    if let Some(text) = &ours.sharding
        && let Ok(sharding) = memory::bounded(data.len(), SLACK, || Sharding::read(text))
    {
        for tensor in &ours.tensors {
            let _ = sharding.offsets(&tensor.name);
        }
    }
    let names: HashSet<&str> = ours.tensors.iter().map(|tensor| &*tensor.name).collect();
    let is_odd = |tensor: &TensorEntry| tensor.shape.contains(&0);
    // The crate keeps the last of two equal names, and counts the elements of [2^63, 2, 0].
    if names.len() == ours.tensors.len() && !ours.tensors.iter().any(is_odd) {
        let theirs = theirs.expect("what we read, the crate reads");
        check_same(&ours, &theirs);
    }
    check_written(&ours.tensors);
}

fn check_same(ours: &Header, theirs: &Metadata) {
    assert_eq!(ours.data_bytes, theirs.data_len() as u64);
    assert_eq!(ours.tensors.len(), theirs.tensors().len());
    for tensor in &ours.tensors {
        let info = theirs.info(&tensor.name).expect("the crate has the tensor");
        assert_eq!(tensor.dtype.safetensors(), Some(info.dtype));
        assert!(
            tensor.shape.iter().eq(info
                .shape
                .iter()
                .map(|&size| size as u64)
                .collect::<Vec<_>>()
                .iter())
        );
        let begin = tensor.chunks[0].begin;
        let end = begin + tensor.nbytes();
        assert_eq!((begin, end), (info.data_offsets.0 as u64, info.data_offsets.1 as u64));
    }
}

/// The header that a save would write for these tensors has the announced length, and the crate reads it.
fn check_written(tensors: &[TensorEntry]) {
    let items: Vec<Item> = tensors.iter().map(|tensor| Item::from(tensor.info())).collect();
    let names: HashSet<_> = items.iter().map(|item| stored_as(item).name).collect();
    if names.len() < items.len() {
        return;
    }
    let tensor = |number: usize| {
        let (item, begin) = (&items[number], tensors[number].chunks[0].begin);
        Placed { item, begin, end: begin + tensors[number].nbytes() }
    };
    let header = header::Header::new(Reader::Any, items.len(), tensor);
    let mut bytes = vec![0; header.bytes() as usize];
    header.write(0, &mut bytes, tensor);
    let mut piece = vec![0; bytes.len().min(100)];
    let from = bytes.len() / 2;
    piece.truncate(bytes.len() - from);
    header.write(from as u64, &mut piece, tensor);
    assert_eq!(piece, bytes[from..from + piece.len()]);

    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(length + 8, bytes.len() as u64);
    let read = Header::read(&bytes[8..]).unwrap_or_else(|why| panic!("{why}"));
    assert!(read.is_own);
    let sharding = read.sharding.expect("a save writes it");
    let sharding = Sharding::read(&sharding).unwrap();
    for (number, item) in items.iter().enumerate() {
        let stored = stored_as(item);
        let entry = read.tensors.iter().find(|entry| entry.name == stored.name).unwrap();
        assert_eq!(entry.chunks[0].begin, tensors[number].chunks[0].begin);
        assert_eq!(sharding.offsets(&stored.name), Some(&vec![0; stored.shape.len()][..]));
    }
}
