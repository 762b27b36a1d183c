//! A load of a whole skeleton: its tensors are made while the bytes are read.

use crate::exchange::Exchange;
use crate::load::Checkpoint;
use crate::memory::{Arenas, Block, Bytes, bytes_of};
use crate::node::{Leaf, Path, Visit, walk};
use crate::to_json;
use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use ringstow::TensorEntry;
use ringstow::internals::store::LoadPlace;
use std::collections::HashSet;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Value<'py> = Bound<'py, PyAny>;

/// The tensors that a skeleton needs, each once: their numbers in the checkpoint.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Wanted {
    numbers: Vec<usize>,
}

#[pymethods]
impl Wanted {
    fn __len__(&self) -> usize {
        self.numbers.len()
    }

    #[getter]
    fn numbers(&self) -> Vec<usize> {
        self.numbers.clone()
    }
}

/// Looks for what a skeleton needs. The leaves note the numbers of their tensors.
struct Survey<'a, 'py> {
    checkpoint: &'a ringstow::Checkpoint,
    numbers: Vec<usize>,
    is_met: Vec<bool>,
    /// Whether each tensor is stored.
    is_whole: bool,
    others: Bound<'py, PyList>,
}

impl<'py> Visit<'py> for Survey<'_, 'py> {
    fn tensor(
        &mut self,
        leaf: &Leaf,
        name: &Bound<'py, PyString>,
        _: &Path<'py>,
    ) -> PyResult<Option<Value<'py>>> {
        match self.checkpoint.number(name.to_str()?) {
            Some(number) => {
                leaf.set_number(number);
                if !std::mem::replace(&mut self.is_met[number], true) {
                    self.numbers.push(number);
                }
            }
            None => self.is_whole = false,
        }
        Ok(None)
    }

    fn other(&mut self, node: &Value<'py>, path: &Path<'py>) -> PyResult<Option<Value<'py>>> {
        self.others.append((path.tuple(node.py())?, node))?;
        Ok(None)
    }
}

/// A tensor of a load.
struct Tensor {
    /// Its bytes, unless they are torch's by now, or the block's.
    bytes: Option<Bytes>,
    /// For other objects than one tensor.
    block: Option<Py<Block>>,
    made: Option<Py<PyAny>>,
}

/// The tensors that a load reads, for `ringstow._state.tree._build`: they are made before they are read.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Loading {
    checkpoint: Py<Checkpoint>,
    /// For each tensor of the checkpoint, its number among those that are loaded.
    places: Vec<u32>,
    tensors: Mutex<Vec<Tensor>>,
    exchange: Option<Py<Exchange>>,
    /// `ringstow._state.tree._build.Builder`, which makes everything unusual.
    builder: Py<PyAny>,
}

#[pymethods]
impl Loading {
    /// The tensor of a name: one object for each call, over one memory.
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        path: Bound<'py, PyTuple>,
    ) -> PyResult<Value<'py>> {
        self.tensor_at(py, self.number(name)?, || Ok(path))
    }

    /// The bytes of a name that was asked for in blocks.
    fn block(&self, py: Python<'_>, name: &str) -> PyResult<Py<Block>> {
        let tensors = self.lock();
        let block = tensors[self.place(self.number(name)?)].block.as_ref();
        block.map(|block| block.clone_ref(py)).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }
}

impl Loading {
    fn number(&self, name: &str) -> PyResult<usize> {
        let number = self.checkpoint.get().inner.number(name);
        number.ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }

    fn place(&self, number: usize) -> usize {
        self.places[number] as usize
    }

    /// Never held while Python's code runs.
    fn lock(&self) -> MutexGuard<'_, Vec<Tensor>> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tensor_at<'py>(
        &self,
        py: Python<'py>,
        number: usize,
        path: impl FnOnce() -> PyResult<Bound<'py, PyTuple>>,
    ) -> PyResult<Value<'py>> {
        let place = self.place(number);
        if let Some(made) = self.lock()[place].made.as_ref().map(|made| made.clone_ref(py)) {
            return self.builder.bind(py).call_method1(intern!(py, "alias"), (made,));
        }
        let entry = &self.checkpoint.get().inner.tensors()[number];
        let made = self.make(py, (place, entry), path)?;
        self.lock()[place].made = Some(made.clone().unbind());
        Ok(made)
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        (place, entry): (usize, &TensorEntry),
        path: impl FnOnce() -> PyResult<Bound<'py, PyTuple>>,
    ) -> PyResult<Value<'py>> {
        let (mut bytes, block) = {
            let tensor = &mut self.lock()[place];
            (tensor.bytes.take(), tensor.block.as_ref().map(|block| block.clone_ref(py)))
        };
        if let Some(exchange) = &self.exchange
            && let Some(made) = exchange.get().over(py, (entry.dtype, &entry.shape), &mut bytes)?
        {
            return Ok(made);
        }
        let block = match bytes {
            Some(bytes) => Some(Py::new(py, Block::from(bytes))?),
            None => block,
        };
        let shape = PyTuple::new(py, &entry.shape)?;
        let tensor = (block, entry.dtype.name(), shape, entry.nbytes(), path()?);
        self.builder.bind(py).call_method1(intern!(py, "over"), tensor)
    }
}

/// Puts values into the places of a skeleton's nodes.
struct Fill<'a, 'py> {
    loading: &'a Loading,
    builder: Value<'py>,
}

impl<'py> Visit<'py> for Fill<'_, 'py> {
    fn tensor(
        &mut self,
        leaf: &Leaf,
        name: &Bound<'py, PyString>,
        path: &Path<'py>,
    ) -> PyResult<Option<Value<'py>>> {
        let py = name.py();
        self.loading.tensor_at(py, leaf.number(), || path.tuple(py)).map(Some)
    }

    fn other(&mut self, node: &Value<'py>, path: &Path<'py>) -> PyResult<Option<Value<'py>>> {
        let path = path.tuple(node.py())?;
        self.builder.call_method1(intern!(node.py(), "value"), (node, path)).map(Some)
    }
}

/// What a skeleton needs of a checkpoint: its tensors, and the paths of all nodes that are for `ringstow._state.tree`. `None`
/// instead of the tensors if one is not stored.
#[pyfunction]
pub(crate) fn survey<'py>(
    checkpoint: &Bound<'py, Checkpoint>,
    skeleton: &Value<'py>,
) -> PyResult<(Option<Wanted>, Bound<'py, PyList>)> {
    let checkpoint = &checkpoint.get().inner;
    let mut survey = Survey {
        checkpoint,
        numbers: Vec::new(),
        is_met: vec![false; checkpoint.tensors().len()],
        is_whole: true,
        others: PyList::empty(skeleton.py()),
    };
    walk(skeleton, &mut survey)?;
    let Survey { numbers, is_whole, others, .. } = survey;
    Ok((is_whole.then_some(Wanted { numbers }), others))
}

/// Loads what a skeleton needs, and puts it into the skeleton: `wanted` from its survey, and what has the names of `blocks`,
/// each in a block. With `early`, before the bytes are read: nothing that the builder does may look at them.
#[pyfunction]
#[pyo3(signature = (checkpoint, skeleton, wanted, blocks, builder, exchange, *, early))]
pub(crate) fn fill<'py>(
    checkpoint: &Bound<'py, Checkpoint>,
    skeleton: &Value<'py>,
    wanted: &Wanted,
    blocks: Vec<String>,
    builder: &Value<'py>,
    exchange: Option<Py<Exchange>>,
    early: bool,
) -> PyResult<(Value<'py>, String)> {
    let (py, inner) = (checkpoint.py(), &checkpoint.get().inner);
    let number =
        |name: &String| inner.number(name).ok_or_else(|| PyKeyError::new_err(name.clone()));
    let mut blocks = blocks.iter().map(number).collect::<PyResult<HashSet<usize>>>()?;
    let is_block: Vec<bool> = wanted.numbers.iter().map(|number| blocks.remove(number)).collect();
    let mut numbers = wanted.numbers.clone();
    numbers.extend(blocks);
    let build = |bytes: Vec<Bytes>| {
        let is_block = is_block.iter().copied().chain(std::iter::repeat(true));
        let tensors = bytes.into_iter().zip(is_block).map(|(bytes, is_block)| match is_block {
            true => {
                let block = Some(Py::new(py, Block::from(bytes))?);
                Ok(Tensor { bytes: None, block, made: None })
            }
            false => Ok(Tensor { bytes: Some(bytes), block: None, made: None }),
        });
        let tensors = Mutex::new(tensors.collect::<PyResult<_>>()?);
        let mut places = vec![u32::MAX; inner.tensors().len()];
        numbers.iter().zip(0..).for_each(|(&number, place)| places[number] = place);
        let exchange = exchange.as_ref().map(|exchange| exchange.clone_ref(py));
        let (checkpoint, owner) = (checkpoint.clone().unbind(), builder.clone().unbind());
        let loading = Loading { checkpoint, places, tensors, exchange, builder: owner };
        let loading = Bound::new(py, loading)?;
        builder.call_method1(intern!(py, "begin"), (&loading,))?;
        let mut fill = Fill { loading: loading.get(), builder: builder.clone() };
        Ok::<_, PyErr>(walk(skeleton, &mut fill)?.unwrap_or_else(|| skeleton.clone()))
    };
    let (mut filled, mut arenas) = (None, None);
    let loaded = checkpoint.get().run_beside(
        py,
        |options, mapped: Sender<Vec<LoadPlace>>| {
            let mapped = early.then_some(mapped);
            // If nobody listens, Python was interrupted.
            let mapped = |places| mapped.map_or((), |mapped| mapped.send(places).unwrap_or(()));
            inner.load_numbers(&numbers, options, mapped)
        },
        |places| {
            let arenas = arenas.insert(Arenas::of(places.iter().map(|p| (p.address, &p.range))));
            let bytes = |place: LoadPlace| arenas.bytes(place.address, place.range);
            filled = Some(build(places.into_iter().map(bytes).collect())?);
            Ok(())
        },
    )?;
    let report = to_json(&loaded.report)?;
    let tensors = loaded.into_tensors();
    arenas.iter().for_each(|arenas| arenas.keep(&tensors));
    let filled = filled.map_or_else(|| build(bytes_of(&tensors)), Ok)?;
    Ok((filled, report))
}
