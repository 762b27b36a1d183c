//! The knobs. The same struct in Rust and (field for field) in Python.

mod found;

use crate::error::{Error, Result};
use crate::limits::{ALIGN, FIXED_BUFFERS_MAX};
use crate::sys::path;
use bytesize::ByteSize;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// Directories that a checkpoint can be striped over beside its own.
const STRIPE_MAX: usize = 64;

/// Which engine moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum EngineChoice {
    /// io_uring where it works, else the portable engine; the report says which and why.
    #[default]
    Auto,
    /// io_uring, or an error with its remedy.
    Uring,
    /// Threads with positioned reads and writes.
    Portable,
    /// io_uring through tokio-uring, or an error with its remedy: in builds with the cargo feature
    /// `tokio-uring` only, and never taken by [`EngineChoice::Auto`].
    #[serde(rename = "tokio-uring")]
    TokioUring,
}

/// A feature that is used where it works, always, or never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Switch {
    /// Used where it works; the report says when it does not, and why.
    #[default]
    Auto,
    /// Used, or an error with its remedy.
    On,
    /// Not used.
    Off,
}

/// How to save and load. The defaults are right for most machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Bytes of staging memory at most: the only memory a save needs, however large the checkpoint. It is
    /// taken as it is needed. As large as the checkpoint makes a save a snapshot; smaller streams. Default
    /// 256 MiB.
    #[serde(deserialize_with = "size")]
    pub pool_bytes: u64,
    /// Bytes of one staging buffer, which is also one transfer. A multiple of 4096. Default 4 MiB.
    #[serde(deserialize_with = "size")]
    pub block_bytes: u64,
    /// Transfers in flight at once. Default 8.
    pub queue_depth: u32,
    /// Threads that copy and checksum. 0, the default, means one a core, at most four.
    pub fillers: u32,
    /// Which engine moves the bytes.
    pub engine: EngineChoice,
    /// O_DIRECT: past the page cache.
    pub direct: Switch,
    /// Fixed buffers: staging memory registered with io_uring once, not pinned at every transfer. On, all of it
    /// is taken and registered at once, or the save fails; loads go through it too, or fail.
    pub fixed: Switch,
    /// Largest shard file in bytes, as far as whole tensors allow; 0, the default, means no limit.
    #[serde(deserialize_with = "size")]
    pub shard_bytes: u64,
    /// Shard files that a save writes at the same time in each directory, of about as many bytes
    /// each; of whole tensors, so that one larger than its fair share makes its file larger. From 1,
    /// the default, to 64.
    pub files: u32,
    /// Directories on other disks, over which checkpoints are striped: `<parent>/<name>` has a
    /// stripe directory `<stripe>/<name>` in each, and a save writes [`Config::files`] files into
    /// each of them and into its own. They must exist: a disk that is not mounted is an error. Readers
    /// need them too. Default none.
    pub stripe: Vec<PathBuf>,
    /// Whether the files of a checkpoint that is replaced are kept for the next save to write over, as
    /// [`remove`](crate::remove()) keeps those of one that is removed. Takes the room of one more
    /// checkpoint. Default false.
    pub recycle: bool,
    /// A file to write what each block of a save or load went through, and when, in the trace format
    /// of Chrome and Perfetto. Default none. One that is there is replaced.
    pub trace: Option<PathBuf>,
}

/// What pool and engines are made for: configurations with equal ones share them ([`Config::machine`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MachineConfig {
    pub buffers: usize,
    pub block_bytes: u64,
    pub queue_depth: u32,
    pub fixed: Switch,
}

/// The fields' names, in order.
const FIELDS: &[&str] = &[
    "pool_bytes",
    "block_bytes",
    "queue_depth",
    "fillers",
    "engine",
    "direct",
    "fixed",
    "shard_bytes",
    "files",
    "stripe",
    "recycle",
    "trace",
];

impl Default for Config {
    fn default() -> Self {
        Self {
            pool_bytes: 256 << 20,
            block_bytes: 4 << 20,
            queue_depth: 8,
            fillers: 0,
            engine: EngineChoice::Auto,
            direct: Switch::Auto,
            fixed: Switch::Auto,
            shard_bytes: 0,
            files: 1,
            stripe: Vec::new(),
            recycle: false,
            trace: None,
        }
    }
}

impl Config {
    /// Checks the fields, and against each other. Whatever takes a configuration does that first.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, its value and what it may be.
    pub fn validate(&self) -> Result<()> {
        let bad = |field: &str, value: u64, may_be: &str| {
            Err(Error::invalid(format!("Config.{field} = {value}: must be {may_be}")))
        };
        if self.block_bytes < ALIGN as u64
            || self.block_bytes > 1 << 30
            || !self.block_bytes.is_multiple_of(ALIGN as u64)
        {
            return bad("block_bytes", self.block_bytes, "a multiple of 4096, from 4 KiB to 1 GiB");
        }
        if self.pool_bytes < 2 * self.block_bytes {
            return bad("pool_bytes", self.pool_bytes, "at least two blocks (2 * block_bytes)");
        }
        if self.pool_bytes > 1 << 44 {
            return bad("pool_bytes", self.pool_bytes, "at most 16 TiB");
        }
        if self.buffers() > FIXED_BUFFERS_MAX {
            let most =
                format!("at most {} times block_bytes = {}", FIXED_BUFFERS_MAX, self.block_bytes);
            return bad("pool_bytes", self.pool_bytes, &most);
        }
        if self.queue_depth == 0 || self.queue_depth > 1024 {
            return bad("queue_depth", self.queue_depth.into(), "from 1 to 1024");
        }
        if self.fillers > 256 {
            return bad("fillers", self.fillers.into(), "from 0 (automatic) to 256");
        }
        if self.files == 0 || self.files > 64 {
            return bad("files", self.files.into(), "from 1 to 64");
        }
        if self.engine == EngineChoice::Portable && self.fixed == Switch::On {
            return Err(Error::invalid(
                "Config.engine = portable and Config.fixed = on contradict each other: only io_uring \
                 has fixed buffers; leave one of them on auto",
            ));
        }
        for (field, path) in self
            .stripe
            .iter()
            .map(|dir| ("stripe", dir))
            .chain(self.trace.iter().map(|file| ("trace", file)))
        {
            path::check(path).map_err(|why| Error::invalid(format!("Config.{field}: {why}")))?;
        }
        self.check_stripe()
    }

    fn check_stripe(&self) -> Result<()> {
        let bad = |why: String| Err(Error::invalid(format!("Config.stripe {why}")));
        if self.stripe.len() > STRIPE_MAX {
            let n = self.stripe.len();
            return bad(format!("names {n} directories: it may name {STRIPE_MAX} at most"));
        }
        for (index, dir) in self.stripe.iter().enumerate() {
            if dir.as_os_str().is_empty() {
                return bad("names an empty path: leave it out".into());
            }
            if self.stripe[..index].contains(dir) {
                return bad(format!("names {} twice: each is a disk of its own", dir.display()));
            }
        }
        Ok(())
    }

    /// Bytes that one checksum covers, the least that a checked load reads: 1 MiB, or a whole
    /// buffer where that is no multiple of it.
    pub fn checksum_bytes(&self) -> u64 {
        const MIB: u64 = 1 << 20;
        if self.block_bytes.is_multiple_of(MIB) { MIB } else { self.block_bytes }
    }

    /// The part of the configuration that pool and engines depend on. The rest is given with each save or load.
    pub(crate) fn machine(&self) -> MachineConfig {
        let Self { block_bytes, queue_depth, fixed, .. } = *self;
        MachineConfig { buffers: self.buffers(), block_bytes, queue_depth, fixed }
    }

    /// Buffers in the pool.
    pub fn buffers(&self) -> usize {
        (self.pool_bytes / self.block_bytes) as usize
    }

    /// Threads that copy and checksum, with 0 resolved to this machine's number.
    pub fn filler_threads(&self) -> usize {
        match self.fillers {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()).min(4),
            n => n as usize,
        }
    }
}

/// A size as `dd` and `fio` read it: a bare letter is a power of two. What `Config`, variables, `ringstow.toml`
/// and the program's flags take.
///
/// # Errors
/// What a size is.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let bare = text.ends_with(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let full = if bare { format!("{text}iB") } else { text.to_owned() };
    let size: ByteSize =
        full.parse().map_err(|_| "a size is a number and a unit: 4M, 256MiB, 1GB".to_owned())?;
    Ok(size.as_u64())
}

/// A number of bytes, or a size in words.
fn size<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<u64, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size in bytes")
        }

        fn visit_u64<E: de::Error>(self, bytes: u64) -> std::result::Result<u64, E> {
            Ok(bytes)
        }

        fn visit_i64<E: de::Error>(self, bytes: i64) -> std::result::Result<u64, E> {
            bytes.try_into().map_err(|_| E::custom("a size is not negative"))
        }

        fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<u64, E> {
            parse_size(text).map_err(E::custom)
        }
    }
    from.deserialize_any(Size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_letter_is_a_power_of_two() {
        assert_eq!(parse_size("4M"), Ok(4 << 20));
        assert_eq!(parse_size("4m"), Ok(4 << 20));
        assert_eq!(parse_size("256MiB"), Ok(256 << 20));
        assert_eq!(parse_size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_size("4MB"), Ok(4_000_000));
        assert_eq!(parse_size("65536"), Ok(65536));
        for bad in ["", "M", "-4M", "4X", "4 apples"] {
            assert!(parse_size(bad).is_err(), "{bad:?}");
        }
    }
}
