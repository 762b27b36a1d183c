//! A configuration file.

use super::SLACK;
use crate::memory;
use ringstow::internals::config::found::parse;
use std::path::Path;

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let path = Path::new("ringstow.toml");
    // toml takes many times a text's size: only short files are read, so that this is within the 1 MiB.
    let parsed = memory::bounded(data.len(), memory::CONSTANT.max(SLACK), || parse(text, path));
    let Ok((table, config)) = parsed else { return };
    assert_eq!(table.clone().try_into(), Ok(config.clone()));
    config.validate().expect("a configuration that was read is valid");
    assert!((2..=1 << 14).contains(&config.buffers()) && config.filler_threads() > 0);
    assert!(config.checksum_bytes() <= config.block_bytes);
    let written = toml::to_string(&config).unwrap();
    let (_, again) = parse(&written, path).unwrap_or_else(|why| panic!("{why}: {written}"));
    assert_eq!(again, config);
}
