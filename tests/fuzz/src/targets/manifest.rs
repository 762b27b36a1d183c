//! A manifest's JSON. The trailer is added here: no fuzzer finds a checksum.

use super::{SLACK, values};
use crate::memory;
use ringstow::internals::plan::load::{Unit, Want};
use ringstow::internals::plan::slab::{Dense, Place, Slab, dense_strides};
use ringstow::{Manifest, TensorEntry, Value};
use std::path::Path;

/// The file's bytes, as if ringstow had written them. `body` lacks the last brace.
pub fn sealed(body: &[u8]) -> Vec<u8> {
    let trailer = format!(",\"crc32\":\"{:08x}\"}}\n", crc32fast::hash(body));
    [body, trailer.as_bytes()].concat()
}

pub fn run(data: &[u8]) {
    let path = Path::new("manifest.json");
    let _ = Manifest::decode(data.to_vec(), path);
    let bytes = sealed(data);
    let decode = || Manifest::decode(bytes.clone(), path);
    let manifest = memory::bounded(bytes.len(), SLACK, decode);
    let listed =
        memory::bounded(bytes.len(), SLACK, || Manifest::decode_files(bytes.clone(), path));
    let Ok(manifest) = manifest else { return };
    let listed = listed.expect("a manifest's files are read alone, too");
    assert_eq!(listed.files, manifest.files);
    assert!(listed.next_generation() > listed.generation || listed.generation == u64::MAX);

    let written = manifest.encode().unwrap();
    let again = Manifest::decode(written.clone(), path).expect("what is written is read");
    assert_eq!((&again.files, &again.tensors), (&manifest.files, &manifest.tensors));
    assert_eq!(again.state.get(), manifest.state.get());
    assert_eq!(again.encode().unwrap(), written);
    manifest.tensors.iter().for_each(|tensor| check_tensor(&manifest, tensor));
    check_plan(&manifest);
    if let Ok(value) = Value::from_json(&manifest.state) {
        values::check(&value);
    }
}

fn elements(sizes: &[u64]) -> u128 {
    if sizes.contains(&0) { 0 } else { sizes.iter().map(|&size| u128::from(size)).product() }
}

fn check_tensor(manifest: &Manifest, tensor: &TensorEntry) {
    assert_eq!(tensor.info().nbytes().unwrap(), tensor.nbytes());
    assert!(tensor.held_bytes() <= tensor.nbytes());
    let held = tensor.chunks.iter().map(|chunk| elements(chunk.sizes().unwrap_or(&tensor.shape)));
    let holes = tensor.holes();
    let lost = holes.iter().map(|(_, sizes)| elements(sizes));
    assert_eq!(held.sum::<u128>() + lost.sum::<u128>(), elements(&tensor.shape), "{tensor:?}");
    assert!(manifest.part_of.is_some() || holes.is_empty());
    for chunk in &tensor.chunks {
        let sizes = chunk.sizes().unwrap_or(&tensor.shape);
        let file_bytes = manifest.files[chunk.file as usize].bytes;
        let array =
            Dense { file: chunk.file as usize, begin: chunk.begin, dtype: tensor.dtype, sizes };
        let strides = dense_strides(tensor.dtype, sizes);
        let slab =
            Slab::new(array, &vec![0; sizes.len()], sizes, Place { at: 0, strides: &strides });
        let Ok(Some(slab)) = slab else {
            assert!(slab.is_ok(), "a whole chunk can be read: {slab:?}");
            continue;
        };
        assert_eq!(slab.nbytes(), tensor.dtype.nbytes(sizes).unwrap());
        slab.spans(4096, &mut |span| assert!(span.start < span.end && span.end <= file_bytes));
    }
}

/// The reads of everything lie within the files, and cover them.
fn check_plan(manifest: &Manifest) {
    let file_bytes: Vec<u64> = manifest.files.iter().map(|file| file.bytes).collect();
    let unit = Unit::Blocks { bytes: manifest.block_bytes, most: 4 << 20 };
    let all = |(file, &bytes)| Want { file, range: 0..bytes };
    let wants: Vec<Want> = file_bytes.iter().enumerate().map(all).collect();
    let reads = unit.reads(&wants, &file_bytes);
    assert!(reads.iter().all(|read| read.range().end <= file_bytes[read.file]));
    let read: u128 = reads.iter().map(|read| read.len as u128).sum();
    assert_eq!(read, file_bytes.iter().map(|&bytes| u128::from(bytes)).sum());
}
