//! An export of a model by several ranks: the layout, the coordinator's session, and a rank's share.

use crate::error::to_python;
use crate::owned::Owned;
use crate::save::{Handle, SaveJob};
use crate::tensors::Memory;
use pyo3::prelude::*;
use ringstow::internals::device::cuda::Ready;
use ringstow::internals::plan::share::{Place, SharedFile};
use ringstow::internals::store::{self, ModelLayout};
use ringstow::{Dtype, Error, Result, StateDict, TensorInfo};
use std::path::PathBuf;

/// Name, dtype, shape.
type TensorSpec = (String, String, Vec<u64>);

/// Of a tensor: its file, and the offset of its first byte there.
type Begin = (usize, u64);

/// Of a file: its final name, the bytes of its header, its length.
type FileSpec = (String, u64, u64);

fn layout(
    tensors: Vec<TensorSpec>,
    config: &str,
    numbers: Option<&[u32]>,
) -> PyResult<ModelLayout> {
    let config = crate::config(config)?;
    let info = |(name, dtype, shape): TensorSpec| {
        let known = Dtype::from_name(&dtype);
        let none = || Error::invalid(format!("tensor {name:?}: there is no dtype {dtype:?}"));
        known.ok_or_else(none).map(|dtype| TensorInfo { name, dtype, shape })
    };
    let tensors: Result<Vec<TensorInfo>> = tensors.into_iter().map(info).collect();
    tensors.and_then(|tensors| ModelLayout::new(tensors, numbers, &config)).map_err(to_python)
}

/// The files of a model, and for each tensor the index of its file and its offset there.
#[pyfunction]
#[pyo3(signature = (tensors, config, numbers=None))]
pub(crate) fn model_layout(
    tensors: Vec<TensorSpec>,
    config: &str,
    numbers: Option<Vec<u32>>,
) -> PyResult<(Vec<FileSpec>, Vec<Begin>)> {
    let layout = layout(tensors, config, numbers.as_deref())?;
    let files = layout.files().map(|(name, header, bytes)| (name.to_owned(), header, bytes));
    Ok((files.collect(), layout.places()))
}

/// Whether boxes, each by its offsets and sizes, hold each element of an array exactly once.
#[pyfunction]
pub(crate) fn tiles(shape: Vec<u64>, boxes: Vec<(Vec<u64>, Vec<u64>)>) -> bool {
    use ringstow::internals::format::cover;
    let boxes: Vec<_> = boxes.iter().map(|(offsets, sizes)| (&**offsets, &**sizes)).collect();
    boxes.iter().all(|&one| cover::within(&shape, one)) && cover::tiles(&shape, &boxes)
}

/// The coordinator's hold on a directory, until the model is published or given up.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct ModelSession {
    session: Owned<store::ModelSession>,
    paths: Vec<PathBuf>,
}

#[pymethods]
impl ModelSession {
    #[new]
    #[pyo3(signature = (path, tensors, config, numbers=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<TensorSpec>,
        config: &str,
        numbers: Option<Vec<u32>>,
    ) -> PyResult<Self> {
        let layout = layout(tensors, config, numbers.as_deref())?;
        let session = py.detach(|| store::ModelSession::begin(path, layout)).map_err(to_python)?;
        let paths = session.paths();
        Ok(Self { session: Owned::new(session), paths })
    }

    #[getter]
    fn paths(&self) -> Vec<PathBuf> {
        self.paths.clone()
    }

    fn publish(&self, py: Python<'_>) -> PyResult<()> {
        let none = || to_python(Error::invalid("the export was given up before its end"));
        let session = self.session.take().ok_or_else(none)?;
        py.detach(|| session.publish()).map_err(to_python)
    }

    fn abandon(&self, py: Python<'_>) {
        let session = self.session.take();
        py.detach(|| drop(session));
    }
}

impl Drop for ModelSession {
    fn drop(&mut self) {
        drop(self.session.take());
    }
}

/// Of a place: the file's index, the offset there, the item's index, the offset in it, bytes, and the round.
type PlaceSpec = (usize, u64, usize, u64, u64, u32);

/// Starts writing one rank's share of a model and returns at once.
#[pyfunction]
pub(crate) fn start_model_share(
    py: Python<'_>,
    items: Vec<Memory>,
    path: PathBuf,
    files: Vec<(PathBuf, String, u64)>,
    places: Vec<PlaceSpec>,
    config: &str,
) -> PyResult<SaveJob> {
    SaveJob::start(py, config, |config, raised| {
        let (mut dict, mut ready) = (StateDict::new(), Ready::default());
        for (number, memory) in items.into_iter().enumerate() {
            let (spec, _) = memory.named(number.to_string())?;
            let (item, source) = spec.source(raised, &mut ready)?;
            dict.item(item, source);
        }
        let files = files.into_iter();
        let files = files.map(|(path, name, bytes)| (path, SharedFile { name, bytes })).collect();
        let place = |(file, offset, item, from, bytes, round)| Place {
            file,
            offset,
            item,
            from,
            bytes,
            round,
        };
        let places = places.into_iter().map(place).collect();
        let store = ringstow::Store::new(config.clone())?;
        store.write_model_share_async(dict, path, files, places).map(Handle::Save)
    })
}
