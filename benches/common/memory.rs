//! Fills the page cache, as on a machine that has been in use for a while.

use super::Result;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

/// Bytes per read, and reads between two checks of how much memory is free.
const READ_BYTES: usize = 1 << 20;
const READS: u64 = 128;
/// How many times the size of memory to read at most: when little is free, the kernel also reclaims.
const TIMES_MAX: u64 = 8;

/// A sparse file, twice as long as memory, to fill the page cache with.
///
/// The host of a virtual machine may have reclaimed unused memory, and returns it slowly, at the first touch.
/// Which peer waits for that depends on what ran before it. On a machine that reads training data, the page
/// cache holds all memory, and every allocation takes pages from there: the same cost for all.
pub struct PageCache {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Where to read next: the pages that the kernel evicts first.
    at: u64,
}

impl PageCache {
    /// Creates the file. Fails on a file system in memory.
    pub fn new(dir: &Path) -> Result<Self> {
        if super::is_in_memory(dir) {
            return Err(
                format!("{}: a file system in memory has no page cache", dir.display()).into()
            );
        }
        let (path, bytes) = (dir.join("page-cache.sparse"), 2 * memory("MemTotal")?);
        File::create(&path)?.set_len(bytes)?;
        Ok(Self { file: File::open(&path)?, path, bytes, at: 0 })
    }

    /// Reads until the cache has nearly all memory, and about twice what the kernel reserves is free.
    pub fn fill(&mut self) -> Result<()> {
        let total = memory("MemTotal")?;
        for _ in 0..TIMES_MAX * total / (READS * READ_BYTES as u64) {
            self.read()?;
            if memory("MemFree")? < total / 64 {
                return Ok(());
            }
        }
        let (free, why) = (memory("MemFree")? >> 20, "does a cgroup limit it?");
        Err(format!("the page cache leaves {free} MiB free; {why} Run without --used-memory")
            .into())
    }

    /// Reads on all cores: with a single reader, the kernel keeps a small zone of memory free.
    fn read(&mut self) -> Result<()> {
        let offsets: Vec<u64> =
            (0..READS).map(|n| (self.at + n * READ_BYTES as u64) % self.bytes).collect();
        self.at = (self.at + READS * READ_BYTES as u64) % self.bytes;
        let (file, cores) = (&self.file, thread::available_parallelism()?.get());
        thread::scope(|scope| {
            let read = |offsets: &[u64]| {
                let mut buffer = vec![0; READ_BYTES];
                offsets.iter().try_for_each(|at| file.read_at(&mut buffer, *at).map(drop))
            };
            let shares = offsets.chunks(offsets.len().div_ceil(cores));
            let readers: Vec<_> = shares.map(|share| scope.spawn(move || read(share))).collect();
            readers.into_iter().try_for_each(|reader| reader.join().expect("it does not panic"))
        })?;
        Ok(())
    }
}

impl Drop for PageCache {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn memory(line: &str) -> Result<u64> {
    let found = line_of("/proc/meminfo", line);
    Ok(found.ok_or_else(|| format!("/proc/meminfo has no {line}"))?)
}

/// Reads a line of /proc/meminfo (`MemFree`) or /proc/self/status (`VmRSS`), in bytes.
pub fn line_of(file: &str, line: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let found = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':'))?;
    Some(found.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}
