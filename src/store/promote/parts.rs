//! The parts that files are sent in, and the threads that send them.

use super::Promotion;
use super::journal::{Cut, Journal};
use super::patience::is_passing;
use super::target::{Target, Upload};
use crate::error::{Error, Result};
use crate::format::FileEntry;
use crate::pipeline::blocks::Blocks;
use crate::pipeline::job::Job;
use crate::pipeline::pace::{Pace, wait_until};
use crate::pipeline::workers::scoped_workers;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Stores take no smaller part, the last one excepted.
pub(super) const PART_MIN: u64 = 5 << 20;
/// Memory is bounded by parts, so these are, too.
pub(super) const PART_MAX: u64 = 256 << 20;
/// Memory of all parts that are sent at the same time, at most.
const MEMORY_MAX: u64 = 1 << 30;
/// Stores take no more parts of one object.
const PARTS_MAX: u64 = 10_000;
/// What is read at once.
const BLOCK: u64 = 4 << 20;

/// A range of a file that is sent at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub file: usize,
    /// Its number among the file's parts.
    pub number: usize,
    pub cut: Cut,
}

impl Part {
    fn range(&self) -> Range<u64> {
        let start = self.number as u64 * self.cut.part_bytes;
        start..(start + self.cut.part_bytes).min(self.cut.bytes)
    }

    fn bytes(&self) -> u64 {
        self.range().end - self.range().start
    }

    /// Blocks that it takes.
    pub fn blocks(&self, block_bytes: u64) -> usize {
        self.bytes().div_ceil(block_bytes).max(1) as usize
    }
}

/// How many of these parts are sent at the same time, at most `uploads`, and the blocks of memory that they take: all of the
/// largest. They fit into [`MEMORY_MAX`], unless a single one does not.
pub(super) fn at_once(parts: &[Part], uploads: usize, block_bytes: u64) -> (usize, usize) {
    let largest = parts.iter().map(|part| part.blocks(block_bytes)).max().unwrap_or(1);
    let most = MEMORY_MAX / block_bytes / largest as u64;
    let uploads = (uploads as u64).min(most).max(1) as usize;
    (uploads, uploads * largest)
}

/// Bytes of a block: whole checksum chunks.
pub(super) fn block_bytes(checksum_bytes: u64) -> u64 {
    (BLOCK / checksum_bytes).max(1) * checksum_bytes
}

/// Cuts files into parts of whole checksum chunks. Those of `at_once` files take turns, so that small files do not wait for a large one.
pub(super) fn parts_of(
    files: &[FileEntry],
    chosen: &[usize],
    (part_bytes, checksum_bytes): (u64, u64),
    at_once: usize,
) -> Vec<Part> {
    let mut parts = Vec::new();
    for group in chosen.chunks(at_once) {
        let mut of_group: Vec<Part> = group
            .iter()
            .flat_map(|&file| cut(file, files[file].bytes, part_bytes, checksum_bytes))
            .collect();
        of_group.sort_by_key(|part| part.number);
        parts.extend(of_group);
    }
    parts
}

fn cut(
    file: usize,
    bytes: u64,
    part_bytes: u64,
    checksum_bytes: u64,
) -> impl Iterator<Item = Part> {
    let least = part_bytes.max(bytes.div_ceil(PARTS_MAX));
    let cut = Cut { bytes, part_bytes: least.next_multiple_of(checksum_bytes) };
    (0..cut.parts()).map(move |number| Part { file, number, cut })
}

/// What to do about a promotion that failed.
pub(super) const AGAIN: &str = "promote again: what was sent is not sent again";

/// What is being sent.
pub(super) struct Sending<'a> {
    target: &'a dyn Target,
    names: &'a [String],
    blocks: &'a Blocks<'a>,
    journal: &'a Journal,
    job: &'a Arc<Job>,
    pace: Option<Pace>,
    uploads: usize,
    sent: AtomicU64,
    /// The uploads that were begun, by file.
    open: Mutex<BTreeMap<usize, Arc<Mutex<Begun>>>>,
    failure: Mutex<Option<Error>>,
}

/// An upload of a file, and its parts that the store has.
#[derive(Default)]
struct Begun {
    upload: Option<Upload>,
    parts: BTreeMap<usize, String>,
    /// Whether one thread has all parts and makes them an object.
    is_whole: bool,
}

impl Begun {
    fn new(upload: Upload, parts: BTreeMap<usize, String>) -> Self {
        Self { upload: Some(upload), parts, is_whole: false }
    }

    fn has(&self, part: usize) -> bool {
        self.is_whole || self.parts.contains_key(&part)
    }
}

impl<'a> Sending<'a> {
    pub fn new(
        (target, names): (&'a dyn Target, &'a [String]),
        blocks: &'a Blocks<'a>,
        journal: &'a Journal,
        how: Promotion,
        job: &'a Arc<Job>,
    ) -> Self {
        let (pace, uploads) = (Pace::new(how.rate), how.uploads);
        let (sent, open, failure) = Default::default();
        Self { target, names, blocks, journal, job, pace, uploads, sent, open, failure }
    }

    /// Sends the parts, and returns how many bytes that were.
    ///
    /// # Errors
    /// The first failure; what was sent stays in the journal.
    pub fn run(&self, parts: Vec<Part>) -> Result<u64> {
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(part) = parts.get(next.fetch_add(1, Relaxed)) {
                if self.job.stopped() || self.has_failed() {
                    return;
                }
                if let Err(error) = self.send(part) {
                    self.failure.lock().expect("no panic while it is held").get_or_insert(error);
                }
            }
        };
        scoped_workers((self.uploads.min(parts.len()), Default::default()), work, || {
            self.job.cancel()
        });
        match self.failure.lock().expect("no panic while it is held").take() {
            Some(error) => Err(error),
            None if self.job.stopped() => {
                Err(Error::Cancelled { path: self.target.place().to_path_buf() })
            }
            None => Ok(self.sent.load(Relaxed)),
        }
    }

    fn has_failed(&self) -> bool {
        self.failure.lock().expect("no panic while it is held").is_some()
    }

    fn send(&self, part: &Part) -> Result<()> {
        if part.cut.parts() == 1 {
            let bytes = self.read(part)?;
            let name = &self.names[part.file];
            let sent = self.target.send(name, bytes, &|bytes| self.pace(bytes));
            sent.map_err(|error| {
                Error::io("sending", self.target.place().join(name), error).hinted(AGAIN)
            })?;
            self.note(part, true);
            return Ok(());
        }
        let begun = self.begun(part)?;
        let known = begun.lock().expect("no panic while it is held").has(part.number);
        if known {
            self.note(part, false);
        } else {
            self.send_part(part, &begun)?;
        }
        self.finish_if_whole(part, &begun)
    }

    fn read(&self, part: &Part) -> Result<Vec<crate::pipeline::blocks::Checked>> {
        self.blocks.read(part.file, part.range())
    }

    /// Waits until the rate allows so many bytes more.
    fn pace(&self, bytes: u64) {
        if let Some(pace) = &self.pace {
            wait_until(pace.earned(Instant::now(), bytes as usize), self.job);
        }
    }

    fn note(&self, part: &Part, is_sent: bool) {
        if is_sent {
            self.sent.fetch_add(part.bytes(), Relaxed);
        }
        self.job.add_written(part.bytes());
    }

    /// The upload of a part's file: that of an earlier promotion, or a new one.
    fn begun(&self, part: &Part) -> Result<Arc<Mutex<Begun>>> {
        let begun = {
            let mut open = self.open.lock().expect("no panic while it is held");
            open.entry(part.file).or_default().clone()
        };
        let mut known = begun.lock().expect("no panic while it is held");
        if known.upload.is_none() {
            let name = &self.names[part.file];
            *known = match self.journal.resumed(name, part.cut) {
                Some((upload, mut parts)) => {
                    parts.retain(|_, answer| self.target.keeps(answer));
                    Begun::new(upload, parts)
                }
                None => self.begin(name, part.cut)?,
            };
        }
        drop(known);
        Ok(begun)
    }

    fn begin(&self, name: &str, cut: Cut) -> Result<Begun> {
        let upload = self.target.begin(name, cut.bytes);
        let upload = upload.map_err(|error| {
            Error::io("beginning to send", self.target.place().join(name), error).hinted(AGAIN)
        })?;
        self.journal.begun(&upload, cut)?;
        Ok(Begun::new(upload, BTreeMap::new()))
    }

    fn send_part(&self, part: &Part, begun: &Mutex<Begun>) -> Result<()> {
        let upload = begun.lock().expect("no panic while it is held").upload.clone();
        let upload = upload.expect("it was begun");
        let bytes = self.read(part)?;
        let (at, paced) = ((part.number, part.range().start), |bytes| self.pace(bytes));
        let there = match self.target.put_part(&upload, at, bytes, &paced) {
            Ok(there) => there,
            Err(error) => return self.failed(part, &upload, "sending", error),
        };
        self.journal.sent(&upload, part.number, &there);
        begun.lock().expect("no panic while it is held").parts.insert(part.number, there);
        self.note(part, true);
        Ok(())
    }

    /// What becomes of a part or an upload that failed. It is no failure if the whole object is there by now: a request of a
    /// promotion that was killed may arrive late. An upload of an earlier promotion that the store refuses is not gone on with.
    fn failed(
        &self,
        part: &Part,
        upload: &Upload,
        doing: &'static str,
        error: io::Error,
    ) -> Result<()> {
        use io::ErrorKind::{InvalidInput, NotFound, PermissionDenied};
        if self.job.stopped() {
            return Err(Error::Cancelled { path: self.target.place().to_path_buf() });
        }
        // A store that does not answer would not say that either.
        if !is_passing(&error) && self.has(&upload.name, part.cut.bytes) {
            return Ok(());
        }
        if matches!(error.kind(), InvalidInput | NotFound | PermissionDenied) {
            self.journal.refused(&upload.name);
        }
        let path = self.target.place().join(&upload.name);
        let error = Error::io_at(doing, path, part.range().start, error);
        Err(error.hinted(AGAIN))
    }

    fn has(&self, name: &str, bytes: u64) -> bool {
        self.target.missing(&[(name, bytes)]).is_ok_and(|missing| missing.is_empty())
    }

    fn finish_if_whole(&self, part: &Part, begun: &Mutex<Begun>) -> Result<()> {
        let (upload, parts) = {
            let mut known = begun.lock().expect("no panic while it is held");
            if known.is_whole || known.parts.len() < part.cut.parts() {
                return Ok(());
            }
            known.is_whole = true;
            let upload = known.upload.clone().expect("it was begun");
            (upload, std::mem::take(&mut known.parts).into_values().collect())
        };
        match self.target.finish(&upload, part.cut.bytes, parts) {
            Ok(()) => {
                self.journal.finished(&upload);
                Ok(())
            }
            Err(error) => self.failed(part, &upload, "finishing", error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn file(bytes: u64) -> FileEntry {
        FileEntry { name: String::new(), bytes, crc32: Vec::new(), hashes: Vec::new() }
    }

    /// The begin and the end of a file's parts.
    fn spans(parts: &[Part], file: usize) -> Vec<(u64, u64)> {
        let own = parts.iter().filter(|part| part.file == file);
        own.map(|part| (part.range().start, part.range().end)).collect()
    }

    #[test]
    fn parts_cover_each_chosen_file_in_whole_checksum_chunks() {
        let files = [file(70 * MIB + 3), file(9), file(16 * MIB)];
        let parts = parts_of(&files, &[0, 2], (15 * MIB + 1, MIB), 2);
        let ends = [16, 32, 48, 64].map(|end| end * MIB);
        let whole = ends.map(|end| (end - 16 * MIB, end));
        assert_eq!(spans(&parts, 0), [&whole[..], &[(64 * MIB, 70 * MIB + 3)]].concat());
        assert_eq!(spans(&parts, 1), []);
        assert_eq!(spans(&parts, 2), [(0, 16 * MIB)]);
    }

    #[test]
    fn large_file_gets_no_more_parts_than_stores_take() {
        let bytes = 3_000_000 * MIB + 1;
        let parts: Vec<Part> = cut(0, bytes, 16 * MIB, MIB).collect();
        assert!(parts.len() as u64 <= PARTS_MAX, "{}", parts.len());
        assert_eq!(parts.last().unwrap().range().end, bytes);
        assert!(parts.iter().all(|part| part.cut.parts() == parts.len()));
    }

    #[test]
    fn parts_that_are_sent_at_the_same_time_fit_into_the_memory_for_them() {
        // Bytes of a file, what was asked for: uploads and bytes of a part; then uploads, and the MiB that they take.
        for (bytes, (uploads, part_bytes), expected) in [
            (GIB, (4, 16 * MIB), (4, 64)),
            (3 * MIB, (4, 16 * MIB), (4, 16)),
            (64 * GIB, (64, 256 * MIB), (4, 1024)),
            (5001 * GIB, (4, 16 * MIB), (1, 516)), // parts of 512 MiB and a little
            (100_000 * GIB, (64, 16 * MIB), (1, 10_240)),
        ] {
            let parts: Vec<Part> = cut(0, bytes, part_bytes, MIB).take(2).collect();
            let (uploads, blocks) = at_once(&parts, uploads, 4 * MIB);
            assert_eq!((uploads, blocks * 4), expected, "{bytes}");
        }
        assert_eq!(at_once(&[], 4, 4 * MIB), (4, 4));
        // Blocks are as long as a checkpoint's checksum chunks, which may be long.
        let parts: Vec<Part> = cut(0, GIB, 16 * MIB, 512 * MIB).collect();
        assert_eq!(at_once(&parts, 64, 512 * MIB), (2, 2));
    }

    #[test]
    fn blocks_are_whole_checksum_chunks() {
        assert_eq!(block_bytes(MIB), 4 * MIB);
        assert_eq!(block_bytes(3 * MIB), 3 * MIB);
        assert_eq!(block_bytes(16 * MIB), 16 * MIB);
    }
}
