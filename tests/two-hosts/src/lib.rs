//! A network file system for tests. A [`Share`] is a tree in memory that two hosts mount: two FUSE mounts, each with the
//! kernel's own locks, and with the caches that an NFS client has.
//!
//! It promises no more than NFS does:
//!
//! - Locks (flock, fcntl, open file description) are local to a mount, unless [`Rules::shared_locks`] passes locks of
//!   files on.
//! - A host repeats what it knows of names, of missing names, listings and attributes for [`Rules::stale_requests`]
//!   requests, or until [`Host::refresh`]. Its own changes it sees at once. There is no clock in it.
//! - Opening a file asks the server. A file or directory that the other host has removed is `ESTALE`.
//! - A file that is removed while a program of the same host has it open keeps a hidden name (`.nfs…`) until it is
//!   closed, and its directory cannot be removed.
//! - A lost write is reported by the next sync or the close, not by the write ([`Rules::lose_every`]).
//! - Renames take no flags, files reserve no space, `O_DIRECT` may be refused ([`Rules::direct`]).
//!
//! And no less: creation with `O_EXCL`, `mkdir` and a rename happen once for all hosts, and a host reads what another
//! has written before it opened the file. A rename over a file that a program of the same host has open is atomic as
//! well, which NFS does not promise.
//!
//! While programs of both hosts are [working](Host::work), a seed decides whose request is answered next.
#![cfg(target_os = "linux")]

mod client;
mod fuse;
mod server;
mod tree;
mod turns;

pub use server::serve;

use serde::{Deserialize, Serialize};
use server::{ASKED, Order, REPLY};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// How a host behaves.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Rules {
    /// The largest number of requests of this host for which it repeats an answer; each answer gets a random number up
    /// to it. 0: it always asks the server.
    pub stale_requests: u64,
    /// Whether files can be opened with `O_DIRECT`.
    pub direct: bool,
    /// Every so many writes of this host, counted since the rules were set, one is lost. 0: none.
    pub lose_every: u64,
    /// Whether the kernel passes locks of files (fcntl, open file description) on, so that they keep out the other host.
    /// Decided when the share is mounted.
    pub shared_locks: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { stale_requests: 0, direct: true, lose_every: 0, shared_locks: false }
    }
}

/// A tree that two hosts share.
pub struct Share {
    hosts: [Host; 2],
    server: Arc<Server>,
}

/// One host's mount of a [`Share`].
pub struct Host {
    number: usize,
    point: PathBuf,
    server: Arc<Server>,
}

/// The process that answers both mounts. Not the caller's: a process that is killed with files of its own mount open
/// could never end.
struct Server {
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    process: Mutex<Child>,
}

impl Share {
    /// Mounts an empty tree at `a` and `b` below a folder. `server` is a command whose process calls [`serve`].
    ///
    /// # Errors
    /// The system's, where FUSE cannot be mounted.
    pub fn mount(mut server: Command, below: &Path, rules: Rules, seed: u64) -> io::Result<Self> {
        let points = ["a", "b"].map(|name| below.join(name));
        points.iter().try_for_each(std::fs::create_dir)?;
        let asked = serde_json::to_string(&(&points, rules, seed))?;
        let mut process =
            server.env(ASKED, asked).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        let stdin = process.stdin.take().ok_or_else(closed)?;
        let stdout = BufReader::new(process.stdout.take().ok_or_else(closed)?);
        let pipes = Mutex::new((stdin, stdout));
        let server = Arc::new(Server { pipes, process: Mutex::new(process) });
        server.reply()?;
        let [a, b] = points;
        let host = |number, point| Host { number, point, server: Arc::clone(&server) };
        Ok(Self { hosts: [host(0, a), host(1, b)], server })
    }

    /// A host, by its number 0 or 1.
    pub fn host(&self, number: usize) -> &Host {
        &self.hosts[number]
    }

    /// Both hosts.
    pub fn hosts(&self) -> &[Host; 2] {
        &self.hosts
    }

    /// Has both hosts forget what they remember.
    pub fn refresh(&self) {
        self.hosts.iter().for_each(Host::refresh);
    }
}

impl Drop for Share {
    /// Unmounts both.
    fn drop(&mut self) {
        self.server.order(&Order::End);
        let process = self.server.process.lock().unwrap_or_else(PoisonError::into_inner).wait();
        if let Err(error) = process {
            eprintln!("two-hosts: {error}");
        }
    }
}

impl Server {
    fn order(&self, order: &Order) {
        let mut pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = serde_json::to_string(order).map_err(io::Error::from);
        sent.and_then(|order| writeln!(pipes.0, "{order}")).expect("the server runs");
        read_reply(&mut pipes.1).expect("the server answers");
    }

    fn reply(&self) -> io::Result<()> {
        read_reply(&mut self.pipes.lock().unwrap_or_else(PoisonError::into_inner).1)
    }
}

/// Waits for the server's next reply; empty, unless it failed.
fn read_reply(from: &mut impl BufRead) -> io::Result<()> {
    for line in from.lines() {
        match line?.strip_prefix(REPLY) {
            Some("") => return Ok(()),
            Some(error) => return Err(io::Error::other(error.to_owned())),
            None => {} // of the test harness
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

impl Host {
    /// Where the share is mounted.
    pub fn path(&self) -> &Path {
        &self.point
    }

    /// Changes how this host behaves.
    pub fn set_rules(&self, rules: Rules) {
        self.server.order(&Order::Rules(self.number, rules));
    }

    /// Forgets names, listings and attributes: from now on, the host sees what the other one has done so far.
    pub fn refresh(&self) {
        self.server.order(&Order::Refresh(self.number));
    }

    /// A program of this host works until the returned guard is dropped. While programs of both hosts do, their
    /// requests take turns; a host that waits for the other one must not be working.
    #[must_use = "dropped, it ends the work"]
    pub fn work(&self) -> Working<'_> {
        self.server.order(&Order::Work(self.number, true));
        Working(self)
    }
}

/// See [`Host::work`].
pub struct Working<'a>(&'a Host);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.server.order(&Order::Work(self.0.number, false));
    }
}
