//! A state dict's usual tensors and the stored ones that fill them, for `ringstow._reading._load_plan`, which has all others.

use crate::exchange::{Exchange, Plain};
use crate::load::Checkpoint;
use crate::node::Leaf;
use crate::place::Address;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use ringstow::TensorEntry;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Value<'py> = Bound<'py, PyAny>;

/// A pointer, and the GPU that has the memory.
type Place = (u64, Option<u32>);

/// A dense tensor, and the stored one of the same type and shape.
struct Match {
    number: usize,
    address: Address,
    tensor: Py<PyAny>,
    leaf: Py<Leaf>,
    /// The path of the dict that the tensor is in, and its key there.
    path: Py<PyTuple>,
    key: Py<PyAny>,
}

/// Pairs of tensors, of which no two have the same memory or the same stored tensor.
#[pyclass(frozen, module = "ringstow._native")]
pub(crate) struct Matches {
    checkpoint: Py<Checkpoint>,
    exchange: Py<Exchange>,
    /// Gets a tensor on a GPU, for the stream that it is ready on.
    address_of: Py<PyAny>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// `None` where another tensor has the same memory or the same stored tensor.
    matches: Vec<Option<Match>>,
    by_number: HashMap<usize, usize>,
    by_place: HashMap<Place, usize>,
}

/// A tensor, its node and its path, for Python.
type Displaced<'py> = (Value<'py>, Py<Leaf>, Bound<'py, PyTuple>);

#[pymethods]
impl Matches {
    #[new]
    fn new(checkpoint: Py<Checkpoint>, exchange: Py<Exchange>, address_of: Py<PyAny>) -> Self {
        Self { checkpoint, exchange, address_of, inner: Mutex::default() }
    }

    /// Takes the usual tensors of a dict that fit the stored ones, and returns the keys of all other nodes. Also returns what
    /// was taken before, and shares memory or a stored tensor with one of these.
    fn take<'py>(
        &self,
        here: &Bound<'py, PyDict>,
        saved: &Bound<'py, PyDict>,
        path: &Bound<'py, PyTuple>,
    ) -> PyResult<(Vec<Value<'py>>, Vec<Displaced<'py>>)> {
        let (mut left, mut displaced) = (Vec::new(), Vec::new());
        for (key, node) in saved.iter() {
            let Some((tensor, number, plain)) = self.fitting(here, &key, &node)? else {
                left.push(key);
                continue;
            };
            if plain.nbytes == 0 {
                continue; // it fits, and there is nothing to fill
            }
            let inner = &mut *self.lock();
            let met = inner.note(number, plain.address);
            if met.is_empty() {
                let (tensor, leaf) = (tensor.unbind(), node.cast_exact()?.clone().unbind());
                let (path, address) = (path.clone().unbind(), plain.address);
                let key = key.unbind();
                inner.matches.push(Some(Match { number, address, tensor, leaf, path, key }));
                continue;
            }
            left.push(key);
            inner.matches.push(None);
            displaced.extend(met.into_iter().filter_map(|at| inner.matches[at].take()));
        }
        let py = here.py();
        let displaced: PyResult<_> =
            displaced.into_iter().map(|each| each.for_python(py)).collect();
        Ok((left, displaced?))
    }

    /// Gives up and returns what has one of these stored tensors, or one of these addresses.
    fn displace<'py>(
        &self,
        py: Python<'py>,
        others: Vec<(String, Address)>,
    ) -> PyResult<Vec<Displaced<'py>>> {
        let (inner, mut displaced) = (&mut *self.lock(), Vec::new());
        for (name, address) in others {
            let by_number = self.checkpoint.get().inner.number(&name);
            let by_number = by_number.and_then(|number| inner.by_number.get(&number));
            let met = by_number.into_iter().chain(inner.by_place.get(&place_of(address)));
            displaced.extend(met.filter_map(|&at| inner.matches[at].take()));
        }
        displaced.into_iter().map(|each| each.for_python(py)).collect()
    }

    /// Loads into the tensors, and into other dense memory, and returns the report.
    fn load_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, Address, usize)>,
    ) -> PyResult<String> {
        let checkpoint = self.checkpoint.get();
        let matches: Vec<(usize, Address)> =
            self.lock().matches.iter().flatten().map(|each| (each.number, each.address)).collect();
        let of_match = |(number, address): (usize, _)| {
            let entry = &checkpoint.inner.tensors()[number];
            (entry.name.as_str(), address, entry.nbytes() as usize)
        };
        let targets = targets.iter().map(|(name, at, nbytes)| (&**name, *at, *nbytes));
        checkpoint.fill_targets(py, matches.into_iter().map(of_match).chain(targets))
    }

    /// The names of the stored tensors.
    fn names(&self) -> Vec<String> {
        let stored = self.checkpoint.get().inner.tensors();
        self.lock().matches.iter().flatten().map(|each| stored[each.number].name.clone()).collect()
    }

    /// The tensors.
    fn tensors(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.lock().matches.iter().flatten().map(|each| each.tensor.clone_ref(py)).collect()
    }
}

impl Matches {
    /// Not held while Python's code runs.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The usual tensor of a key, if the node is a stored tensor that fits; and that one's number.
    fn fitting<'py>(
        &self,
        here: &Bound<'py, PyDict>,
        key: &Value<'py>,
        node: &Value<'py>,
    ) -> PyResult<Option<(Value<'py>, usize, Plain<'py>)>> {
        let py = here.py();
        let Ok(leaf) = node.cast_exact::<Leaf>() else { return Ok(None) };
        let Some(name) = leaf.get().name(py) else { return Ok(None) };
        let Some(tensor) = here.get_item(key)? else { return Ok(None) };
        let checkpoint = &self.checkpoint.get().inner;
        let Some(number) = checkpoint.number(name.to_str()?) else { return Ok(None) };
        let entry = &checkpoint.tensors()[number];
        let plain = self.exchange.get().look(&tensor, self.address_of.bind(py))?;
        Ok(plain.filter(|plain| fits(plain, entry)).map(|plain| (tensor, number, plain)))
    }
}

fn fits(plain: &Plain<'_>, entry: &TensorEntry) -> bool {
    plain.dtype == entry.dtype && *plain.shape == *entry.shape
}

fn place_of(address: Address) -> Place {
    match address {
        Address::Host(at) => (at as u64, None),
        Address::Cuda(at, gpu, _) => (at, Some(gpu)),
    }
}

impl Inner {
    /// Notes the next match, and returns those that have the same stored tensor or the same memory.
    fn note(&mut self, number: usize, address: Address) -> Vec<usize> {
        let next = self.matches.len();
        let by_number = match self.by_number.entry(number) {
            Entry::Occupied(met) => Some(*met.get()),
            Entry::Vacant(free) => {
                free.insert(next);
                None
            }
        };
        let by_place = match self.by_place.entry(place_of(address)) {
            Entry::Occupied(met) => Some(*met.get()),
            Entry::Vacant(free) => {
                free.insert(next);
                None
            }
        };
        by_number.into_iter().chain(by_place).collect()
    }
}

impl Match {
    fn for_python<'py>(self, py: Python<'py>) -> PyResult<Displaced<'py>> {
        let mut path: Vec<Value<'py>> = self.path.bind(py).iter().collect();
        path.push(self.key.into_bound(py));
        Ok((self.tensor.into_bound(py), self.leaf, PyTuple::new(py, path)?))
    }
}
