//! Attached files by number. A new file gets the lowest free number, so that io_uring's table of
//! registered files, which is small, is used as far as it goes (the crate `slab` reuses numbers last in,
//! first out). Found without a search: a checkpoint of thousands of ranks has as many files.

use super::FileId;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What an engine keeps of each attached file.
#[derive(Debug)]
pub(super) struct FileTable<T> {
    slots: Vec<Option<T>>,
    /// Those of `slots` that are `None`.
    free: BinaryHeap<Reverse<u32>>,
}

impl<T> FileTable<T> {
    pub fn new() -> Self {
        Self { slots: Vec::new(), free: BinaryHeap::new() }
    }

    /// Keeps what `make` makes for the lowest free number.
    pub fn insert_with(&mut self, make: impl FnOnce(u32) -> T) -> FileId {
        let number = match self.free.pop() {
            Some(Reverse(number)) => number,
            None => {
                self.slots.push(None);
                (self.slots.len() - 1) as u32
            }
        };
        self.slots[number as usize] = Some(make(number));
        FileId(number)
    }

    /// Frees a number.
    pub fn remove(&mut self, id: FileId) -> Option<T> {
        let removed = self.slots.get_mut(id.0 as usize)?.take()?;
        self.free.push(Reverse(id.0));
        Some(removed)
    }

    pub fn get(&self, id: FileId) -> Option<&T> {
        self.slots.get(id.0 as usize)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_number_is_taken_and_none_twice() {
        let mut slots = FileTable::new();
        let ids: Vec<FileId> = (0..4).map(|_| slots.insert_with(|number| number)).collect();
        assert_eq!(ids, [0, 1, 2, 3].map(FileId));
        for freed in [2, 0, 2, 9] {
            slots.remove(FileId(freed));
        }
        assert_eq!(slots.get(FileId(2)), None);
        let ids: Vec<FileId> = (0..3).map(|_| slots.insert_with(|number| number)).collect();
        assert_eq!(ids, [0, 2, 4].map(FileId));
        assert_eq!(slots.get(FileId(4)), Some(&4));
    }
}
