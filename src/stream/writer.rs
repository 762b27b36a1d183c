//! The stream that writes a file.

use super::checksums;
use super::part::{self, Clearing, Part};
use super::place;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::file_sums::{self, FileSums};
use crate::pipeline::job::Job;
use crate::pipeline::report::{WriteReport, WriteSeconds};
use crate::pipeline::runtime::Runtime;
use crate::pipeline::stream::write::WriteStream;
use crate::sys::open_dir::Dir;
use crate::sys::{dir, file};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How [`open_write`](crate::Store::open_write) writes a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Whether a file that has the name is replaced. If not, opening fails while one is there, and so does publishing if
    /// one has come meanwhile.
    pub overwrite: bool,
    /// Whether the checksums are stored, in `NAME.ringstow` beside the file. [`FileReader`](crate::FileReader) checks
    /// by them.
    pub checksums: bool,
}

impl Default for WriteOptions {
    /// Replaces a file, and stores no checksums.
    fn default() -> Self {
        Self { overwrite: true, checksums: false }
    }
}

/// Writes a file as a stream: by io_uring and O_DIRECT where they work, and published whole by
/// [`finish`](FileWriter::finish), or not at all. Until then, and whatever happens, an earlier file is untouched.
///
/// ```no_run
/// use std::io::Write;
///
/// # fn main() -> std::io::Result<()> {
/// let mut file = ringstow::Store::found()?.open_write("model.bin", ringstow::WriteOptions::default())?;
/// file.write_all(b"weights")?;
/// let report = file.finish()?; // dropped without this, nothing is published
/// println!("{} bytes, crc32 {:08x}", report.bytes, report.crc32);
/// # Ok(())
/// # }
/// ```
pub struct FileWriter {
    path: PathBuf,
    position: u64,
    /// `None` after a failure.
    open: Option<Open>,
    /// The process that opened it. A forked child has neither its threads nor its locks.
    process: u32,
}

/// An unfinished file. The fields are dropped in this order: no transfer is in flight when the file is removed.
struct Open {
    stream: WriteStream,
    part: Part,
    target: PathBuf,
    options: WriteOptions,
    started: Instant,
    prepare: f64,
}

impl FileWriter {
    /// Opens a file with a runtime of the caller's; see [`Store::open_write`](crate::Store::open_write).
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub fn open(runtime: &Runtime, path: &Path, options: WriteOptions) -> Result<Self> {
        let started = Instant::now();
        let target = place::to_write(path, options.overwrite)?;
        clear_leftovers(&target);
        let part = Part::create(&target)?;
        let job = Job::of(&Config { trace: None, ..runtime.config().clone() });
        let stream = WriteStream::open(runtime, part.path(), path, job)?;
        // Before the first byte of what may be secret.
        take_permissions(&stream, &target)?;
        let prepare = started.elapsed().as_secs_f64();
        let open = Some(Open { stream, part, target, options, started, prepare });
        Ok(Self { path: path.into(), position: 0, open, process: std::process::id() })
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes written so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Writes all of these bytes. They are copied before this returns; it waits for the disk while no buffer is free.
    ///
    /// # Errors
    /// [`Error::Io`] with the offset, also of an earlier write; then nothing can be published, and what was written is
    /// removed. [`Error::Invalid`] after such a failure, and in a forked child.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let outcome = self.opened()?.stream.write(bytes);
        match outcome {
            Ok(()) => self.position += bytes.len() as u64,
            Err(_) => self.open = None,
        }
        outcome
    }

    /// Makes the file durable and publishes it under its name.
    ///
    /// # Errors
    /// As for [`write_bytes`](FileWriter::write_bytes); [`Error::Io`] of [`io::ErrorKind::AlreadyExists`] if it must not
    /// replace a file. Then an earlier file is untouched, unless the message says that this one is published.
    pub fn finish(mut self) -> Result<WriteReport> {
        self.opened()?;
        let open = self.open.take().expect("it is open");
        open.publish(&self.path)
    }

    /// Publishes nothing, and removes what was written; every later call fails. Dropping it does the same.
    pub fn abort(&mut self) {
        if self.process == std::process::id() {
            self.open = None;
        }
    }

    fn opened(&mut self) -> Result<&mut Open> {
        let shown = self.path.display();
        if self.process != std::process::id() {
            return Err(Error::invalid(format!(
                "{shown} was opened before this process was forked: write it in the process that opened it, or open \
                 it here"
            )));
        }
        self.open.as_mut().ok_or_else(|| {
            Error::invalid(format!(
                "writing {shown} has failed before or was aborted, and nothing is published: open it anew"
            ))
        })
    }
}

impl Open {
    fn publish(mut self, path: &Path) -> Result<WriteReport> {
        let publishing = Instant::now();
        // Again: they may have changed since.
        take_permissions(&self.stream, &self.target)?;
        self.stream.finish()?;
        let (stream, target) = (&self.stream, &self.target);
        let sums = match self.options.checksums {
            true => Some(self.write_checksums()?),
            false => None,
        };
        self.part.publish(target, self.options.overwrite)?;
        let published = |error: Error| error.hinted(PUBLISHED);
        match sums {
            Some(mut sums) => {
                sums.publish(&checksums::beside(target), true).map_err(published)?;
            }
            None => checksums::remove_stale(target),
        }
        target.parent().map_or(Ok(()), dir::sync).map_err(published)?;
        let (bytes, chunk_bytes) = (stream.position(), stream.checksum_bytes());
        Ok(WriteReport {
            path: path.into(),
            bytes,
            crc32: file_sums::of_all(stream.crc32(), bytes, chunk_bytes),
            checksums: self.options.checksums,
            moved: stream.moved().clone(),
            seconds: WriteSeconds {
                prepare: self.prepare,
                wait: stream.waited().as_secs_f64(),
                publish: publishing.elapsed().as_secs_f64(),
                total: self.started.elapsed().as_secs_f64(),
            },
        })
    }

    fn write_checksums(&self) -> Result<Part> {
        let failed = |error| Error::io("opening", &*self.target, error);
        let content = checksums::content(self.stream.file()).map_err(failed)?;
        let (chunk_bytes, crc32) = (self.stream.checksum_bytes(), self.stream.crc32().to_vec());
        let sums = FileSums::new(content, chunk_bytes, crc32);
        checksums::write(&checksums::beside(&self.target), &sums)
    }
}

const PUBLISHED: &str = "the file is published, but may not survive a crash or power cut, or lacks its checksums; \
                         write it again";

fn take_permissions(stream: &WriteStream, target: &Path) -> Result<()> {
    file::take_permissions(stream.file(), target)
        .map_err(|e| Error::io("keeping the permissions of", target, e))
}

/// Removes what killed writers of this file left. It takes space, and nothing else, so a failure is only logged.
fn clear_leftovers(target: &Path) {
    let beside = checksums::beside(target);
    for of in [target, &beside] {
        let clearing = Clearing { of: Some(of), removes: true, no_other_writers: false };
        if let Some(dir) = of.parent()
            && let Err(error) = Dir::open(dir).and_then(|dir| part::clear(&dir, clearing))
        {
            tracing::warn!(%error, "could not remove what killed streams left");
        }
    }
}

impl io::Write for FileWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_bytes(bytes)?;
        Ok(bytes.len())
    }

    /// Does nothing: no byte is durable before [`FileWriter::finish`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWriter").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its threads are the parent's, and so is the file.
            std::mem::forget(self.open.take());
        }
    }
}
