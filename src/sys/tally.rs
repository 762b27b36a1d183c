//! How many units of something the processes of a machine have taken together.
//!
//! The counts are kept in locks of the kernel: a process holds as many bytes of an empty file locked as it has taken. So
//! nothing has to be read or repaired after a process was killed: its locks go with it.

use crate::sys::file;
use crate::sys::inherited::Inherited;
use crate::sys::range_lock::{self, Lock};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_128;

/// The file of all counts.
const FILE: &str = "ringstow-counts";

/// Bytes of the file that belong to one process: the first one says that it is there, the others are its units.
const PROCESS_BYTES: i64 = 1 << 32;

/// Processes of a count at most.
const PROCESSES_MAX: i64 = 1 << 12;

/// Bytes of a count. What it is called says which of them are its own: two counts in one place would be too careful, and
/// not wrong.
const COUNT_BYTES: i64 = PROCESS_BYTES * PROCESSES_MAX;
const COUNTS_MAX: u64 = 1 << 18;

/// This process' part of a count, which ends when this is dropped.
#[derive(Debug)]
pub struct Tally {
    _inherited: Inherited,
    file: File,
    /// Where the bytes of the count begin, and those of this process.
    count: i64,
    start: i64,
    units: u64,
}

impl Tally {
    /// Joins the count of this name, with no unit taken.
    ///
    /// # Errors
    /// The system's.
    pub fn join(name: &str) -> io::Result<Self> {
        Self::join_in(&shared_dir(), name)
    }

    fn join_in(dir: &Path, name: &str) -> io::Result<Self> {
        let file = open(&dir.join(FILE))?;
        let inherited = Inherited::note(&file);
        let count =
            (XxHash3_128::oneshot(name.as_bytes()) as u64 % COUNTS_MAX) as i64 * COUNT_BYTES;
        for process in 0..PROCESSES_MAX {
            let start = count + process * PROCESS_BYTES;
            match range_lock::set(&file, start..start + 1, Lock::Exclusive) {
                Ok(()) => return Ok(Self { _inherited: inherited, file, count, start, units: 0 }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {} // another process
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other(format!("{PROCESSES_MAX} processes take part already")))
    }

    /// Units that all processes have taken, this one included.
    ///
    /// # Errors
    /// The system's.
    pub fn all(&self) -> io::Result<u64> {
        let mut taken = self.units;
        let whole_count = self.count..self.count + COUNT_BYTES;
        let mut left = vec![whole_count];
        while let Some(range) = left.pop() {
            let Some(locked) = range_lock::others(&self.file, range.clone())? else { continue };
            // Less the byte that says that the process is there.
            taken += (locked.end - locked.start - 1) as u64;
            // Empty where the other's range reaches beyond this one.
            let sides = [range.start..locked.start, locked.end..range.end];
            left.extend(sides.into_iter().filter(|side| !side.is_empty()));
        }
        Ok(taken)
    }

    /// Sets how many units this process has taken.
    ///
    /// # Errors
    /// The system's; the count is then as before.
    pub fn set(&mut self, units: u64) -> io::Result<()> {
        let at = |units: u64| self.start + 1 + units as i64;
        let (before, now) = (at(self.units), at(units));
        if now > before {
            range_lock::set(&self.file, before..now, Lock::Exclusive)?;
        } else if now < before {
            range_lock::set(&self.file, now..before, Lock::None)?;
        }
        self.units = units;
        Ok(())
    }
}

/// Where all users of a machine may write.
fn shared_dir() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.into() } else { std::env::temp_dir() }
}

fn open(path: &Path) -> io::Result<File> {
    // Not created where it is: in a directory for all users, the kernel refuses that for a file of another user.
    match file::open_lock(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match file::create_lock(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => file::open_lock(path),
            created => created,
        },
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::tally::*;

    #[test]
    fn processes_see_what_all_have_taken_until_they_end() {
        let dir = tempfile::tempdir().unwrap();
        // Each open file counts as a process.
        let join = || Tally::join_in(dir.path(), "memory").unwrap();
        let mut other = Tally::join_in(dir.path(), "another").unwrap();
        other.set(1000).unwrap();
        let mut all: Vec<Tally> = (0..5).map(|_| join()).collect();
        assert_eq!(all[0].all().unwrap(), 0);
        for (number, tally) in all.iter_mut().enumerate() {
            tally.set(number as u64 * 10).unwrap();
        }
        assert!(all.iter().all(|tally| tally.all().unwrap() == 100));
        all[4].set(15).unwrap();
        all[1].set(11).unwrap();
        assert_eq!(all[0].all().unwrap(), 76);
        drop(all.remove(2));
        assert_eq!(all[0].all().unwrap(), 56);
        let mut late = join();
        late.set(1).unwrap();
        assert_eq!(all[3].all().unwrap(), 57);
        all.clear();
        assert_eq!(late.all().unwrap(), 1);
    }

    #[test]
    fn something_else_in_its_place_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(FILE)).unwrap();
        assert!(Tally::join_in(dir.path(), "memory").is_err());
    }
}
