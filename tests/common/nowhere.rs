//! States of very many or very large tensors that share their memory, saved and loaded through the
//! engine `AtOnce::null`. For the tests and benches of scale.
#![allow(dead_code)] // each user needs a part of this module

use fake_engines::AtOnce;
use ringstow::internals::plan::save::{Options, SavePlan, Shard, plan};
use ringstow::{
    Config, Dtype, FileEntry, Item, Manifest, Region, Runtime, Source, StateDict, TensorInfo,
};
use std::path::Path;
use std::sync::Arc;

/// The sizes in bytes of a mixed state, in turn: 4 KiB on average.
const MIXED: [u64; 8] = [64, 256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10];

/// The source of all tensors of [`state`].
static BYTES: [u8; 16 << 10] = [7; 16 << 10];

/// Bytes of the `i`th tensor of a mixed state.
pub fn mixed(i: usize) -> u64 {
    MIXED[i % MIXED.len()]
}

/// The name of the `i`th tensor, as long as in real models.
pub fn name(i: usize) -> String {
    format!("model.layers.{}.block.{}.weight", i / 10, i % 10)
}

fn info(name: String, bytes: u64) -> TensorInfo {
    TensorInfo { name, dtype: Dtype::F32, shape: vec![bytes / 64, 16] }
}

/// So many tensors, each of `bytes(i)` bytes.
pub fn items(count: usize, bytes: impl Fn(usize) -> u64) -> Vec<Item> {
    (0..count).map(|i| info(name(i), bytes(i)).into()).collect()
}

/// As many boxes of one tensor, a row each.
pub fn boxes(count: usize) -> Vec<Item> {
    let row = |i| Item {
        region: Some(Region { shape: vec![count as u64, 16], offsets: vec![i as u64, 0] }),
        ..info("experts".into(), 64).into()
    };
    (0..count).map(row).collect()
}

/// So many tensors, which share their bytes.
pub fn state(count: usize, bytes: impl Fn(usize) -> u64) -> StateDict<'static> {
    let mut state = StateDict::new();
    for i in 0..count {
        let bytes = bytes(i);
        state.source(info(name(i), bytes), Box::new(&BYTES[..bytes as usize]));
    }
    state
}

/// The tensor "vast".
pub fn vast(source: Box<dyn Source>) -> StateDict<'static> {
    let mut state = StateDict::new();
    state.source(info("vast".into(), source.nbytes()), source);
    state
}

/// A tensor of so many bytes without content: a read costs nothing and leaves the buffer unchanged.
pub struct Sparse(pub u64);

impl Source for Sparse {
    fn nbytes(&self) -> u64 {
        self.0
    }

    fn read(&self, _: usize, _: &mut [u8]) -> ringstow::Result<()> {
        Ok(())
    }
}

/// The layout of these tensors in blocks of 4 MiB.
pub fn layout(items: &[Item]) -> SavePlan {
    let options = Options {
        rank: 0,
        generation: 0,
        block_bytes: 4 << 20,
        shard_bytes: 0,
        lanes: 1,
        apart: &[],
    };
    plan(items, options).expect("the tensors are valid")
}

/// The manifest of tensors in this layout, with checksums of 0.
pub fn manifest(items: &[Item], plan: &SavePlan) -> Manifest {
    let file = |shard: &Shard| FileEntry {
        name: shard.name.clone(),
        bytes: shard.bytes,
        crc32: vec![0; shard.bytes.div_ceil(1 << 20) as usize],
        hashes: Vec::new(),
    };
    let files = plan.shards.iter().map(file).collect();
    let tensors = plan.entries(items).iter().collect();
    let state = serde_json::value::to_raw_value(&()).expect("null is JSON");
    Manifest::new(0, 1, 1 << 20, files, tensors, state)
}

/// A runtime that skips the disk: it discards writes and reads zeros.
pub fn runtime(config: Config) -> Runtime {
    let depth = config.queue_depth as usize;
    Runtime::with_engine(config, Arc::new(move || Ok(Box::new(AtOnce::null(depth)))))
        .expect("the configuration is valid")
}

/// A directory whose files take no space, whatever their length: a file system without a device, mounted in a
/// mount namespace of this thread and of the threads that it starts later.
pub struct Endless(#[cfg(target_os = "linux")] cut_disk::Mount);

#[cfg(target_os = "linux")]
impl Endless {
    /// Needs root.
    ///
    /// # Errors
    /// Why it is unavailable.
    pub fn new() -> Result<Self, String> {
        cut_disk::unshare_mounts()?;
        cut_disk::Mount::of_memory("ramfs", "rw").map(Self)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

#[cfg(not(target_os = "linux"))]
impl Endless {
    /// Needs Linux.
    ///
    /// # Errors
    /// Always.
    pub fn new() -> Result<Self, String> {
        Err("no mount namespaces on this platform".into())
    }

    pub fn path(&self) -> &Path {
        unreachable!("there is none")
    }
}
