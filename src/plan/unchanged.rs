//! What a save need not write, since an earlier checkpoint has it.

use super::deal::Member;
use std::collections::HashSet;

/// Largest file of tensors that have not changed, as far as whole tensors allow. One tensor that changes again then
/// makes a save write this much, not the whole model.
const FILE_BYTES: u64 = 256 << 20;

/// Largest file of such tensors where the caller has a limit for all files; 0 is none.
pub(super) fn file_bytes(shard_bytes: u64) -> u64 {
    if shard_bytes == 0 { FILE_BYTES } else { shard_bytes.min(FILE_BYTES) }
}

/// The items of a save that are as an earlier checkpoint has them. The default knows of none.
#[derive(Debug, Default)]
pub struct Unchanged {
    /// Whether each item is; empty if none is.
    pub items: Vec<bool>,
    /// Files of the earlier checkpoint that have such items alone. They become files of the new one.
    pub linked: Vec<LinkedFile>,
}

/// A file that is not written, since it has a second name in the new checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkedFile {
    /// The number in its name, which no planned file gets.
    pub number: usize,
    /// Its items, and the offset of each in it.
    pub items: Vec<(usize, u64)>,
}

impl Unchanged {
    /// Takes out the items of linked files, and splits the rest into those that have changed and those that have not:
    /// files of the latter alone can be linked by the next save. Each keeps its order, and none is empty.
    pub(super) fn split(&self, group: Vec<Member>, is_linked: &[bool]) -> [Vec<Member>; 2] {
        if self.items.is_empty() {
            return [group, Vec::new()];
        }
        let is = |flags: &[bool], member: &Member| flags.get(member.item) == Some(&true);
        let left = group.into_iter().filter(|member| !is(is_linked, member));
        let (same, changed) = left.partition(|member| is(&self.items, member));
        [changed, same]
    }

    /// Whether each item is in a linked file.
    pub(super) fn is_linked(&self) -> Vec<bool> {
        let mut is_linked = vec![false; if self.linked.is_empty() { 0 } else { self.items.len() }];
        for (item, _) in self.linked.iter().flat_map(|file| &file.items) {
            is_linked[*item] = true;
        }
        is_linked
    }

    /// Numbers for planned files.
    pub(super) fn numbers(&self) -> impl Iterator<Item = usize> + use<> {
        let taken: HashSet<usize> = self.linked.iter().map(|file| file.number).collect();
        (0..).filter(move |number| !taken.contains(number))
    }
}
