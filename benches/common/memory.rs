//! Memory as a machine has it that has been in use for a while.

use super::Result;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

/// What is read at once, and how often between two looks at how much is free.
const READ_BYTES: usize = 1 << 20;
const READS: u64 = 128;
/// As much as memory once may not do: near its end the kernel reclaims as well as it takes.
const TIMES_MAX: u64 = 8;

/// A file without blocks, twice as long as memory, to fill the page cache with.
///
/// Memory that nothing uses is at hand on a machine of one's own, while a virtual machine's host may have
/// taken it back, and gives it again slowly, at the first touch. Which peer waits for that depends on
/// what ran before it. On a machine that reads its training data the page cache has all memory, and
/// whoever asks for some gets what the kernel lets go of there: the same for all.
pub struct PageCache {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Where to read on: what the kernel let go of first.
    at: u64,
}

impl PageCache {
    /// Makes the file; of a file system that has memory only, an error.
    pub fn new(dir: &Path) -> Result<Self> {
        if super::is_in_memory(dir) {
            return Err(format!("{}: what is in memory has no page cache", dir.display()).into());
        }
        let (path, bytes) = (dir.join("page-cache.sparse"), 2 * memory("MemTotal")?);
        File::create(&path)?.set_len(bytes)?;
        Ok(Self { file: File::open(&path)?, path, bytes, at: 0 })
    }

    /// Reads until hardly any memory is free, about twice what the kernel keeps, since the cache has it.
    pub fn fill(&mut self) -> Result<()> {
        let total = memory("MemTotal")?;
        for _ in 0..TIMES_MAX * total / (READS * READ_BYTES as u64) {
            self.read()?;
            if memory("MemFree")? < total / 64 {
                return Ok(());
            }
        }
        let (free, why) = (memory("MemFree")? >> 20, "is it limited, by a cgroup?");
        Err(format!("the page cache leaves {free} MiB free; {why} Leave --used-memory out").into())
    }

    /// On all cores: while the kernel keeps up with one reader, a small zone of memory stays free.
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

/// A line of /proc/meminfo (`MemFree`) or /proc/self/status (`VmRSS`), in bytes.
pub fn line_of(file: &str, line: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let found = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':'))?;
    Some(found.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}
