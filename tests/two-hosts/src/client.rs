//! A host: what it remembers of the server's answers, and which files its programs have open.

use crate::Rules;
use crate::tree::{Attributes, Entry, Node, Tree};
use fastrand::Rng;
use fuser::{Errno, FileType};
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::ffi::{OsStr, OsString};
use std::hash::Hash;

/// Answers that a host repeats without asking the server, each until its request number.
struct Remembered<K, V>(HashMap<K, (u64, V)>);

impl<K: Hash + Eq, V: Clone> Remembered<K, V> {
    fn get(&self, key: &K, now: u64) -> Option<V> {
        self.0.get(key).filter(|(until, _)| now < *until).map(|(_, answer)| answer.clone())
    }
}

/// An open file.
struct Open {
    number: u64,
    /// Closed by its program; the kernel releases it later.
    closed: bool,
    /// The name that the host gave it when a program removed it.
    hidden: Option<(u64, OsString)>,
    /// A write was lost, and neither a sync nor a close has reported that.
    lost: bool,
}

/// One host's part of the file system.
pub struct Client {
    host: usize,
    rules: Rules,
    random: Rng,
    requests: u64,
    writes: u64,
    names: Remembered<(u64, OsString), Option<u64>>,
    listings: Remembered<u64, Vec<Entry>>,
    attributes: Remembered<u64, Attributes>,
    open: HashMap<u64, Open>,
    listed: HashMap<u64, Vec<Entry>>,
    last_handle: u64,
}

impl Client {
    pub fn new(host: usize, rules: Rules, seed: u64) -> Self {
        Self {
            host,
            rules,
            random: Rng::with_seed(seed),
            requests: 0,
            writes: 0,
            names: Remembered(HashMap::new()),
            listings: Remembered(HashMap::new()),
            attributes: Remembered(HashMap::new()),
            open: HashMap::new(),
            listed: HashMap::new(),
            last_handle: 0,
        }
    }

    pub fn set_rules(&mut self, rules: Rules) {
        (self.rules, self.writes) = (rules, 0);
    }

    /// Forgets all that it remembers.
    pub fn refresh(&mut self) {
        self.names.0.clear();
        self.listings.0.clear();
        self.attributes.0.clear();
    }

    /// Counts a request, which is what remembered answers age by.
    pub fn count(&mut self) {
        self.requests += 1;
    }

    /// The request at which an answer of now is forgotten.
    fn until(&mut self) -> u64 {
        self.requests + self.random.u64(0..=self.rules.stale_requests)
    }

    /// Remembers a name as the server has just confirmed it.
    fn remember(&mut self, dir: u64, name: &OsStr, number: Option<u64>) {
        let until = self.until();
        self.names.0.insert((dir, name.into()), (until, number));
    }

    /// This host changed a name: its own listing shows that, and otherwise stays as old as it is.
    fn changed(&mut self, dir: u64, name: &OsStr, entry: Option<(u64, FileType)>) {
        self.remember(dir, name, entry.map(|(number, _)| number));
        if let Some((_, listing)) = self.listings.0.get_mut(&dir) {
            listing.retain(|(other, ..)| other != name);
            listing.extend(entry.map(|(number, kind)| (name.into(), number, kind)));
        }
    }

    /// The server does not know a number: whatever led there is forgotten.
    fn forget(&mut self, number: u64) -> Errno {
        self.attributes.0.remove(&number);
        self.listings.0.remove(&number);
        self.names.0.retain(|(dir, _), (_, to)| *dir != number && *to != Some(number));
        Errno::ESTALE
    }

    /// Passes an error on, and forgets the number if the server no longer knows it.
    fn noted<T>(&mut self, number: u64, done: Result<T, Errno>) -> Result<T, Errno> {
        done.map_err(|error| if is_stale(error) { self.forget(number) } else { error })
    }

    pub fn find(&mut self, tree: &Tree, dir: u64, name: &OsStr) -> Result<Attributes, Errno> {
        let known = self.names.get(&(dir, name.into()), self.requests);
        if let Some(number) = known {
            let number = number.ok_or(Errno::ENOENT)?;
            match self.attributes(tree, number) {
                Err(error) if is_stale(error) => {} // forgotten by now: ask the server
                found => return found,
            }
        }
        let found = tree.find(dir, name);
        let found = self.noted(dir, found)?;
        self.remember(dir, name, found);
        self.attributes(tree, found.ok_or(Errno::ENOENT)?)
    }

    pub fn attributes(&mut self, tree: &Tree, number: u64) -> Result<Attributes, Errno> {
        match self.attributes.get(&number, self.requests) {
            Some(known) => Ok(known),
            None => self.fresh_attributes(tree, number),
        }
    }

    /// As the server has them.
    fn fresh_attributes(&mut self, tree: &Tree, number: u64) -> Result<Attributes, Errno> {
        let found = tree.attributes(number);
        let found = self.noted(number, found)?;
        let until = self.until();
        self.attributes.0.insert(number, (until, found));
        Ok(found)
    }

    pub fn set_attributes(
        &mut self,
        tree: &mut Tree,
        number: u64,
        (mode, bytes): (Option<u32>, Option<u64>),
    ) -> Result<Attributes, Errno> {
        let set = mode
            .map_or(Ok(()), |mode| tree.change_mode(number, mode as u16 & 0o7777))
            .and_then(|()| match bytes {
                Some(bytes) => {
                    tree.change_content(number).map(|file| file.resize(bytes as usize, 0))
                }
                None => Ok(()),
            });
        self.noted(number, set)?;
        self.fresh_attributes(tree, number)
    }

    pub fn make_dir(
        &mut self,
        tree: &mut Tree,
        (dir, name): (u64, &OsStr),
        mode: u32,
    ) -> Result<Attributes, Errno> {
        self.create(tree, (dir, name), Node::Dir(Default::default()), mode)
    }

    fn create(
        &mut self,
        tree: &mut Tree,
        (dir, name): (u64, &OsStr),
        node: Node,
        mode: u32,
    ) -> Result<Attributes, Errno> {
        let created = tree.create(dir, name, node, mode as u16 & 0o7777);
        // A taken name is news.
        self.names.0.remove(&(dir, name.into()));
        let number = self.noted(dir, created)?;
        let found = self.fresh_attributes(tree, number)?;
        self.changed(dir, name, Some((number, found.kind)));
        Ok(found)
    }

    /// Creates a file, or opens the one that is there unless `flags` forbid it.
    pub fn create_file(
        &mut self,
        tree: &mut Tree,
        (dir, name): (u64, &OsStr),
        mode: u32,
        flags: i32,
    ) -> Result<(Attributes, u64), Errno> {
        self.check_flags(flags)?;
        let created = self.create(tree, (dir, name), Node::File(Vec::new()), mode);
        let found = match created {
            Err(error) if error.code() == libc::EEXIST && flags & libc::O_EXCL == 0 => {
                self.find(tree, dir, name)?
            }
            created => created?,
        };
        let handle = self.open(tree, found.number, flags)?;
        Ok((found, handle))
    }

    fn check_flags(&self, flags: i32) -> Result<(), Errno> {
        match self.rules.direct || flags & libc::O_DIRECT == 0 {
            true => Ok(()),
            false => Err(Errno::EINVAL),
        }
    }

    fn handle(&mut self) -> u64 {
        self.last_handle += 1;
        self.last_handle
    }

    /// Opens a file, which asks the server for it anew ("close to open").
    pub fn open(&mut self, tree: &Tree, number: u64, flags: i32) -> Result<u64, Errno> {
        self.check_flags(flags)?;
        self.fresh_attributes(tree, number)?;
        let handle = self.handle();
        let open = Open { number, closed: false, hidden: None, lost: false };
        self.open.insert(handle, open);
        Ok(handle)
    }

    pub fn read(
        &mut self,
        tree: &Tree,
        number: u64,
        (offset, bytes): (u64, u32),
    ) -> Result<Vec<u8>, Errno> {
        let content = tree.content(number).map(|content| {
            let from = content.len().min(offset as usize);
            let to = content.len().min(from + bytes as usize);
            content[from..to].to_vec()
        });
        self.noted(number, content)
    }

    pub fn write(
        &mut self,
        tree: &mut Tree,
        (number, handle): (u64, u64),
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.writes += 1;
        // The host has taken the bytes from the program, so only a sync or the close can report the loss.
        if self.rules.lose_every > 0 && self.writes.is_multiple_of(self.rules.lose_every) {
            self.open.get_mut(&handle).ok_or(Errno::EBADF)?.lost = true;
            return Ok(());
        }
        let written = tree.change_content(number).map(|content| {
            let end = offset as usize + bytes.len();
            content.resize(content.len().max(end), 0);
            content[offset as usize..end].copy_from_slice(bytes);
        });
        self.noted(number, written)?;
        self.fresh_attributes(tree, number).map(drop)
    }

    /// A sync: the last moment but one to report a lost write.
    pub fn sync(&mut self, handle: u64) -> Result<(), Errno> {
        let open = self.open.get_mut(&handle).ok_or(Errno::EBADF)?;
        match std::mem::take(&mut open.lost) {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }

    /// A program closes a file. Reports a lost write that no sync has reported, and leaves it to a later sync, too, as
    /// Linux does: a forked child closes what it inherited.
    pub fn close(&mut self, tree: &mut Tree, handle: u64) -> Result<(), Errno> {
        let open = self.open.get_mut(&handle).ok_or(Errno::EBADF)?;
        open.closed = true;
        let (number, lost) = (open.number, open.lost);
        tree.unlock((self.host, handle));
        self.unhide(tree, number);
        if lost { Err(Errno::EIO) } else { Ok(()) }
    }

    /// Locks a file on the server, or releases the lock. There are locks of whole files for one writer only.
    pub fn lock(
        &mut self,
        tree: &mut Tree,
        (number, handle): (u64, u64),
        kind: i32,
    ) -> Result<(), Errno> {
        let holder = (self.host, handle);
        match kind {
            libc::F_UNLCK => {
                tree.unlock(holder);
                Ok(())
            }
            libc::F_WRLCK => {
                let locked = tree.lock(number, holder);
                self.noted(number, locked)
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// The kernel needs the handle no more.
    pub fn release(&mut self, handle: u64) {
        self.open.remove(&handle);
    }

    /// Removes a hidden file once no program has it open.
    fn unhide(&mut self, tree: &mut Tree, number: u64) {
        if self.is_open(number) {
            return;
        }
        for open in self.open.values_mut().filter(|open| open.number == number) {
            if let Some((dir, name)) = open.hidden.take() {
                let _ = tree.remove(dir, &name, FileType::RegularFile);
            }
        }
    }

    fn is_open(&self, number: u64) -> bool {
        self.open.values().any(|open| open.number == number && !open.closed)
    }

    /// A file that is removed while a program of this host has it open gets a hidden name until it is closed
    /// ("silly rename"). Says whether it did.
    fn hide(&mut self, tree: &mut Tree, dir: u64, name: &OsStr) -> Result<bool, Errno> {
        let Some(number) = tree.find(dir, name)?.filter(|&number| self.is_open(number)) else {
            return Ok(false);
        };
        let hidden = OsString::from(format!(".nfs{number:016x}"));
        tree.rename((dir, name), (dir, &hidden))?;
        for open in self.open.values_mut().filter(|open| open.number == number) {
            open.hidden = Some((dir, hidden.clone()));
        }
        Ok(true)
    }

    pub fn remove(
        &mut self,
        tree: &mut Tree,
        (dir, name): (u64, &OsStr),
        kind: FileType,
    ) -> Result<(), Errno> {
        let removed = match self.hide(tree, dir, name) {
            Ok(true) => Ok(()),
            Ok(false) => tree.remove(dir, name, kind),
            Err(error) => Err(error),
        };
        self.names.0.remove(&(dir, name.into()));
        self.noted(dir, removed)?;
        self.changed(dir, name, None);
        Ok(())
    }

    pub fn rename(
        &mut self,
        tree: &mut Tree,
        from: (u64, &OsStr),
        to: (u64, &OsStr),
    ) -> Result<(), Errno> {
        for (dir, name) in [from, to] {
            self.names.0.remove(&(dir, name.into()));
            self.noted(dir, tree.attributes(dir))?;
        }
        let number = tree.find(from.0, from.1)?.ok_or(Errno::ENOENT)?;
        if tree.find(to.0, to.1)? != Some(number) {
            self.hide(tree, to.0, to.1)?;
        }
        tree.rename(from, to)?;
        let kind = tree.attributes(number)?.kind;
        self.changed(from.0, from.1, None);
        self.changed(to.0, to.1, Some((number, kind)));
        Ok(())
    }

    pub fn open_dir(&mut self, tree: &Tree, dir: u64) -> Result<u64, Errno> {
        let listing = match self.listings.get(&dir, self.requests) {
            Some(known) => known,
            None => {
                let listing = tree.list(dir);
                let listing = self.noted(dir, listing)?;
                let until = self.until();
                self.listings.0.insert(dir, (until, listing.clone()));
                listing
            }
        };
        let handle = self.handle();
        self.listed.insert(handle, listing);
        Ok(handle)
    }

    /// The listing that an open directory shows.
    pub fn listing(&self, handle: u64) -> Result<&[Entry], Errno> {
        self.listed.get(&handle).map(Vec::as_slice).ok_or(Errno::EBADF)
    }

    pub fn release_dir(&mut self, handle: u64) {
        if let Slot::Occupied(listed) = self.listed.entry(handle) {
            listed.remove();
        }
    }
}

fn is_stale(error: Errno) -> bool {
    error.code() == libc::ESTALE
}
