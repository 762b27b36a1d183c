//! Single files as streams: written under an uncommitted name and published whole, or not at all; read ahead and checked.
//!
//! 1. A writer creates `NAME.<unique>.stream-part` beside the file, and locks it as long as it lives.
//! 2. When it is finished, it makes the bytes durable, renames the file into place and syncs the directory. The rename
//!    publishes the file: readers find the earlier one before it, and the new one after it.
//! 3. What a killed writer left has no lock. The next writer of the same file removes it, and so does `prune`.

mod checksums;
pub(crate) mod part;
mod place;
mod reader;
mod writer;

pub use reader::FileReader;
pub use writer::{FileWriter, WriteOptions};
