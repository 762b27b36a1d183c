//! The server: one tree of directories and files in memory. Names are looked up and changed atomically. A file or
//! directory has a number for as long as it has a name; afterwards the number is stale and never used again.

use fuser::{Errno, FileType};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};

/// The number of the root directory.
pub const ROOT: u64 = 1;

/// What a number stands for.
pub enum Node {
    /// Its content.
    File(Vec<u8>),
    /// The numbers of its entries, by name.
    Dir(BTreeMap<OsString, u64>),
}

/// What a host may know about a file or directory and keep for a while.
#[derive(Debug, Clone, Copy)]
pub struct Attributes {
    pub number: u64,
    pub kind: FileType,
    pub bytes: u64,
    pub mode: u16,
    /// How many changes the tree had seen at the last change of this node.
    pub changed: u64,
}

/// A directory's entry as a listing has it.
pub type Entry = (OsString, u64, FileType);

struct Numbered {
    node: Node,
    mode: u16,
    changed: u64,
}

/// The tree.
pub struct Tree {
    nodes: HashMap<u64, Numbered>,
    last_number: u64,
    changes: u64,
    /// Locked files, and the hosts and handles that hold the locks.
    locks: HashMap<u64, (usize, u64)>,
}

impl Tree {
    pub fn new() -> Self {
        let root = Numbered { node: Node::Dir(BTreeMap::new()), mode: 0o755, changed: 0 };
        let nodes = HashMap::from([(ROOT, root)]);
        Self { nodes, last_number: ROOT, changes: 0, locks: HashMap::new() }
    }

    fn numbered(&self, number: u64) -> Result<&Numbered, Errno> {
        self.nodes.get(&number).ok_or(Errno::ESTALE)
    }

    /// The node, which the caller is about to change.
    fn change(&mut self, number: u64) -> Result<&mut Node, Errno> {
        self.changes += 1;
        let numbered = self.nodes.get_mut(&number).ok_or(Errno::ESTALE)?;
        numbered.changed = self.changes;
        Ok(&mut numbered.node)
    }

    fn names(&self, dir: u64) -> Result<&BTreeMap<OsString, u64>, Errno> {
        match &self.numbered(dir)?.node {
            Node::Dir(names) => Ok(names),
            Node::File(_) => Err(Errno::ENOTDIR),
        }
    }

    fn change_names(&mut self, dir: u64) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        match self.change(dir)? {
            Node::Dir(names) => Ok(names),
            Node::File(_) => Err(Errno::ENOTDIR),
        }
    }

    pub fn attributes(&self, number: u64) -> Result<Attributes, Errno> {
        let Numbered { node, mode, changed } = self.numbered(number)?;
        let (kind, bytes) = match node {
            Node::File(content) => (FileType::RegularFile, content.len() as u64),
            Node::Dir(names) => (FileType::Directory, names.len() as u64),
        };
        Ok(Attributes { number, kind, bytes, mode: *mode, changed: *changed })
    }

    pub fn find(&self, dir: u64, name: &OsStr) -> Result<Option<u64>, Errno> {
        Ok(self.names(dir)?.get(name).copied())
    }

    pub fn list(&self, dir: u64) -> Result<Vec<Entry>, Errno> {
        let entry = |(name, &number): (&OsString, &u64)| {
            Ok((name.clone(), number, self.attributes(number)?.kind))
        };
        self.names(dir)?.iter().map(entry).collect()
    }

    /// Creates a file or directory under a name that is free.
    pub fn create(&mut self, dir: u64, name: &OsStr, node: Node, mode: u16) -> Result<u64, Errno> {
        if self.find(dir, name)?.is_some() {
            return Err(Errno::EEXIST);
        }
        self.last_number += 1;
        let number = self.last_number;
        self.change_names(dir)?.insert(name.into(), number);
        self.nodes.insert(number, Numbered { node, mode, changed: self.changes });
        Ok(number)
    }

    /// Removes a file, or an empty directory.
    pub fn remove(&mut self, dir: u64, name: &OsStr, kind: FileType) -> Result<(), Errno> {
        let number = self.find(dir, name)?.ok_or(Errno::ENOENT)?;
        match (&self.numbered(number)?.node, kind) {
            (Node::Dir(names), FileType::Directory) if !names.is_empty() => {
                return Err(Errno::ENOTEMPTY);
            }
            (Node::Dir(_), FileType::RegularFile) => return Err(Errno::EISDIR),
            (Node::File(_), FileType::Directory) => return Err(Errno::ENOTDIR),
            _ => {}
        }
        self.change_names(dir)?.remove(name);
        self.nodes.remove(&number);
        Ok(())
    }

    /// Gives a node another name, and removes what had that name.
    pub fn rename(
        &mut self,
        (dir, name): (u64, &OsStr),
        (to_dir, to_name): (u64, &OsStr),
    ) -> Result<(), Errno> {
        let number = self.find(dir, name)?.ok_or(Errno::ENOENT)?;
        match self.find(to_dir, to_name)? {
            Some(same) if same == number => return Ok(()),
            Some(_) => self.remove(to_dir, to_name, self.attributes(number)?.kind)?,
            None => {}
        }
        self.change_names(dir)?.remove(name);
        self.change_names(to_dir)?.insert(to_name.into(), number);
        Ok(())
    }

    pub fn content(&self, file: u64) -> Result<&[u8], Errno> {
        match &self.numbered(file)?.node {
            Node::File(content) => Ok(content),
            Node::Dir(_) => Err(Errno::EISDIR),
        }
    }

    pub fn change_content(&mut self, file: u64) -> Result<&mut Vec<u8>, Errno> {
        match self.change(file)? {
            Node::File(content) => Ok(content),
            Node::Dir(_) => Err(Errno::EISDIR),
        }
    }

    pub fn change_mode(&mut self, number: u64, mode: u16) -> Result<(), Errno> {
        self.change(number)?;
        self.nodes.get_mut(&number).ok_or(Errno::ESTALE)?.mode = mode;
        Ok(())
    }

    /// Locks a whole file for one handle of one host.
    pub fn lock(&mut self, file: u64, holder: (usize, u64)) -> Result<(), Errno> {
        self.content(file)?;
        match *self.locks.entry(file).or_insert(holder) == holder {
            true => Ok(()),
            false => Err(Errno::EAGAIN),
        }
    }

    /// Releases all locks of a handle.
    pub fn unlock(&mut self, holder: (usize, u64)) {
        self.locks.retain(|_, held| *held != holder);
    }
}
