//! Checkpoints of nodes that share no directory.

use crate::error::to_python;
use crate::load::Checkpoint;
use crate::owned::Owned;
use crate::session::Receipts;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringstow::internals::format::Node;
use ringstow::internals::format::receipt::Merged;
use ringstow::internals::plan::turns;
use ringstow::internals::store;
use ringstow::{Error, Metrics, Result, Session};
use serde_json::value::RawValue;
use std::ops::Range;
use std::path::PathBuf;

/// What identifies a directory of checkpoints: an id that no other has, and a host's name.
#[pyfunction]
pub(crate) fn node_id(py: Python<'_>, run: PathBuf) -> PyResult<(String, String)> {
    let id = py.detach(|| store::node_id(&run)).map_err(to_python)?;
    Ok((id.id, id.host))
}

/// Commits another node's checkpoint in a directory, with those of its files that are there.
#[pyfunction]
pub(crate) fn adopt(py: Python<'_>, path: PathBuf, manifest: Vec<u8>) -> PyResult<()> {
    py.detach(|| store::adopt(&path, manifest)).map_err(to_python)
}

/// Name, path, bytes, and whether it is here, of each file of a checkpoint.
#[pyfunction]
pub(crate) fn files_of(checkpoint: &Checkpoint) -> Vec<(String, PathBuf, u64, bool)> {
    let checkpoint = &checkpoint.inner;
    let mut here = vec![false; checkpoint.manifest().files.len()];
    checkpoint.files_here().for_each(|file| here[file] = true);
    let rows = checkpoint.manifest().files.iter().zip(checkpoint.shard_paths()).zip(here);
    rows.map(|((file, path), here)| (file.name.clone(), path.into(), file.bytes, here)).collect()
}

/// Id, host and ranks of each node that wrote a checkpoint; nothing if all ranks shared a directory.
#[pyfunction]
pub(crate) fn nodes_of(checkpoint: &Checkpoint) -> Vec<(String, String, Vec<u32>)> {
    let nodes = &checkpoint.inner.manifest().nodes;
    nodes.iter().map(|node| (node.id.clone(), node.host.clone(), node.ranks.clone())).collect()
}

/// The ranges of a checkpoint's files in which tensors and boxes are, in whole checksum chunks: number of the file, first
/// byte, end.
#[pyfunction]
pub(crate) fn needed(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    names: Vec<String>,
    boxes: Vec<(String, Vec<u64>, Vec<u64>)>,
) -> Vec<(usize, u64, u64)> {
    py.detach(|| {
        let boxes = boxes.iter().map(|(name, offsets, sizes)| (&**name, &**offsets, &**sizes));
        let ranges = checkpoint.inner.needed(names.iter().map(String::as_str), boxes);
        ranges.into_iter().map(|(file, Range { start, end })| (file, start, end)).collect()
    })
}

/// The numbers of items such that the directories they are in take turns, as in a load. Each is a small number.
#[pyfunction]
pub(crate) fn in_turns(directories: Vec<usize>) -> Vec<usize> {
    turns::in_turns((0..directories.len()).collect(), |&number| directories[number])
}

/// What differs in bytes of a checkpoint's file that begin with a checksum chunk; `None` if nothing does.
#[pyfunction]
pub(crate) fn differing(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    file: usize,
    offset: u64,
    data: PyBuffer<u8>,
) -> PyResult<Option<String>> {
    if !data.is_c_contiguous() {
        return Err(PyBufferError::new_err("the bytes are not contiguous"));
    }
    let bytes = data.to_vec(py)?;
    py.detach(|| checkpoint.inner.check_bytes(file, offset, &bytes)).map_err(to_python)
}

/// A hold on a node's directory during a save, until it is committed or abandoned.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct NodeSession(Owned<store::NodeSession>);

#[pymethods]
impl NodeSession {
    #[new]
    #[pyo3(signature = (path, world_size, id, config, step, metrics))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        world_size: u32,
        id: &str,
        config: &str,
        step: Option<u64>,
        metrics: Metrics,
    ) -> PyResult<Self> {
        let config = crate::config(config)?;
        let begin = || -> Result<_> {
            let session = store::NodeSession::begin(&path, world_size, id, &config)?;
            session
                .describe(|session| step.into_iter().fold(session, Session::step).metrics(metrics))
        };
        Ok(Self(Owned::new(py.detach(begin).map_err(to_python)?)))
    }

    /// The manifest of what all ranks of all nodes wrote. Each node is its id, its host and its ranks.
    fn manifest<'py>(
        &self,
        py: Python<'py>,
        receipts: &Receipts,
        state: String,
        names: Vec<String>,
        nodes: Vec<(String, String, Vec<u32>)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let nodes = nodes.into_iter().map(|(id, host, ranks)| Node { id, host, ranks }).collect();
        let make = || -> Result<_> {
            let state = RawValue::from_string(state)
                .map_err(|e| Error::invalid(format!("the state's tree is no JSON: {e}")))?;
            self.with(receipts, |session, parts| session.manifest(parts, (state, &names), nodes))
        };
        Ok(PyBytes::new(py, &py.detach(make).map_err(to_python)?))
    }

    /// Writes the manifest under its uncommitted name, once the files of these receipts, of this node's ranks, are there.
    fn prepare(&self, py: Python<'_>, receipts: &Receipts, manifest: Vec<u8>) -> PyResult<()> {
        let prepare = || self.with(receipts, |session, parts| session.prepare(parts, manifest));
        py.detach(prepare).map_err(to_python)
    }

    /// Keeps what was prepared, whatever becomes of the save here: another node may commit it.
    fn keep(&self) {
        self.0.lock().iter_mut().for_each(store::NodeSession::keep);
    }

    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let commit = || self.0.lock().as_mut().ok_or_else(given_up)?.commit();
        py.detach(commit).map_err(to_python)
    }

    /// Removes what was replaced, once all nodes have committed.
    fn end(&self, py: Python<'_>) {
        let session = self.0.take();
        py.detach(|| session.into_iter().for_each(store::NodeSession::end));
    }

    fn abandon(&self, py: Python<'_>) {
        let session = self.0.take();
        py.detach(|| drop(session));
    }
}

impl NodeSession {
    fn with<T>(
        &self,
        receipts: &Receipts,
        act: impl FnOnce(&mut store::NodeSession, &mut Merged) -> Result<T>,
    ) -> Result<T> {
        let mut session = self.0.lock();
        let session = session.as_mut().ok_or_else(given_up)?;
        receipts.look(|merged| {
            let merged = merged.as_mut();
            act(
                session,
                merged.ok_or_else(|| Error::invalid("the receipts were committed before"))?,
            )
        })
    }
}

impl Drop for NodeSession {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

fn given_up() -> Error {
    Error::invalid(
        "the save was given up before its commit: another one has begun, or it was closed",
    )
}
