//! Writes and reads a file as a stream: the program of `docs/streams.md`.

use std::io::{Read, Write};

#[allow(missing_docs)]
pub fn main() -> std::io::Result<()> {
    let mut file = ringstow::open_write("model.bin")?;
    file.write_all(b"weights")?;
    let report = file.finish()?; // dropped without this, nothing is published
    assert_eq!(report.bytes, 7);
    let mut text = String::new();
    ringstow::open_read("model.bin")?.read_to_string(&mut text)?;
    assert_eq!(text, "weights");
    Ok(())
}
