//! What the library promises, in one program: each test binary links the whole crate once more. A test that changes its
//! process (its directory, limits, filters) or looks at all of it runs there alone (`common::is_alone`); a rig is a
//! program beside this one.

#[path = "../common/mod.rs"]
mod common;

mod awaiting;
mod base;
#[cfg(feature = "candle")]
mod candle;
mod chdir;
mod cli;
mod copies;
mod crash;
mod damage;
mod diagnose;
mod diff;
mod each_rank;
mod emptied;
mod engine_contract;
mod faults;
mod filesystems;
mod flips;
mod foreign;
mod format;
mod gpu_program;
mod hostile;
mod hostile_manifest;
mod lost_answers;
mod manager_tiers;
mod many_files;
mod nodes;
mod page_cache;
mod part;
mod paths;
mod pool;
mod priority;
mod promote;
mod promote_places;
mod ranks;
mod ranks_exchange;
mod readme;
mod recycle;
mod refusals;
mod replaced;
mod retain;
mod rooms;
mod round_trip;
mod scale;
mod seccomp;
mod slices;
mod slim;
mod steps;
mod stragglers;
mod streams;
mod striping;
mod swapped;
mod trace;
mod write_rate;
