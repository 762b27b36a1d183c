//! The stream that reads a file.

use super::checksums;
use super::place;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::pipeline::job::Job;
use crate::pipeline::report::Moved;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::stream::read::{Checksums, ReadStream};
use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Reads a file as a stream: by io_uring and O_DIRECT where they work, several blocks ahead. If
/// [checksums](crate::WriteOptions::checksums) lie beside the file, it checks each chunk before it hands out a byte.
///
/// ```no_run
/// use std::io::Read;
///
/// # fn main() -> std::io::Result<()> {
/// let mut file = ringstow::Store::found()?.open_read("model.bin")?;
/// let mut weights = Vec::new();
/// file.read_to_end(&mut weights)?;
/// if let Some(why) = file.unchecked() {
///     println!("no checksums were compared: {why}");
/// }
/// # Ok(())
/// # }
/// ```
pub struct FileReader {
    path: PathBuf,
    position: u64,
    bytes: u64,
    unchecked: Option<String>,
    /// `Some` until `drop`.
    stream: Option<ReadStream>,
    /// The process that opened it.
    process: u32,
}

impl FileReader {
    /// Opens a file with a runtime of the caller's; see [`Store::open_read`](crate::Store::open_read).
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub fn open(runtime: &Runtime, path: &Path) -> Result<Self> {
        let real = place::to_read(path)?;
        let job = Job::of(&Config { trace: None, ..runtime.config().clone() });
        let mut stream = ReadStream::open(runtime, &real, &job)?;
        let unchecked = match checksums::read(&real, stream.file())? {
            Err(why) => Some(why),
            Ok(sums) => {
                let chunk_bytes = sums.chunk_bytes as usize;
                let fits = stream.check_by(Checksums { chunk_bytes, crc32: sums.crc32 });
                (!fits).then(|| {
                    format!("block_bytes is not a multiple of their chunks' {chunk_bytes} bytes")
                })
            }
        };
        let bytes = stream.bytes();
        let process = std::process::id();
        Ok(Self { path: path.into(), position: 0, bytes, unchecked, stream: Some(stream), process })
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's length when it was opened.
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Where the next read begins.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Sets where the next read begins. There is nothing to read after the end.
    pub fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// Why no checksums are compared; `None` if they are.
    pub fn unchecked(&self) -> Option<&str> {
        self.unchecked.as_deref()
    }

    /// How the bytes are moved.
    ///
    /// # Errors
    /// [`Error::Invalid`] in a forked child.
    pub fn moved(&mut self) -> Result<&Moved> {
        Ok(self.opened()?.moved())
    }

    /// Reads into `to`, as much as is left; returns how many bytes.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Corrupt`] with the offset; [`Error::Invalid`] in a forked child.
    pub fn read_bytes(&mut self, to: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < to.len() {
            let read = self.read_some(&mut to[done..])?;
            if read == 0 {
                break;
            }
            done += read;
        }
        Ok(done)
    }

    /// Reads no further than to the end of a block.
    fn read_some(&mut self, to: &mut [u8]) -> Result<usize> {
        let position = self.position;
        let bytes = self.opened()?.bytes_at(position)?;
        let read = bytes.len().min(to.len());
        to[..read].copy_from_slice(&bytes[..read]);
        self.position += read as u64;
        Ok(read)
    }

    /// The bytes that were read already and come next, at least one unless the file ends here.
    ///
    /// # Errors
    /// As for [`read_bytes`](FileReader::read_bytes).
    pub fn peek(&mut self) -> Result<&[u8]> {
        let position = self.position;
        self.opened()?.bytes_at(position)
    }

    fn opened(&mut self) -> Result<&mut ReadStream> {
        if self.process != std::process::id() {
            return Err(Error::invalid(format!(
                "{} was opened before this process was forked: open it here",
                self.path.display()
            )));
        }
        Ok(self.stream.as_mut().expect("only `drop` takes it"))
    }
}

impl Read for FileReader {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        Ok(self.read_some(to)?)
    }
}

impl Seek for FileReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, by) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::End(by) => (self.bytes, by),
            SeekFrom::Current(by) => (self.position, by),
        };
        let position = base.checked_add_signed(by).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "the position would be before the file")
        })?;
        self.position = position;
        Ok(position)
    }
}

impl fmt::Debug for FileReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileReader").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.stream.take());
        }
    }
}
