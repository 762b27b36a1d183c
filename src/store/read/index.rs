//! Finds tensors by name, without a copy of any name.

use hashbrown::HashTable;
use std::hash::{BuildHasher, RandomState};

/// The numbers of tensors by name. The caller keeps the names.
#[derive(Debug)]
pub(in crate::store) struct NameIndex {
    numbers: HashTable<u32>,
    hasher: RandomState,
}

impl NameIndex {
    /// Indexes distinct names, numbered in their order.
    pub fn new<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> Self {
        let hasher = RandomState::new();
        let mut numbers = HashTable::with_capacity(names.len());
        for (number, name) in (0..).zip(names) {
            // The table has room for all names, so nothing is hashed a second time.
            numbers.insert_unique(hasher.hash_one(name), number, |_| unreachable!("it has room"));
        }
        Self { numbers, hasher }
    }

    /// Adds a name that it does not have yet, where `name_of` gives the name of each number before.
    pub fn insert<'a>(&mut self, number: usize, name: &str, name_of: impl Fn(usize) -> &'a str) {
        let hash_of = |number: &u32| self.hasher.hash_one(name_of(*number as usize));
        self.numbers.insert_unique(self.hasher.hash_one(name), number as u32, hash_of);
    }

    /// The number of a name, where `name_of` gives the name of each number.
    pub fn find<'a>(&self, name: &str, name_of: impl Fn(usize) -> &'a str) -> Option<usize> {
        let is_it = |&number: &u32| name_of(number as usize) == name;
        self.numbers.find(self.hasher.hash_one(name), is_it).map(|&number| number as usize)
    }
}
