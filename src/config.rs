//! The settings. Python's `Config` has the same fields.

pub mod found;
mod priority;
mod variables;

pub use priority::IoPriority;
pub(crate) use priority::Priority;
pub use variables::shows_progress;

use crate::error::{Error, Result};
use crate::limits::{ALIGN, FIXED_BUFFERS_MAX, STRIPES_MAX};
use crate::sys::path;
use bytesize::ByteSize;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::path::PathBuf;

/// What a save or load needs to be as fast as the disk.
const STAGING_BYTES: u64 = 256 << 20;

/// Which engine moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum EngineChoice {
    /// io_uring if it works, otherwise the portable engine; the report says which and why.
    #[default]
    Auto,
    /// io_uring; if it does not work, an error that says how to fix it.
    Uring,
    /// Threads with positioned reads and writes.
    Portable,
    /// io_uring through tokio-uring, or an error. Needs the cargo feature `tokio-uring`; [`EngineChoice::Auto`] never
    /// selects it.
    #[serde(rename = "tokio-uring")]
    TokioUring,
}

/// Whether to use a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Switch {
    /// Use it if it works; otherwise the report says why not.
    #[default]
    Auto,
    /// Use it; if it does not work, an error that says how to fix it.
    On,
    /// Do not use it.
    Off,
}

/// Which ranks of a load share what they read, instead of each reading all that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareReads {
    /// Those with which it pays, by what the ranks measure: none, those of each host, or all.
    #[default]
    Auto,
    /// None.
    Off,
    /// Those of each host, through its page cache.
    Host,
    /// All: one reads what several need, and sends it to them.
    Group,
}

/// How to save and load. The defaults are right for most machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Most bytes of staging memory, allocated as needed. Each process has a pool of its own: the ranks of a node take
    /// ranks * `pool_bytes` together. A save of any size streams through it.
    ///
    /// 0, the default, which texts call `auto`, means 256 MiB, but for background saves as much as the state needs, so that
    /// training waits for memory and not for the disk, as long as the background saves of all processes of the machine take
    /// no more than half of the memory that the machine and their control groups have available.
    #[serde(deserialize_with = "size_or_auto", serialize_with = "auto_or_size")]
    pub pool_bytes: u64,
    /// Bytes of one staging buffer and of one transfer. A multiple of 4096. Default 4 MiB.
    #[serde(deserialize_with = "size")]
    pub block_bytes: u64,
    /// Transfers in flight at once. Default 8.
    pub queue_depth: u32,
    /// Threads that copy and checksum. 0, the default, means one per core, at most eight.
    pub fillers: u32,
    /// How far the threads that ringstow starts come after the program's own where cores are short: added to the niceness
    /// of the process, as `nice` does. A thread of the caller's that saves keeps its priority. From 0, the default, to 19.
    pub nice: u32,
    /// How far their disk I/O comes after that of others. Default normal.
    pub io_priority: IoPriority,
    /// Most bytes per second that a save writes, so that others get their share of a disk or network. Copying tensors does
    /// not slow down until the pool is full. 0, the default, means no limit.
    #[serde(deserialize_with = "size")]
    pub write_rate: u64,
    /// Which engine moves the bytes.
    pub engine: EngineChoice,
    /// O_DIRECT: bypass the page cache. With `Auto`, a load still copies what the page cache holds.
    pub direct: Switch,
    /// Fixed buffers: staging memory that is registered with io_uring once, not pinned at every transfer. With `On`,
    /// ringstow allocates and registers all of it at once; if that fails, so does the save or load.
    pub fixed: Switch,
    /// Largest shard file in bytes, unless one tensor is larger; 0, the default, means no limit.
    #[serde(deserialize_with = "size")]
    pub shard_bytes: u64,
    /// Shard files that a save writes at the same time in each directory, of about equal size. A tensor is never split:
    /// one larger than its fair share makes its file larger. From 1, the default, to 64.
    pub files: u32,
    /// Directories on other disks, over which checkpoints are striped. A save to `<parent>/<name>` also writes
    /// [`Config::files`] files into `<stripe>/<name>` in each of them. They must exist: an unmounted disk is an error.
    /// Readers need the same setting. Default none.
    pub stripe: Vec<PathBuf>,
    /// Whether to keep the files of a replaced checkpoint for the next save to write over, as
    /// [`Disposal::Recycle`](crate::Disposal::Recycle) does for a removed one. Takes the disk space of one more
    /// checkpoint. Default false.
    pub recycle: bool,
    /// Further places that checkpoints are copied to once they are saved, the nearest first: directories on other disks
    /// and, with the cargo feature `object-store`, URLs. `<parent>/<name>` is copied to `<tier>/<name>`, in the background.
    /// A [`CheckpointManager`](crate::CheckpointManager) does that; saves without one refuse it, and
    /// [`Store::promote`](crate::Store::promote) copies what they saved. Loads read from these copies what a checkpoint lacks or has
    /// damaged: see [`OpenOptions::copies`](crate::OpenOptions::copies). Default none.
    pub tiers: Vec<PathBuf>,
    /// Most bytes per second of such a copy. 0, the default, means no limit.
    #[serde(deserialize_with = "size")]
    pub promotion_rate: u64,
    /// Which ranks share what they read, in Python's loads by several ranks; the crate's own loads are of one process.
    /// Default auto.
    pub share_reads: ShareReads,
    /// File for a trace of each block of a save or load, in the trace format of Chrome and Perfetto. Replaces an existing
    /// file. Default none.
    pub trace: Option<PathBuf>,
}

/// The settings that pool and engines depend on: configurations for which these are equal share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MachineConfig {
    pub buffers: usize,
    pub block_bytes: u64,
    pub queue_depth: u32,
    pub fixed: Switch,
    pub priority: Priority,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            pool_bytes: 0,
            block_bytes: 4 << 20,
            queue_depth: 8,
            fillers: 0,
            nice: 0,
            io_priority: IoPriority::Normal,
            write_rate: 0,
            engine: EngineChoice::Auto,
            direct: Switch::Auto,
            fixed: Switch::Auto,
            shard_bytes: 0,
            files: 1,
            stripe: Vec::new(),
            recycle: false,
            tiers: Vec::new(),
            promotion_rate: 0,
            share_reads: ShareReads::Auto,
            trace: None,
        }
    }
}

impl Config {
    /// Checks the fields, each alone and all together. Every function that takes a configuration calls this first.
    ///
    /// # Errors
    /// [`Error::Invalid`] with every wrong field, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        match self.mistakes() {
            mistakes if mistakes.is_empty() => Ok(()),
            mistakes => Err(Error::invalid(mistakes.join("; "))),
        }
    }

    /// A sentence for each field that is wrong.
    fn mistakes(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut check = |field: &str, value: u64, is_allowed: bool, must_be: &str| {
            if !is_allowed {
                found.push(format!("Config.{field} = {value}: must be {must_be}"));
            }
            is_allowed
        };
        let (block, pool, align) = (self.block_bytes, self.pool_bytes, ALIGN as u64);
        let is_block = block.is_multiple_of(align) && (align..=1 << 30).contains(&block);
        if check("block_bytes", block, is_block, "a multiple of 4096, from 4 KiB to 1 GiB") {
            let two_blocks = "auto, or at least two blocks (2 * block_bytes)";
            check("pool_bytes", pool, self.is_pool_automatic() || pool >= 2 * block, two_blocks);
            let most = format!("at most {FIXED_BUFFERS_MAX} times block_bytes = {block}");
            check("pool_bytes", pool, self.buffers() <= FIXED_BUFFERS_MAX, &most);
        }
        check("pool_bytes", pool, pool <= 1 << 44, "at most 16 TiB");
        let (depth, fillers, files) = (self.queue_depth, self.fillers, self.files);
        check("queue_depth", depth.into(), (1..=1024).contains(&depth), "from 1 to 1024");
        check("fillers", fillers.into(), fillers <= 256, "from 0 (automatic) to 256");
        check("nice", self.nice.into(), self.nice <= 19, "from 0 to 19");
        check("files", files.into(), (1..=64).contains(&files), "from 1 to 64");
        if self.engine == EngineChoice::Portable && self.fixed == Switch::On {
            found.push(
                "Config.engine = portable and Config.fixed = on contradict each other: only io_uring has fixed \
                 buffers; leave one of them on auto"
                    .into(),
            );
        }
        if cfg!(not(target_os = "linux")) && self.priority() != Priority::default() {
            found.push("Config.nice and Config.io_priority need Linux: leave them out".into());
        }
        found.extend(self.stripe_mistake().map(|why| format!("Config.stripe {why}")));
        found.extend(listed_twice(&self.tiers).map(|why| format!("Config.tiers {why}")));
        let named = |field: &'static str| move |path| (field, path);
        let tiers = self.tiers.iter().filter(|place| !path::is_object(place));
        let stripe = self.stripe.iter().map(named("stripe"));
        let places = stripe.chain(tiers.map(named("tiers")));
        for (field, path) in places.chain(self.trace.iter().map(named("trace"))) {
            found.extend(path::check(path).err().map(|why| format!("Config.{field}: {why}")));
        }
        found
    }

    fn stripe_mistake(&self) -> Option<String> {
        if self.stripe.len() > STRIPES_MAX {
            let n = self.stripe.len();
            return Some(format!("names {n} directories: it may name {STRIPES_MAX} at most"));
        }
        listed_twice(&self.stripe)
    }

    /// Refuses tiers in a save that copies to none.
    pub(crate) fn refuse_tiers(&self) -> Result<()> {
        let Some(first) = self.tiers.first() else { return Ok(()) };
        Err(Error::invalid(format!(
            "Config.tiers names {}, and only a CheckpointManager copies to tiers: save by one, or leave them out and call \
             promote after the save",
            first.display()
        )))
    }

    /// Bytes that one checksum covers, the least that a verified load reads: 1 MiB, or `block_bytes` if that is not a
    /// multiple of 1 MiB.
    pub fn checksum_bytes(&self) -> u64 {
        const MIB: u64 = 1 << 20;
        if self.block_bytes.is_multiple_of(MIB) { MIB } else { self.block_bytes }
    }

    /// The settings that pool and engines depend on. Each save or load passes the others.
    pub(crate) fn machine(&self) -> MachineConfig {
        let Self { block_bytes, queue_depth, fixed, .. } = *self;
        let (buffers, priority) = (self.buffers(), self.priority());
        MachineConfig { buffers, block_bytes, queue_depth, fixed, priority }
    }

    /// The priority of the threads that ringstow starts.
    pub(crate) fn priority(&self) -> Priority {
        Priority { nice: self.nice, io: self.io_priority }
    }

    /// Whether background saves may take as much memory as their state needs.
    pub fn is_pool_automatic(&self) -> bool {
        self.pool_bytes == 0
    }

    /// Bytes of staging memory that any save or load may take.
    pub fn staging_bytes(&self) -> u64 {
        match self.pool_bytes {
            0 => STAGING_BYTES.max(2 * self.block_bytes),
            bytes => bytes,
        }
    }

    /// Buffers in the pool.
    pub fn buffers(&self) -> usize {
        (self.staging_bytes() / self.block_bytes) as usize
    }

    /// Threads that copy and checksum, with 0 resolved to this machine's number.
    pub fn filler_threads(&self) -> usize {
        match self.fillers {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()).min(8),
            n => n as usize,
        }
    }
}

/// What is wrong with a list of places, each of which is to be there once.
fn listed_twice(places: &[PathBuf]) -> Option<String> {
    places.iter().enumerate().find_map(|(index, place)| {
        if place.as_os_str().is_empty() {
            return Some("names an empty path: leave it out".into());
        }
        let is_twice = places[..index].contains(place);
        is_twice.then(|| format!("names {} twice: list each once", place.display()))
    })
}

/// Parses the size of the pool: a size, or `auto`.
///
/// # Errors
/// The syntax of a size.
pub fn parse_pool_size(text: &str) -> std::result::Result<u64, String> {
    match text {
        "auto" => Ok(0),
        size => parse_size(size).map_err(|why| format!("{why}; or auto")),
    }
}

/// Parses a size as `dd` and `fio` do: a bare letter is a power of two. `Config`, variables, `ringstow.toml` and the
/// program's flags all use it.
///
/// # Errors
/// The syntax of a size.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let bare = text.ends_with(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let full = if bare { format!("{text}iB") } else { text.to_owned() };
    let size: ByteSize =
        full.parse().map_err(|_| "a size is a number and a unit: 4M, 256MiB, 1GB".to_owned())?;
    // A larger number becomes the largest of 64 bits, which TOML cannot write.
    match size.as_u64() {
        bytes if bytes < 1 << 63 => Ok(bytes),
        _ => Err("a size is below 8 EiB".into()),
    }
}

/// A number of bytes, or a size as text.
fn size<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<u64, D::Error> {
    from.deserialize_any(Size { parse: parse_size })
}

/// Like [`size`], or `"auto"`.
fn size_or_auto<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<u64, D::Error> {
    from.deserialize_any(Size { parse: parse_pool_size })
}

/// What [`size_or_auto`] reads: what one would write.
fn auto_or_size<S: Serializer>(bytes: &u64, to: S) -> std::result::Result<S::Ok, S::Error> {
    if *bytes == 0 { to.serialize_str("auto") } else { to.serialize_u64(*bytes) }
}

struct Size {
    parse: fn(&str) -> std::result::Result<u64, String>,
}

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
        (self.parse)(text).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_field_is_named_at_once() {
        let twice = vec!["/a".into(), "/a".into()];
        let wrong = Config {
            block_bytes: 5,
            queue_depth: 0,
            files: 65,
            stripe: twice,
            ..Config::default()
        };
        let said = wrong.validate().unwrap_err().to_string();
        for field in ["block_bytes = 5", "queue_depth = 0", "files = 65", "stripe names /a twice"] {
            assert!(said.contains(field), "{field:?} is not in: {said}");
        }
        assert!(!said.contains("pool_bytes"), "{said}");
        let zero = Config { block_bytes: 0, pool_bytes: 1 << 50, ..Config::default() };
        let said = zero.validate().unwrap_err().to_string();
        assert!(said.contains("block_bytes = 0") && said.contains("at most 16 TiB"), "{said}");
    }

    #[test]
    fn parse_size_bare_letter_is_a_power_of_two() {
        assert_eq!(parse_size("4M"), Ok(4 << 20));
        assert_eq!(parse_size("4m"), Ok(4 << 20));
        assert_eq!(parse_size("256MiB"), Ok(256 << 20));
        assert_eq!(parse_size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_size("4MB"), Ok(4_000_000));
        assert_eq!(parse_size("65536"), Ok(65536));
        for bad in ["", "M", "-4M", "4X", "4 apples", "8EiB", "184467440737095516155GB"] {
            assert!(parse_size(bad).is_err(), "{bad:?}");
        }
    }
}
