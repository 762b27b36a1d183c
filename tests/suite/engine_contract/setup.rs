//! The engines under test, and what the cases share.

use fake_engines::AtOnce;
use ringstow::Switch;
use ringstow::internals::{
    engine::{
        Action, Completion, Engine, FileId, Op, Transfer,
        portable::Portable,
        queue::{Attached, Queue},
    },
    limits::ALIGN,
    pool::{Buffer, Pool},
    sys::file,
};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

pub const DEPTH: usize = 4;
pub const BLOCK: usize = 4 * ALIGN;
pub const BUFFERS: usize = 16;

type Build = fn(&Pool) -> io::Result<Box<dyn Engine>>;

/// An engine, how files are opened for it, and a directory.
pub struct Setup {
    pub build: Build,
    pub direct: bool,
    pub pool: Pool,
    pub dir: TempDir,
}

fn portable(_: &Pool) -> io::Result<Box<dyn Engine>> {
    Ok(Box::new(Portable::new(DEPTH)?))
}

#[cfg(all(target_os = "linux", feature = "uring"))]
fn uring(pool: &Pool, fixed: Switch) -> io::Result<Box<dyn Engine>> {
    Ok(Box::new(ringstow::internals::engine::uring::Uring::new(DEPTH, Some(pool), fixed)?))
}

#[cfg(not(all(target_os = "linux", feature = "uring")))]
fn uring(_: &Pool, _: Switch) -> io::Result<Box<dyn Engine>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(target_os = "linux", feature = "tokio-uring"))]
fn tokio_uring(pool: &Pool, fixed: Switch) -> io::Result<Box<dyn Engine>> {
    Ok(Box::new(ringstow::internals::engine::tokio_uring::TokioUring::new(
        DEPTH,
        Some(pool),
        fixed,
    )?))
}

#[cfg(not(all(target_os = "linux", feature = "tokio-uring")))]
fn tokio_uring(_: &Pool, _: Switch) -> io::Result<Box<dyn Engine>> {
    Err(io::ErrorKind::Unsupported.into())
}

impl Setup {
    pub fn portable_buffered() -> Option<Self> {
        Self::new(portable, false)
    }

    pub fn null() -> Option<Self> {
        Self::new(|_| Ok(Box::new(AtOnce::null(DEPTH))), false)
    }

    pub fn portable_direct() -> Option<Self> {
        Self::new(portable, true)
    }

    pub fn uring_fixed_direct() -> Option<Self> {
        Self::new(|pool| uring(pool, Switch::Auto), true)
    }

    pub fn uring_direct() -> Option<Self> {
        Self::new(|pool| uring(pool, Switch::Off), true)
    }

    pub fn uring_fixed_buffered() -> Option<Self> {
        Self::new(|pool| uring(pool, Switch::Auto), false)
    }

    pub fn tokio_uring_fixed_direct() -> Option<Self> {
        Self::new(|pool| tokio_uring(pool, Switch::Auto), true)
    }

    pub fn tokio_uring_direct() -> Option<Self> {
        Self::new(|pool| tokio_uring(pool, Switch::Off), true)
    }

    pub fn tokio_uring_fixed_buffered() -> Option<Self> {
        Self::new(|pool| tokio_uring(pool, Switch::Auto), false)
    }

    /// `None`, with a message, where this machine has no such engine.
    fn new(build: Build, direct: bool) -> Option<Self> {
        let pool = Pool::new(BUFFERS, BLOCK).unwrap();
        let setup = Self { build, direct, pool, dir: tempfile::tempdir().unwrap() };
        let skipped = |what: &str, error: io::Error| eprintln!("skipped: {what}: {error}");
        if let Err(error) = build(&setup.pool) {
            skipped("no such engine here", error);
            return None;
        }
        if let Err(error) = file::create(&setup.path("probe"), direct) {
            skipped("no direct I/O here", error);
            return None;
        }
        Some(setup)
    }

    pub fn engine(&self) -> Box<dyn Engine> {
        (self.build)(&self.pool).unwrap()
    }

    pub fn queue(&self) -> Queue {
        self.queue_over(|engine| engine)
    }

    /// A queue over an engine that `wrap` has changed.
    pub fn queue_over(
        &self,
        wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine> + Send + 'static,
    ) -> Queue {
        let (build, pool) = (self.build, self.pool.clone());
        Queue::start("ringstow-io", move || Ok(wrap(build(&pool)?))).unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn create(&self, name: &str) -> Arc<File> {
        Arc::new(file::create(&self.path(name), self.direct).unwrap())
    }

    pub fn open(&self, name: &str) -> Arc<File> {
        Arc::new(file::open_read(&self.path(name), self.direct).unwrap())
    }

    /// A buffer full of what [`pattern`] gives for a block.
    pub fn filled(&self, block: usize) -> Buffer {
        let mut buffer = self.pool.lease().unwrap();
        buffer.copy_from_slice(&pattern(block));
        buffer
    }

    /// Takes every buffer, and thereby shows that nobody else has one.
    pub fn assert_no_buffer_is_lost(&self) {
        let all: Vec<_> = std::iter::from_fn(|| self.pool.try_lease()).collect();
        assert_eq!(all.len(), BUFFERS);
    }
}

/// Bytes that tell their place: no two words of a file's blocks are equal.
pub fn pattern(block: usize) -> Vec<u8> {
    let words = BLOCK / 8;
    (0..words).flat_map(|word| ((block * words + word + 1) as u64).to_le_bytes()).collect()
}

/// The whole of a block, at its place in the file.
pub fn whole(buffer: Buffer, block: usize) -> Transfer {
    Transfer::of(buffer, BLOCK, (block * BLOCK) as u64)
}

/// Syncs a file through its queue.
pub fn sync(queue: &Queue, file: &Attached) -> io::Result<()> {
    queue.start_one(file, Action::Sync, 0).wait().result
}

/// Submits the actions, tokens counting from 0, and returns their completions by token.
pub fn run(engine: &mut dyn Engine, file: FileId, actions: Vec<Action>) -> Vec<Completion> {
    let count = actions.len();
    for (token, action) in actions.into_iter().enumerate() {
        engine.submit(Op { token: token as u64, file, action });
    }
    let mut done = Vec::new();
    while done.len() < count {
        engine.wait(&mut done).unwrap();
    }
    done.sort_by_key(|completion| completion.op.token);
    done
}

/// Runs one action.
pub fn run_one(engine: &mut dyn Engine, file: FileId, action: Action) -> Completion {
    run(engine, file, vec![action]).pop().unwrap()
}

/// A file system of 1 MiB, unmounted on drop.
pub struct Tiny(TempDir);

impl Tiny {
    /// `None`, with a message, for who may not mount.
    pub fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1M", "tmpfs"])
            .arg(dir.path())
            .output()
            .is_ok_and(|output| output.status.success());
        if !mounted {
            eprintln!("skipped: only root can mount a small file system");
        }
        mounted.then(|| Self(dir))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        // Lazily: the kernel may hold a registered file a little longer than its ring lives.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
