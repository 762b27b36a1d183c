//! The index of another program's model.

use super::SLACK;
use crate::memory;
use ringstow::internals::format::model_index::ModelIndex;
use ringstow::internals::format::names::is_plain;
use std::collections::HashMap;

#[derive(serde::Deserialize)]
struct Plain {
    weight_map: HashMap<String, String>,
}

pub fn run(data: &[u8]) {
    let ours = memory::bounded(data.len(), SLACK, || ModelIndex::read(data));
    let plain = serde_json::from_slice::<Plain>(data);
    let Ok(index) = ours else { return };
    let Plain { weight_map } = plain.expect("what we read is JSON");
    assert_eq!(index.tensors().count(), weight_map.len());
    for (tensor, file) in index.tensors() {
        assert_eq!(weight_map.get(tensor).map(String::as_str), Some(file));
        assert_eq!(index.file_of(tensor), Some(file));
        assert!(is_plain(file));
        assert!(!std::path::Path::new(file).is_absolute() && !file.contains('/'));
    }
}
