//! Files mapped into memory: nothing is read before it is touched.
#![allow(unsafe_code)]

use crate::sys::seam::{Call, made};
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;

/// A file in memory, copied on write: who writes to the memory changes this process's copy of a page, and never the file.
///
/// The mapping keeps the file's bytes although its name is removed or replaced, and a recycled file is not written over
/// meanwhile: the mapping counts as an opener. If another program cuts the file, or a page cannot be read, the kernel sends
/// SIGBUS to who touches it.
#[derive(Debug)]
pub struct FileMapping {
    memory: MmapRaw,
}

impl FileMapping {
    /// Maps the first bytes of a file.
    ///
    /// # Errors
    /// The system's: no address space is left, or the file system maps no files.
    pub fn new(file: &File, bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // Pages are taken from the system when they are written to: most never are.
        let map = || {
            // SAFETY: nobody gets a reference to the memory, only its address; other processes that write to the file may
            // change what is read there.
            unsafe { MmapOptions::new().len(len).no_reserve_swap().map_copy(file) }
        };
        Ok(Self { memory: MmapRaw::from(made(Call::Map, file, map)?) })
    }

    /// The address of the first byte. The memory may be read and written as long as the mapping is there.
    pub fn address(&self) -> usize {
        self.memory.as_mut_ptr() as usize
    }

    /// Bytes that are mapped.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::file_mapping::*;
    use crate::sys::lease::is_sole_opener;

    #[test]
    fn a_mapping_keeps_the_bytes_and_no_write_reaches_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 8192]).unwrap();
        let mapping = FileMapping::new(&File::open(&path).unwrap(), 5000).unwrap();
        assert_eq!((mapping.len(), mapping.is_empty()), (5000, false));
        let at = mapping.address() as *mut u8;
        // SAFETY: within the mapping, which nothing else uses.
        let read = |offset: usize| unsafe { at.add(offset).read() };
        assert_eq!((read(0), read(4999)), (7, 7));
        // SAFETY: as above.
        unsafe { at.write(1) };
        assert_eq!((read(0), std::fs::read(&path).unwrap()[0]), (1, 7));
        let writer = File::options().write(true).open(&path).unwrap();
        assert!(!is_sole_opener(&writer).unwrap(), "a mapping counts as an opener");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(4999), 7);
        drop(mapping);
        assert!(is_sole_opener(&writer).unwrap());
    }
}
