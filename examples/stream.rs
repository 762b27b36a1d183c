//! Writes and reads a file as a stream: the program of `docs/export.md`.

use ringstow::{Store, WriteOptions};
use std::io::{Read, Write};

#[allow(missing_docs)]
pub fn main() -> std::io::Result<()> {
    let store = Store::found()?;
    let mut file = store.open_write("model.bin", WriteOptions::default())?;
    file.write_all(b"weights")?;
    let report = file.finish()?; // dropped without this, nothing is published
    assert_eq!(report.bytes, 7);
    let mut text = String::new();
    store.open_read("model.bin")?.read_to_string(&mut text)?;
    assert_eq!(text, "weights");
    Ok(())
}
