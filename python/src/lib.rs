//! The compiled half of the Python package `ringstow`: thin, typed by `ringstow/_native.pyi`.
//!
//! It takes addresses and JSON and gives the library what it asks for; all that knows of torch or
//! numpy is on the Python side, but for `exchange`, `lent`, `storage` and `encode`. Every wait is without the GIL, and
//! looks for Ctrl-C.
#![allow(unsafe_code)]

mod arrivals;
mod catalog;
mod encode;
mod error;
mod exchange;
mod exit;
mod fill;
mod foreign;
mod lazy;
mod lent;
mod load;
mod logging;
mod manager;
mod matches;
mod memory;
mod model;
mod node;
mod nodes;
mod owned;
mod place;
mod promote;
mod run;
mod save;
mod session;
mod settle;
mod skeleton;
mod snapshot;
mod storage;
mod stream;
mod tensors;
mod wait;
mod watch;

use pyo3::prelude::*;
use ringstow::internals::sys::late;
use ringstow::{Config, Job, Runtime};
use std::ffi::OsString;
use std::path::PathBuf;

/// The configuration that Python sent.
fn config(json: &str) -> PyResult<Config> {
    serde_json::from_str(json)
        .map_err(|e| error::to_python(ringstow::Error::invalid(format!("bad Config: {e}"))))
}

/// Checks a configuration that Python made: its fields, each other, and that this build can do what is asked for by
/// name.
#[pyfunction]
fn check_config(json: &str) -> PyResult<()> {
    let config = config(json)?;
    config.validate().map_err(error::to_python)?;
    ringstow::internals::engine::io_mode::modes(&config).map(drop).map_err(error::to_python)
}

/// Gives staging memory back that no save or load uses now. Returns how many bytes.
#[pyfunction]
fn release_memory(py: Python<'_>) -> u64 {
    py.detach(Runtime::release_memory)
}

/// A size in words: `4.19 MB`. Takes any number, since a prepared file may name any.
#[pyfunction]
fn size(bytes: f64) -> String {
    ringstow::internals::units::size(bytes as u64)
}

/// A time in words: `1.52 s`.
#[pyfunction]
fn duration(seconds: f64) -> String {
    ringstow::internals::units::duration(seconds)
}

/// How fast bytes were moved, and how: `3.41 GB in 1.52 s (2.24 GB/s, io_uring, O_DIRECT)`.
#[pyfunction]
fn moved(figures: (f64, f64, f64), engine: String, fixed_buffers: usize, direct: bool) -> String {
    let moved = ringstow::Moved { engine, fixed_buffers, direct, ..Default::default() };
    let (bytes, seconds, gb_per_s) = figures;
    ringstow::internals::pipeline::report::done((bytes as u64, seconds, gb_per_s), &moved)
}

/// Bytes of staging memory that any save or load with a configuration may take.
#[pyfunction]
fn staging_bytes(json: &str) -> PyResult<u64> {
    Ok(config(json)?.staging_bytes())
}

/// Tells this boot of this machine from all others: processes with the same text share a page cache. Where the system does
/// not say, each process shares with none.
#[pyfunction]
fn boot_id() -> String {
    let known = ringstow::internals::sys::file::boot_id();
    known.unwrap_or_else(|_| format!("process {}", std::process::id()))
}

/// How many cores this process may use: those that it is bound to, and no more than its container's share.
#[pyfunction]
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A size in words, in bytes; why it is none, as the error's message.
#[pyfunction]
fn parse_size(text: &str) -> PyResult<u64> {
    ringstow::internals::config::parse_size(text).map_err(pyo3::exceptions::PyValueError::new_err)
}

/// A time in words, as a timedelta; why it is none, as the error's message.
#[pyfunction]
fn parse_span(text: &str) -> PyResult<std::time::Duration> {
    ringstow::internals::units::parse_span(text).map_err(pyo3::exceptions::PyValueError::new_err)
}

/// The size of the pool in words, in bytes, 0 for `auto`; why it is none, as the error's message.
#[pyfunction]
fn parse_pool_size(text: &str) -> PyResult<u64> {
    let parsed = ringstow::internals::config::parse_pool_size(text);
    parsed.map_err(pyo3::exceptions::PyValueError::new_err)
}

/// `os.environ` is changed under the GIL. Without an interpreter, nobody changes it.
fn under_the_gil(look: &mut dyn FnMut()) {
    if Python::try_attach(|_| look()).is_none() {
        look();
    }
}

/// Has this process look at once, as often, where it waits for what another host has done. For tests.
#[pyfunction]
fn look_at_once() {
    late::look_at_once();
}

/// Whether the environment allows progress bars.
#[pyfunction]
fn shows_progress() -> bool {
    ringstow::internals::config::shows_progress()
}

/// The configuration that the environment and `ringstow.toml` ask for, in JSON.
#[pyfunction]
fn found_config() -> PyResult<String> {
    to_json(&Config::found().map_err(error::to_python)?)
}

/// A report in JSON, its paths as `os.fsdecode` has them.
fn to_json(report: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(report)
        .map(|json| ringstow::internals::path_text::for_python(&json))
        .map_err(|e| error::to_python(ringstow::Error::invalid(format!("bad report: {e}"))))
}

#[pyfunction]
#[pyo3(signature = (path, config, *, progress = None))]
fn verify(
    py: Python<'_>,
    path: PathBuf,
    config: &str,
    progress: Option<wait::Progress>,
) -> PyResult<String> {
    let config = self::config(config)?;
    let runtime = Runtime::shared(&config).map_err(error::to_python)?;
    let verify = |job: &_| ringstow::internals::store::verify(&runtime, &path, job);
    to_json(&wait::run(py, &Job::of(&config), progress.as_ref(), verify)?)
}

#[pyfunction]
fn diff(py: Python<'_>, a: PathBuf, b: PathBuf, values: bool, config: &str) -> PyResult<String> {
    let config = self::config(config)?;
    let runtime = Runtime::shared(&config).map_err(error::to_python)?;
    let diff = |job: &_| ringstow::internals::store::diff(&runtime, (&a, &b), values, job);
    to_json(&wait::run(py, &Job::of(&config), None, diff)?)
}

#[pyfunction]
fn check_own_share(py: Python<'_>, path: PathBuf, rank: u32) -> PyResult<()> {
    py.detach(|| ringstow::internals::store::check_own_share(&path, rank)).map_err(error::to_python)
}

/// The nesting depth of valid JSON.
#[pyfunction]
fn nesting(json: &str) -> usize {
    ringstow::internals::format::value::nesting(json)
}

/// Hashes of a tree's structure and of its values, and the names that it refers to.
#[pyfunction]
fn outline(py: Python<'_>, tree: &str) -> PyResult<(u64, u64, Vec<String>)> {
    use ringstow::internals::format::outline::Outline;
    let Outline { structure, values, names } =
        py.detach(|| Outline::of(tree)).map_err(error::to_python)?;
    Ok((structure, values, names))
}

/// Renames a file to a name that must be free.
#[pyfunction]
fn rename_new(py: Python<'_>, from: PathBuf, to: PathBuf) -> PyResult<()> {
    py.detach(|| ringstow::internals::sys::dir::rename_new(&from, &to)).map_err(error::to_python)
}

/// Makes the names in a directory durable.
#[pyfunction]
fn sync_dir(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    py.detach(|| ringstow::internals::sys::dir::sync(&path)).map_err(error::to_python)
}

/// Swaps what two paths name.
#[pyfunction]
fn swap_names(py: Python<'_>, one: PathBuf, other: PathBuf) -> PyResult<()> {
    py.detach(|| ringstow::internals::sys::dir::exchange(&one, &other)).map_err(error::to_python)
}

#[pyfunction]
fn cli(py: Python<'_>, argv: Vec<OsString>) -> PyResult<u8> {
    let code = py.detach(|| ringstow::cli::run(argv));
    logging::deliver(py)?;
    Ok(code)
}

#[pyfunction]
fn forget_after_fork() {
    Runtime::forget_after_fork();
    exit::forget_after_fork();
    logging::forget_after_fork();
}

// What `exchange` and `tensors` do with torch's memory relies on the GIL: until that changes, an interpreter
// without a GIL turns it on for this module.
#[pymodule(gil_used = true)]
mod _native {
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;
    use ringstow::internals::store::{KINDS, TORCH_ENDINGS};
    use std::collections::BTreeMap;

    #[pymodule_export]
    const DEPTH_MAX: usize = crate::encode::DEPTH_MAX;
    #[pymodule_export]
    const SEEN_S: f64 = crate::late::SEEN.as_secs_f64();
    #[pymodule_export]
    const POLL_S: f64 = crate::late::POLL.as_secs_f64();

    #[pymodule_export]
    use crate::{
        arrivals::{Arrivals, Slot},
        catalog::{
            check_covers, has_gone, latest, prune, remove, retain, shared_file_system, slim, steps,
        },
        encode::encode,
        exchange::Exchange,
        exit::{end_jobs, fail_exit},
        fill::{Loading, Wanted, fill, survey},
        foreign::{
            deepspeed_directory, files_of_index, foreign_kind, has_weights_by_torch,
            kind_and_weights, numbered_sets, superseded_weights, weights_in,
        },
        load::Checkpoint,
        logging::deliver,
        manager::{
            Clearing, CopyLine, Copying, Previous, RunSteps, after_failure, best_of, lacking,
            newest_of, usual_path,
        },
        matches::Matches,
        memory::Block,
        model::{ModelSession, model_layout, start_model_share, tiles},
        node::Leaf,
        nodes::{NodeSession, adopt, differing, files_of, in_turns, needed, node_id, nodes_of},
        place::{CopyMemory, gpus},
        promote::{
            check_apart, check_url, claim, claim_for, copies_of, is_one_run, join_run, name_run,
            promote, run_of, unfinished,
        },
        run::{
            RunLock, add_to_history, check_own_name, follow, go_back, kept, pin, pinned, unpin,
            was_removed,
        },
        save::{SaveJob, check_metrics, start_export, start_save, start_write, start_write_dealt},
        session::{Receipts, Session, give_up, given_up},
        skeleton::parse_tree,
        snapshot::{copy_now, watch},
        stream::{FileReader, FileWriter},
        tensors::Tensors,
        watch::Watch,
        {
            boot_id, cores, diff, duration, look_at_once, moved, nesting, outline, parse_pool_size,
            parse_size, parse_span, release_memory, rename_new, shows_progress, size,
            staging_bytes, swap_names, sync_dir, verify,
        },
        {check_config, check_own_share, cli, forget_after_fork, found_config},
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::logging::install(module.py())?;
        ringstow::internals::sys::environment::look_within(crate::under_the_gil);
        let (first, longest) = ringstow::internals::manager::PAUSES;
        module.add("COPY_PAUSES_S", (first.as_secs_f64(), longest.as_secs_f64()))?;
        module.add("FOREIGN_KINDS", BTreeMap::from(KINDS))?;
        module.add("TORCH_ENDINGS", PyTuple::new(module.py(), TORCH_ENDINGS)?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
