//! A change on the disk, and which changes lie between two looks at it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

/// The number of a file or directory in a journal.
pub(crate) type Inode = usize;

/// A name in a directory, whether anything has it or not.
pub(crate) type Slot = (Inode, OsString);

/// Which inode has which name.
pub(crate) type Names = BTreeMap<Slot, Inode>;

/// The smallest part of a file that a disk writes whole or not at all.
pub(crate) const BLOCK: usize = 512;

/// One change, which a disk makes whole or not at all.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Change {
    /// What each of these names leads to from now on. A rename changes two.
    Names(Vec<(Slot, Option<Inode>)>),
    /// The length of a file in bytes.
    Length(Inode, usize),
    /// The content of a block of a file.
    Block(Inode, usize, Vec<u8>),
}

impl Change {
    /// The file whose content changes.
    pub fn file(&self) -> Option<Inode> {
        match self {
            Self::Names(_) => None,
            Self::Length(file, _) | Self::Block(file, ..) => Some(*file),
        }
    }
}

/// The changes of names: renames, then removals, then new names.
pub(crate) fn of_names(old: &Names, new: &Names) -> Vec<Change> {
    let slots: BTreeSet<&Slot> = old.keys().chain(new.keys()).collect();
    let differs = |slot: &&Slot| old.get(*slot) != new.get(*slot);
    let differing: Vec<&Slot> = slots.into_iter().filter(differs).collect();
    let (mut so_far, mut changes) = (old.clone(), Vec::new());
    for &to in &differing {
        let lost = |from: &&Slot| *from != to && so_far.get(*from) == new.get(to);
        let from = differing.iter().copied().filter(|_| new.contains_key(to)).find(lost);
        let Some(from) = from.filter(|_| so_far.get(to) != new.get(to)) else { continue };
        // Two files that change places are one change.
        let swapped = new.get(from).filter(|now| so_far.get(to) == Some(now)).copied();
        let change = vec![(from.clone(), swapped), (to.clone(), new.get(to).copied())];
        apply(&mut so_far, &change);
        changes.push(change);
    }
    let rest = || differing.iter().copied().filter(|slot| so_far.get(*slot) != new.get(*slot));
    let removed = rest().filter(|slot| so_far.contains_key(*slot)).map(|slot| (slot, None));
    let created = rest().filter_map(|slot| Some((slot, Some(*new.get(slot)?))));
    changes.extend(removed.chain(created).map(|(slot, now)| vec![(slot.clone(), now)]));
    changes.into_iter().map(Change::Names).collect()
}

/// Makes a change of names.
pub(crate) fn apply(names: &mut Names, change: &[(Slot, Option<Inode>)]) {
    for (slot, now) in change {
        match now {
            Some(inode) => drop(names.insert(slot.clone(), *inode)),
            None => drop(names.remove(slot)),
        }
    }
}

/// The changes of a file's content.
pub(crate) fn of_content(file: Inode, old: &[u8], new: &[u8]) -> Vec<Change> {
    let blocks = old.len().max(new.len()).div_ceil(BLOCK);
    let differs = |at: &usize| block(old, *at) != block(new, *at);
    let changed = (0..blocks).filter(differs);
    let mut changes: Vec<Change> =
        changed.map(|at| Change::Block(file, at, block(new, at).to_vec())).collect();
    if old.len() != new.len() {
        changes.push(Change::Length(file, new.len()));
    }
    changes
}

/// A block of a file; zeros where it has ended.
fn block(content: &[u8], at: usize) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let there = content.get(at * BLOCK..).unwrap_or_default();
    let there = &there[..there.len().min(BLOCK)];
    block[..there.len()].copy_from_slice(there);
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(all: &[(&str, Inode)]) -> Names {
        all.iter().map(|(name, inode)| ((0, OsString::from(name)), *inode)).collect()
    }

    fn change(all: &[(&str, Option<Inode>)]) -> Change {
        Change::Names(all.iter().map(|(name, now)| ((0, OsString::from(name)), *now)).collect())
    }

    fn changes(old: &[(&str, Inode)], new: &[(&str, Inode)]) -> Vec<Change> {
        of_names(&names(old), &names(new))
    }

    #[test]
    fn a_rename_is_one_change_also_over_a_file() {
        let renamed = [change(&[("a", None), ("b", Some(1))])];
        assert_eq!(changes(&[("a", 1)], &[("b", 1)]), renamed);
        assert_eq!(changes(&[("a", 1), ("b", 2)], &[("b", 1)]), renamed);
        let swapped = [change(&[("b", Some(1)), ("a", Some(2))])];
        assert_eq!(changes(&[("a", 1), ("b", 2)], &[("a", 2), ("b", 1)]), swapped);
    }

    #[test]
    fn other_names_change_one_by_one() {
        let (gone, new) = (change(&[("a", None)]), |name| change(&[(name, Some(2))]));
        assert_eq!(changes(&[("a", 1)], &[]), [change(&[("a", None)])]);
        assert_eq!(changes(&[("a", 1)], &[("a", 1), ("b", 2)]), [new("b")]);
        // Another file has the name now.
        assert_eq!(changes(&[("a", 1)], &[("a", 2)]), [gone, new("a")]);
        let linked = [change(&[("b", Some(1))])];
        assert_eq!(changes(&[("a", 1)], &[("a", 1), ("b", 1)]), linked);
        let renamed_and_new = [change(&[("a", None), ("b", Some(1))]), new("a")];
        assert_eq!(changes(&[("a", 1)], &[("a", 2), ("b", 1)]), renamed_and_new);
    }

    #[test]
    fn content_changes_by_blocks_and_length() {
        let old = [1; 3 * BLOCK];
        let mut new = old.to_vec();
        new[BLOCK] = 2;
        assert_eq!(of_content(7, &old, &new), [Change::Block(7, 1, new[BLOCK..2 * BLOCK].into())]);
        // What was cut off reads as zeros if the file grows again.
        let zeros = |at| Change::Block(7, at, vec![0; BLOCK]);
        let cut = [zeros(1), zeros(2), Change::Length(7, BLOCK)];
        assert_eq!(of_content(7, &old, &old[..BLOCK]), cut);
        assert_eq!(of_content(7, &[], &[0; 10]), [Change::Length(7, 10)]);
        assert!(of_content(7, &old, &old).is_empty());
    }
}
