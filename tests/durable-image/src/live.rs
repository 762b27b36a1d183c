//! Follows what happens to the live directories.

use crate::change::{self, Change, Inode, Names, Slot};
use crate::journal::{Effect, Journal, Node, SyncCall};
use crate::snapshot::{Key, Name, Snapshot, key};
use ringstow::internals::sys::seam::Call;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, ThreadId};

pub(crate) struct Live {
    roots: Vec<PathBuf>,
    /// The number in the journal of what has a name.
    inodes: HashMap<Key, Inode>,
    names: Names,
    contents: BTreeMap<Inode, Vec<u8>>,
    /// Syncs that have not ended: whose, of what, since when.
    syncing: Vec<(ThreadId, Inode, usize)>,
    pub journal: Journal,
}

impl Live {
    /// All that is in these directories is durable.
    pub fn new(roots: &[PathBuf]) -> Self {
        let real = |root: &PathBuf| {
            fs::canonicalize(root).unwrap_or_else(|e| panic!("{}: {e}", root.display()))
        };
        let roots: Vec<PathBuf> = roots.iter().map(real).collect();
        let (nodes, names, calls) = (Vec::new(), Names::new(), Vec::new());
        let (effects, syncs) = (Vec::new(), Vec::new());
        let journal = Journal { nodes, roots: roots.len(), names, effects, syncs, calls };
        let (inodes, names, syncing) = (HashMap::new(), Names::new(), Vec::new());
        let contents = BTreeMap::new();
        let mut live = Self { roots, inodes, names, contents, syncing, journal };
        for (root, path) in live.roots.clone().into_iter().enumerate() {
            let called =
                PathBuf::from(if root > 0 { format!("disk {}:", root + 1) } else { String::new() });
            let found = key(&fs::metadata(path).expect("a root is a directory"));
            live.inodes.insert(found, root);
            live.journal.nodes.push(Node { root, content: Vec::new(), is_dir: true, called });
        }
        live.look();
        live.journal.effects.clear();
        live.journal.names = live.names.clone();
        for (file, content) in &live.contents {
            live.journal.nodes[*file].content.clone_from(content);
        }
        live
    }

    /// Looks at the directories before a call is made.
    pub fn before(&mut self, call: Call, path: &Path) {
        let at = self.pass(format!("{call:?} {}", self.short(path)));
        let of = fs::metadata(path).ok().and_then(|found| self.inodes.get(&key(&found)).copied());
        let (thread, Some(of)) = (thread::current().id(), of) else { return };
        let is_this = |(whose, what, _): &_| (*whose, *what) == (thread, of);
        match call {
            Call::Sync => {
                self.syncing.retain(|sync| !is_this(sync)); // one that failed never ended
                self.syncing.push((thread, of, at));
            }
            Call::Synced => {
                if let Some(number) = self.syncing.iter().position(is_this) {
                    let (_, _, since) = self.syncing.remove(number);
                    let path = self.journal.nodes[of].called.clone();
                    self.journal.syncs.push(SyncCall { at: since, done: at, path, of });
                }
            }
            _ => {}
        }
    }

    /// Looks at the directories between two calls.
    pub fn moment(&mut self) -> usize {
        self.pass("a moment between two calls".into())
    }

    fn pass(&mut self, call: String) -> usize {
        self.look();
        self.journal.calls.push(call);
        self.journal.calls.len() - 1
    }

    /// Notes what has changed.
    fn look(&mut self) {
        let now = Snapshot::of(&self.roots);
        let names: Names = now.names.iter().map(|name| self.number(name, &now)).collect();
        for change in change::of_names(&self.names, &names) {
            self.note(change);
        }
        assert!(self.names == names, "the changes of names lead from one look to the next");
        for (key, content) in now.files {
            let file = self.inodes[&key];
            let before = self.contents.insert(file, content).unwrap_or_default();
            for change in change::of_content(file, &before, &self.contents[&file]) {
                self.note(change);
            }
        }
        // A number that has no name any more may soon be that of another file.
        let named: HashSet<Inode> = self.names.values().copied().collect();
        let roots = self.roots.len();
        self.inodes.retain(|_, inode| *inode < roots || named.contains(inode));
    }

    /// A name with numbers of the journal; what is new gets one. Directories come before what is in them.
    fn number(&mut self, (dir, name, key): &Name, now: &Snapshot) -> (Slot, Inode) {
        let dir = self.inodes[dir];
        let nodes = &mut self.journal.nodes;
        let inode = *self.inodes.entry(*key).or_insert_with(|| {
            let (root, called) = (nodes[dir].root, nodes[dir].called.join(name));
            let is_dir = !now.files.contains_key(key);
            nodes.push(Node { root, content: Vec::new(), is_dir, called });
            nodes.len() - 1
        });
        ((dir, name.clone()), inode)
    }

    fn note(&mut self, change: Change) {
        let mut after = Vec::new();
        if let Change::Names(names) = &change {
            for (slot, now) in names {
                let before = self.names.get(slot).copied();
                let removed = before.filter(|dir| now.is_none() && self.journal.nodes[*dir].is_dir);
                let moved = removed.filter(|dir| names.iter().any(|(_, now)| *now == Some(*dir)));
                let removed = removed.filter(|_| moved.is_none());
                after.extend(self.journal.changes_of(|(dir, _)| Some(*dir) == removed));
                after.extend(self.journal.changes_of(|other| other == slot).last());
            }
            change::apply(&mut self.names, names);
        }
        let at = self.journal.calls.len();
        self.journal.effects.push(Effect { at, change, after });
    }

    /// A path from its root, for people.
    fn short(&self, path: &Path) -> String {
        let real = path.parent().and_then(|dir| fs::canonicalize(dir).ok());
        let real = real.and_then(|dir| Some(dir.join(path.file_name()?)));
        let path = real.unwrap_or_else(|| path.into());
        let below = self
            .roots
            .iter()
            .zip(&self.journal.nodes)
            .find_map(|(root, node)| Some(node.called.join(path.strip_prefix(root).ok()?)));
        below.unwrap_or(path).display().to_string()
    }
}
