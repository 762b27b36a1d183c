//! What an operation did to the disk, and when which of it was durable.

use crate::change::{Change, Inode, Names, Slot};
use std::path::PathBuf;

/// Which changes a disk may lose while it keeps others. In both modes each unsynced block and length of a file is
/// old, new or in between, whatever becomes of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A change of a name is durable once its directory was synced. Until then it may be lost alone.
    Unordered,
    /// As a file system with a journal: names change on the disk in order, and each sync of anything in a root makes
    /// all changes of names in that root durable. Each root is a file system of its own.
    Journal,
}

/// Both modes.
pub const MODES: [Mode; 2] = [Mode::Unordered, Mode::Journal];

/// A file or directory.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub root: usize,
    /// The durable content when the recording began; nothing of a directory or a new file.
    pub content: Vec<u8>,
    pub is_dir: bool,
    /// For people: its first path below its root.
    pub called: PathBuf,
}

/// A change, and the moment by which it was there.
#[derive(Debug, Clone)]
pub(crate) struct Effect {
    pub at: usize,
    pub change: Change,
    /// Earlier changes of names without which this one cannot be: those of the same names, and in a directory that it
    /// removes.
    pub after: Vec<usize>,
}

/// A sync that was made.
#[derive(Debug, Clone)]
pub struct SyncCall {
    /// The moment of its call.
    pub at: usize,
    /// The moment by which it had ended.
    pub done: usize,
    /// What was synced, from its root.
    pub path: PathBuf,
    pub(crate) of: Inode,
}

/// What was done to directories, in order. A moment is the number of a system call, of those before which it looked.
#[derive(Debug, Clone)]
pub struct Journal {
    /// The numbers of the roots are the first.
    pub(crate) nodes: Vec<Node>,
    pub(crate) roots: usize,
    /// Those that were durable when the recording began.
    pub(crate) names: Names,
    pub(crate) effects: Vec<Effect>,
    pub(crate) syncs: Vec<SyncCall>,
    /// What each moment is, for people.
    pub(crate) calls: Vec<String>,
}

impl Journal {
    /// The moments at which the disk may hold something else than at the moment before.
    pub fn moments(&self) -> Vec<usize> {
        let done = self.syncs.iter().map(|sync| sync.done);
        let mut all: Vec<usize> = self.effects.iter().map(|effect| effect.at).chain(done).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The moment after the last call.
    pub fn end(&self) -> usize {
        self.calls.len()
    }

    /// The call before which a moment is.
    pub fn call(&self, moment: usize) -> &str {
        self.calls.get(moment).map_or("the end", String::as_str)
    }

    /// All syncs, in the order of their calls.
    pub fn syncs(&self) -> &[SyncCall] {
        &self.syncs
    }

    /// As if these syncs had not been made.
    #[must_use]
    pub fn without(&self, left_out: impl Fn(&SyncCall) -> bool) -> Self {
        let mut other = self.clone();
        other.syncs.retain(|sync| !left_out(sync));
        other
    }

    /// Which effects are on the disk for certain at a moment, whatever it loses.
    pub(crate) fn durable(&self, moment: usize, mode: Mode) -> Vec<bool> {
        let mut durable = vec![false; self.effects.len()];
        for sync in self.syncs.iter().filter(|sync| sync.done <= moment) {
            let covered = |effect: &Effect| effect.at <= sync.at && self.covers(sync, effect, mode);
            for (number, effect) in self.effects.iter().enumerate() {
                durable[number] |= covered(effect);
            }
        }
        self.close(&mut durable, mode);
        durable
    }

    fn covers(&self, sync: &SyncCall, effect: &Effect, mode: Mode) -> bool {
        match &effect.change {
            Change::Length(file, _) | Change::Block(file, _, _) => *file == sync.of,
            Change::Names(change) => change.iter().any(|((dir, _), _)| match mode {
                Mode::Unordered => *dir == sync.of,
                Mode::Journal => self.nodes[*dir].root == self.nodes[sync.of].root,
            }),
        }
    }

    /// Adds the changes of names without which those in `kept` cannot be.
    pub(crate) fn close(&self, kept: &mut [bool], mode: Mode) {
        let mut ordered = vec![false; self.roots];
        for (number, effect) in self.effects.iter().enumerate().rev() {
            let Change::Names(change) = &effect.change else { continue };
            if mode == Mode::Journal {
                let root = self.nodes[change[0].0.0].root;
                kept[number] |= ordered[root];
                ordered[root] |= kept[number];
            }
            if kept[number] {
                effect.after.iter().for_each(|earlier| kept[*earlier] = true);
            }
        }
    }

    /// Removes the changes of names that cannot be without one that is not in `kept`.
    pub(crate) fn drop_unfounded(&self, kept: &mut [bool], mode: Mode) {
        let mut broken = vec![false; self.roots];
        for (number, effect) in self.effects.iter().enumerate() {
            let Change::Names(change) = &effect.change else { continue };
            if mode == Mode::Journal {
                let root = self.nodes[change[0].0.0].root;
                kept[number] &= !broken[root];
                broken[root] |= !kept[number];
            }
            kept[number] &= effect.after.iter().all(|earlier| kept[*earlier]);
        }
    }

    /// The changes so far of names that are meant.
    pub(crate) fn changes_of(
        &self,
        is_meant: impl Fn(&Slot) -> bool,
    ) -> impl Iterator<Item = usize> {
        let touches = move |(_, effect): &(usize, &Effect)| match &effect.change {
            Change::Names(names) => names.iter().any(|(slot, _)| is_meant(slot)),
            _ => false,
        };
        self.effects.iter().enumerate().filter(touches).map(|(number, _)| number)
    }
}
