//! Reads bytes of a checkpoint's files as they are, for other processes, which check them.

use crate::error::{Error, Result};
use crate::limits::ALIGN;
use crate::object::{Bucket, is_url, split};
use crate::pipeline::load::{FileOwner, ShardFile, open_shard};
use crate::store::read::checkpoint::Checkpoint;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// An open file of a checkpoint.
#[derive(Debug)]
pub struct ShardSource {
    shard: ShardFile,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    File {
        /// Past the page cache, if the file system can.
        direct: Option<File>,
        buffered: OnceLock<File>,
    },
    Object(Bucket, String),
}

impl Checkpoint {
    /// Opens a file of the checkpoint by its number; `direct` reads past the page cache where that works.
    ///
    /// # Errors
    /// The system's; [`Error::Replaced`] if it may be of another save by now.
    pub fn source(&self, file: usize, direct: bool) -> Result<ShardSource> {
        let shard = self.files[file].clone();
        let failed = |error| Error::io("opening", &shard.path, error);
        let kind = match is_url(&shard.path) {
            true => {
                let (dir, name) = split(&shard.path)?;
                Kind::Object(Bucket::at(&dir)?, name)
            }
            false => {
                let direct = direct.then(|| open_shard(&shard, true).ok()).flatten();
                let buffered = OnceLock::new();
                if direct.is_none() {
                    let _ = buffered.set(open_shard(&shard, false).map_err(failed)?);
                }
                Kind::File { direct, buffered }
            }
        };
        self.check_same(true)?;
        Ok(ShardSource { shard, kind })
    }
}

impl ShardSource {
    /// Reads `len` bytes from an offset on, a multiple of 4096, to the beginning of `to`, which is aligned to pages and
    /// has room for whole ones.
    ///
    /// # Errors
    /// The system's or the store's; [`io::ErrorKind::UnexpectedEof`] if the file was cut.
    pub fn read(&self, offset: u64, len: usize, to: &mut [u8]) -> io::Result<()> {
        match &self.kind {
            Kind::Object(bucket, name) => {
                to[..len].copy_from_slice(&bucket.read_range(name, offset, len)?);
                Ok(())
            }
            Kind::File { direct: Some(file), buffered } => {
                let pages = &mut to[..len.next_multiple_of(ALIGN)];
                read_at_least(file, offset, len, pages)
                    .or_else(|_| self.buffered(buffered)?.read_exact_at(&mut to[..len], offset))
            }
            Kind::File { direct: None, buffered } => {
                self.buffered(buffered)?.read_exact_at(&mut to[..len], offset)
            }
        }
    }

    /// The failure of a read.
    pub fn failed(&self, offset: u64, error: io::Error) -> Error {
        Error::io_at("reading", &self.shard.path, offset, error)
    }

    /// The file without O_DIRECT, which some file systems refuse only when it comes to reading.
    fn buffered<'a>(&self, opened: &'a OnceLock<File>) -> io::Result<&'a File> {
        if opened.get().is_none() {
            let _ = opened.set(open_shard(&self.shard, false)?);
        }
        Ok(opened.get().expect("it was just opened"))
    }
}

/// Fills at least `len` bytes of whole pages: the last page of a file has fewer.
fn read_at_least(file: &File, offset: u64, len: usize, to: &mut [u8]) -> io::Result<()> {
    let mut got = 0;
    while got < len {
        match file.read_at(&mut to[got..], offset + got as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            // O_DIRECT goes on from whole pages only.
            Ok(more) if got + more < len && !more.is_multiple_of(ALIGN) => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;
    use crate::pool::Buffer;
    use crate::store::Checkpoint;

    #[test]
    fn bytes_are_those_of_the_file_with_and_without_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let data: Vec<u8> = (0..3 * ALIGN + 100).map(|n| n as u8).collect();
        let mut state = StateDict::new();
        state.bytes("w", crate::Dtype::U8, &[data.len() as u64], &data).unwrap();
        crate::save(&state, &path).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let shard = std::fs::read(&checkpoint.files[0].path).unwrap();
        let mut to = Buffer::alone(4 * ALIGN).unwrap();
        for direct in [true, false] {
            let source = checkpoint.source(0, direct).unwrap();
            let at = shard.len() / ALIGN * ALIGN - ALIGN;
            let len = shard.len() - at;
            source.read(at as u64, len, &mut to[..]).unwrap();
            assert_eq!(to[..len], shard[at..]);
            let beyond = source.read(at as u64, len + 1, &mut to[..]).unwrap_err();
            assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn file_of_another_save_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let save = |data: [u8; 1]| {
            let mut state = StateDict::new();
            state.bytes("w", crate::Dtype::U8, &[1], &data).unwrap();
            crate::save(&state, &path).unwrap();
        };
        save([1]);
        let checkpoint = Checkpoint::open(&path).unwrap();
        save([2]);
        assert!(checkpoint.source(0, false).is_err());
    }
}
