//! Checkpoints of other programs: which program wrote one, and which files are a model's weights.

use crate::error::to_python;
use pyo3::prelude::*;
use ringstow::internals::format::model_files;
use ringstow::internals::store;
use std::ffi::OsString;
use std::path::PathBuf;

/// The kind of another program's checkpoint; `None` if none is recognized.
#[pyfunction]
pub(crate) fn foreign_kind(py: Python<'_>, path: PathBuf) -> PyResult<Option<&'static str>> {
    py.detach(|| store::kind_of(&path)).map_err(to_python)
}

/// The same, and whether it is a directory of a model whose weights `torch.save` wrote.
#[pyfunction]
pub(crate) fn kind_and_weights(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Option<&'static str>, bool)> {
    py.detach(|| store::kind_and_weights(&path)).map_err(to_python)
}

/// Whether `torch.save` wrote the weights in a directory.
#[pyfunction]
pub(crate) fn has_weights_by_torch(py: Python<'_>, path: PathBuf) -> PyResult<bool> {
    py.detach(|| store::has_weights_by_torch(&path)).map_err(to_python)
}

/// The directory with `DeepSpeed`'s files: the path, or the one that its file `latest` names.
#[pyfunction]
pub(crate) fn deepspeed_directory(py: Python<'_>, path: PathBuf) -> Option<OsString> {
    py.detach(|| store::deepspeed_directory(&path)).map(PathBuf::into_os_string)
}

/// The file of a model's weights in a directory, or the index of their files.
#[pyfunction]
pub(crate) fn weights_in(py: Python<'_>, path: PathBuf, warns: bool) -> PyResult<Option<String>> {
    py.detach(|| store::weights_in(&path, warns)).map_err(to_python)
}

/// The files that an index of a directory lists.
#[pyfunction]
pub(crate) fn files_of_index(py: Python<'_>, path: PathBuf, index: &str) -> PyResult<Vec<String>> {
    py.detach(|| store::files_of_index(&path, index)).map_err(to_python)
}

/// The sets of numbered files among these: of each its index, its files, and those that are missing.
#[pyfunction]
pub(crate) fn numbered_sets(names: Vec<String>) -> Vec<(String, Vec<String>, Vec<String>)> {
    let owned = |files: Vec<&str>| files.into_iter().map(str::to_owned).collect();
    let sets = model_files::numbered_sets(&names).into_iter();
    sets.map(|set| (set.index, owned(set.files), set.missing)).collect()
}

/// The files of weights among these that no program takes.
#[pyfunction]
pub(crate) fn superseded_weights(names: Vec<String>) -> Vec<String> {
    model_files::superseded(&names).into_iter().map(str::to_owned).collect()
}
