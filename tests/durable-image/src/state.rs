//! One content that a disk may have.

use crate::change::{self, BLOCK, Change, Inode, Names};
use crate::journal::Journal;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

/// What a disk holds when the power is back.
#[derive(Debug, Clone)]
pub struct State {
    /// What each path below a root is; the first number is the root's. Two paths may lead to one file. Directories come
    /// before what is in them.
    found: BTreeMap<(usize, PathBuf), Found>,
    contents: BTreeMap<Inode, Vec<u8>>,
    /// For people: the changes that the disk could lose, each with whether it kept it.
    pub(crate) open: Vec<(usize, bool)>,
}

#[derive(Debug, Clone, Hash)]
enum Found {
    Dir,
    File(Inode),
}

impl State {
    /// The disk with these of the changes, of which it could lose those in `open`.
    pub(crate) fn new(journal: &Journal, open: &[usize], kept: &[bool]) -> Self {
        let kept_effects =
            || journal.effects.iter().zip(kept).filter_map(|(e, kept)| kept.then_some(e));
        let mut names = journal.names.clone();
        for effect in kept_effects() {
            if let Change::Names(change) = &effect.change {
                change::apply(&mut names, change);
            }
        }
        let mut found = BTreeMap::new();
        (0..journal.roots)
            .for_each(|root| walk(journal, &names, (root, root), Path::new(""), &mut found));
        let files = found.values().filter_map(|found| match found {
            Found::File(file) => Some((*file, (journal.nodes[*file].content.clone(), None))),
            Found::Dir => None,
        });
        let mut files: BTreeMap<Inode, (Vec<u8>, Option<usize>)> = files.collect();
        for effect in kept_effects() {
            let Some((content, len)) = effect.change.file().and_then(|file| files.get_mut(&file))
            else {
                continue;
            };
            match &effect.change {
                Change::Length(_, bytes) => *len = Some(*bytes),
                Change::Block(_, at, block) => {
                    let at = at * BLOCK;
                    len.get_or_insert(content.len());
                    content.resize(content.len().max(at + BLOCK), 0);
                    content[at..at + BLOCK].copy_from_slice(block);
                }
                Change::Names(_) => {}
            }
        }
        let contents = files.into_iter().map(|(file, (mut content, len))| {
            content.resize(len.unwrap_or(content.len()), 0);
            (file, content)
        });
        let open = open.iter().map(|number| (*number, kept[*number])).collect();
        Self { found, contents: contents.collect(), open }
    }

    /// Equal for two disks that hold the same.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.found, &self.contents).hash(&mut hasher);
        hasher.finish()
    }

    /// Empties the directories, and writes each root's content to one. Which files are whose is kept: their paths may be
    /// written in them, so that the live directories themselves are often the place.
    ///
    /// # Errors
    /// The system's.
    pub fn write_to(&self, roots: &[PathBuf]) -> io::Result<()> {
        for root in roots {
            for entry in fs::read_dir(root)? {
                let path = entry?.path();
                if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
            }
        }
        let mut written: BTreeMap<Inode, PathBuf> = BTreeMap::new();
        for ((root, path), found) in &self.found {
            let path = roots[*root].join(path);
            match found {
                Found::Dir => fs::create_dir(path)?,
                Found::File(file) => match written.get(file) {
                    Some(first) => fs::hard_link(first, path)?,
                    None => {
                        fs::write(&path, &self.contents[file])?;
                        written.insert(*file, path);
                    }
                },
            }
        }
        Ok(())
    }
}

/// Adds what is in a directory.
fn walk(
    journal: &Journal,
    names: &Names,
    (root, dir): (usize, Inode),
    path: &Path,
    found: &mut BTreeMap<(usize, PathBuf), Found>,
) {
    for ((_, name), inode) in names.range((dir, Default::default())..(dir + 1, Default::default()))
    {
        let path = path.join(name);
        let is_dir = journal.nodes[*inode].is_dir;
        found.insert((root, path.clone()), if is_dir { Found::Dir } else { Found::File(*inode) });
        if is_dir {
            walk(journal, names, (root, *inode), &path, found);
        }
    }
}
