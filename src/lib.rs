//! Training checkpoints at the speed of the disk.
//!
//! A state of tensors and values is saved as a directory of plain safetensors files and a
//! manifest: durable, checked by a checksum of every block, and there whole or not at all. Shards
//! go through one bounded pool of staging buffers, registered with io_uring, into O_DIRECT files.
//!
//! ```no_run
//! use ringstow::StateDict;
//!
//! # fn main() -> ringstow::Result<()> {
//! let weights = vec![0u8; 4096];
//! let mut state = StateDict::new();
//! state.bytes("layer.weight", ringstow::Dtype::F32, &[32, 32], &weights)?.value("step", 7);
//! let report = ringstow::save(&state, "ckpt/step-7")?;
//! println!("{:.2} GB/s", report.gb_per_s());
//!
//! let loaded = ringstow::load("ckpt/step-7")?;
//! let weights: &[f32] = loaded.tensor("layer.weight").unwrap().as_slice()?;
//! # Ok(())
//! # }
//! ```
//!
//! [`save_async`] and [`load_async`] return at once with a [`Handle`], to wait on or to await.
//! [`Checkpoint`] opens a checkpoint to look at it or to load a part. A [`Store`] has a [`Config`] and all
//! calls; the functions of the crate are its most common ones, with the configuration that is [found](Config::found).
//! `docs/format.md` describes the files.
//!
//! # Features
//!
//! - `uring` (default): the io_uring engine. Without it, and off Linux, the portable engine works alone.
//! - `cuda` (default): tensors on NVIDIA GPUs. Nothing of CUDA is needed to build, or to run without a GPU.
//! - `object-store`: checkpoints in S3, Google Cloud Storage and Azure.
//! - `candle`: saves of candle's variables, see the module `candle`.
//! - `cli`: the program `ringstow`, with its doctor.
//! - `tokio-uring`: an engine that uses the crate tokio-uring. [`Config`] must name it: `engine = tokio-uring`.

// Every system call on a path goes through `sys`; clippy.toml lists what is refused elsewhere.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("ringstow maps whole checkpoints: it needs 64-bit addresses");
#[cfg(not(unix))]
compile_error!(
    "ringstow needs Linux, or another Unix system, where the portable engine does the work"
);

mod api;
#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "cli")]
pub mod cli;
mod config;
mod device;
#[cfg(feature = "cli")]
mod doctor;
mod engine;
mod error;
mod format;
mod handle;
mod limits;
mod manager;
mod object;
mod path_text;
mod pipeline;
mod plan;
mod pool;
mod ranks;
mod state;
mod store;
mod stream;
mod sys;
mod units;

pub use api::{
    Store, latest, load, load_async, prune, remove, retain, save, save_async, steps, verify,
};
pub use config::{Config, EngineChoice, IoPriority, ShareReads, Switch};
#[cfg(feature = "cuda")]
pub use device::cuda::{CudaSource, DeviceMemory, Ready, StreamHandle};
pub use device::{Source, StridedTarget, Target, TensorSource};
pub use engine::fallback::{Fallback, FallbackKind};
pub use error::{Advice, Error, Result, Shortage};
pub use format::names::rank_dir;
pub use format::{
    Chunk, Dtype, Element, FileEntry, Item, Manifest, Metrics, RankShare, Receipt, Region,
    StepPattern, TensorEntry, TensorInfo, Value,
};
pub use handle::{Filled, Handle, LoadHandle, SaveHandle, Staged};
pub use manager::{CheckpointManager, OnDamage, Restored, Retention, Saved, Slim, Tiers};
pub use pipeline::job::{Job, Progress};
pub use pipeline::report::{
    Damage, DamagedTensor, LoadReport, LoadSeconds, Moved, SaveReport, SaveSeconds, VerifyReport,
    WriteReport, WriteSeconds,
};
pub use pipeline::runtime::Runtime;
pub use ranks::{Exchange, RanksSave};
pub use state::{Base, StateDict};
pub use store::{
    Before, Best, Checkpoint, CheckpointKind, Committed, DiffReport, Direction, Disposal,
    ElementDiff, FileInfo, Found, Info, Left, LoadOptions, Loaded, LoadedTensor, OnCorrupt,
    OpenOptions, Promotion, PromotionReport, Pruning, Recycled, Removed, RetainOptions, Retained,
    Session, Slice, Slimmed, Status, Swept, TensorChange, TensorDiff, TensorPart, TensorView,
    ValueDiff, Wanted,
};

pub use stream::{FileReader, FileWriter, WriteOptions};

/// What the Python binding, the program, the tests and the benches need besides. Not part of the interface: it may
/// change with every version.
#[doc(hidden)]
pub mod internals {
    pub mod config {
        pub use crate::config::{found, parse_pool_size, parse_size, shows_progress};
    }
    pub mod device {
        #[cfg(feature = "cuda")]
        pub use crate::device::cuda;
        pub use crate::device::host;
    }
    #[cfg(feature = "cli")]
    pub mod doctor {
        pub use crate::doctor::{Status, diagnose};
    }
    pub mod engine {
        #[cfg(all(target_os = "linux", feature = "tokio-uring"))]
        pub use crate::engine::tokio_uring;
        #[cfg(all(target_os = "linux", feature = "uring"))]
        pub use crate::engine::uring;
        pub use crate::engine::{
            Action, Completion, Engine, FileId, Op, Transfer, Waker, fallback, io_mode, portable,
            queue,
        };
    }
    pub mod format {
        pub use crate::format::{
            Node, content_hash, cover, header, manifest, model_files, model_index, names, outline,
            receipt, safetensors_header, select, step, value,
        };
    }
    pub mod limits {
        pub use crate::limits::ALIGN;
    }
    pub mod manager {
        pub use crate::manager::{
            Added, Around, Clearing, Copying, Eviction, Failure, Line, PAUSES, Pauses, Previous,
            Run, Seen, Stays, Verdict, best_of, lacking, latest_of, newest_of, usual_path,
        };
    }
    pub mod object {
        pub use crate::object::Bucket;
    }
    pub mod path_text {
        pub use crate::path_text::for_python;
    }
    pub mod pipeline {
        pub use crate::pipeline::load::{Arrivals, Slot};
        pub use crate::pipeline::{report, runtime};
    }
    pub mod plan {
        pub use crate::plan::{load, replicas, save, share, slab, turns};
    }
    pub mod pool {
        pub use crate::pool::{Buffer, CopyMemory, Mapping, Pool};
    }
    pub mod store {
        pub use crate::store::{
            KINDS, LoadPlace, MappedTensor, ModelLayout, ModelSession, Newer, NodeSession,
            ShardSource, TORCH_ENDINGS, add_to_history, adopt, await_all_written, check_apart,
            check_covers, check_own_name, check_own_share, check_run, claim, claim_for, copies_of,
            deepspeed_directory, diff, export, files_of_index, follow, give_up, given_up, has_gone,
            has_weights_by_torch, is_one_run, join, kept, kind_and_weights, kind_of, latest, list,
            name_run, node_id, owner, pin, pinned, promote, prune, prune_plan, prune_with,
            recycled, remove_checkpoint, retain, retain_plan, save, slim, steps, unfinished, unpin,
            verify, was_removed, weights_in, write_rank,
        };
    }
    pub mod sys {
        pub use crate::sys::{
            chance, dir, environment, file, file_system, late, run_lock, seam, space,
        };
    }
    pub mod units {
        pub use crate::units::{duration, parse_span, size};
    }
}
