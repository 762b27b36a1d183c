//! The tensors of a state that is to be saved, each once, under a name of its own.

use crate::error::to_python;
use crate::exchange::Plain;
use crate::lazy::{Lazy, Raised};
use crate::place::{self, Address};
use crate::storage::Held;
use crate::watch::{Storage, WatchList, Watched};
use hashbrown::{DefaultHashBuilder, HashTable};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringstow::internals::{
    device::{cuda::Ready, host::Strided},
    plan::replicas::{Replica, rows_of},
};
use ringstow::{Dtype, Error, Item, Region, Result, Source, StateDict, TensorInfo, TensorSource};
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::path::Path;
use std::sync::Arc;

/// Where a tensor's data is.
#[derive(FromPyObject)]
pub(crate) enum Data {
    /// In memory.
    Address(Address),
    /// Where this, called without arguments, puts it: see [`Lazy`].
    Lazy(Py<PyAny>),
}

/// Python's `Memory` or `LazyMemory`: dtype, shape, strides in bytes (none: dense), where the data is, bytes of the
/// dense data, and what keeps the memory.
#[derive(FromPyObject)]
pub(crate) struct Memory(String, Vec<u64>, Option<Vec<isize>>, Data, u64, Py<PyAny>);

impl Memory {
    /// The tensor of that name, with its bytes counted again, and what keeps its memory.
    pub(crate) fn named(self, name: String) -> Result<(Spec, Py<PyAny>)> {
        let Self(dtype, shape, strides, data, nbytes, owner) = self;
        let dtype = Dtype::from_name(&dtype).ok_or_else(|| {
            Error::invalid(format!("tensor {name:?}: there is no dtype {dtype:?}"))
        })?;
        let info = TensorInfo { name, dtype, shape };
        if info.nbytes()? != nbytes {
            return Err(Error::invalid(format!(
                "tensor {:?}: {nbytes} bytes are not what {dtype} {:?} takes",
                info.name, info.shape
            )));
        }
        let (tensor, version, held, region, replica) = Default::default();
        Ok((Spec { info, strides, data, tensor, version, held, region, replica }, owner))
    }
}

/// One tensor, with strides in bytes (none: dense).
pub(crate) struct Spec {
    pub(crate) info: TensorInfo,
    pub(crate) strides: Option<Vec<isize>>,
    pub(crate) data: Data,
    /// torch's tensor, where it is not what keeps the memory.
    pub(crate) tensor: Option<Py<PyAny>>,
    /// The version that the tensor had at the call, if it is to have that still once it was copied.
    pub(crate) version: Option<u64>,
    /// The memory of its storage at the call, where that is what keeps it.
    pub(crate) held: Option<Held>,
    /// Which region it is of a tensor; none: all of it.
    region: Option<Region>,
    /// Which replica of that region it is; none: of a tensor that all ranks have, or that is not shared out.
    replica: Option<Replica>,
}

/// The name, dtype, shape and checksum of a tensor that each rank has.
type Replicated<'a> = (&'a str, &'a str, Vec<u64>, Option<u32>);

/// A region's tensor, its offsets and its shape in it, and its checksum.
type Checksum = (String, Vec<u64>, Vec<u64>, Summed);

/// A checksum, or what keeps the memory that this side cannot read.
#[derive(IntoPyObject)]
enum Summed {
    Crc32(u32),
    Owner(Py<PyAny>),
}

/// Bytes that are checksummed at a time: a multiple of every element's size.
const BLOCK_BYTES: usize = 1 << 20;

/// Tensors at one place that are alike in type, shape and strides are the same.
#[derive(PartialEq, Eq, Hash)]
enum Place {
    Host(usize),
    Cuda(u64, u32),
    /// Of what will be loaded: the object that stands for it.
    Lazy(usize),
}

/// The tensors, and what keeps their memory for as long as this is held.
#[pyclass(module = "ringstow._native")]
pub(crate) struct Tensors {
    pub(crate) specs: Vec<Spec>,
    pub(crate) owners: Vec<Py<PyAny>>,
    /// Names that no tensor gets.
    taken: HashSet<String, DefaultHashBuilder>,
    /// The tensors' numbers, to be found by name, and by where they are.
    by_name: HashTable<usize>,
    by_place: HashTable<usize>,
    hasher: DefaultHashBuilder,
}

#[pymethods]
impl Tensors {
    #[new]
    #[pyo3(signature = (taken = HashSet::default()))]
    fn new(taken: HashSet<String, DefaultHashBuilder>) -> Self {
        let (specs, owners, by_name, by_place, hasher) = Default::default();
        Self { specs, owners, taken, by_name, by_place, hasher }
    }

    fn add(&mut self, name: String, memory: Memory) -> PyResult<&str> {
        let (spec, owner) = memory.named(name).map_err(to_python)?;
        let nbytes = spec.nbytes();
        Ok(self.store(spec, nbytes, owner))
    }

    /// Returns a name that no other tensor gets: this one, with a number if it is taken.
    fn reserve(&mut self, name: String) -> String {
        let name = if self.is_free(&name) { name } else { self.unique(&name) };
        self.taken.insert(name.clone());
        name
    }

    /// Notes what this rank has of a tensor, under a name that was reserved.
    fn add_region(
        &mut self,
        name: String,
        memory: Memory,
        region: (Vec<u64>, Vec<u64>),
        replica: (u32, u32),
    ) -> PyResult<()> {
        let ((shape, offsets), (number, count)) = (region, replica);
        let (mut spec, owner) = memory.named(name).map_err(to_python)?;
        spec.region = (spec.info.shape != shape).then_some(Region { shape, offsets });
        spec.replica = Some(Replica { number, count });
        self.specs.push(spec);
        self.owners.push(owner);
        Ok(())
    }

    /// The name, dtype and shape of each tensor that is not a region of one: each rank that has it has the same. With a
    /// checksum if it is in host memory and has at most `largest` bytes.
    fn replicated(&self, largest: u64) -> PyResult<Vec<Replicated<'_>>> {
        let whole = self.specs.iter().filter(|spec| spec.replica.is_none());
        whole
            .map(|spec| {
                let info = &spec.info;
                let is_small = spec.is_on_host() && spec.nbytes() <= largest;
                let crc32 = is_small.then(|| spec.crc32()).transpose().map_err(to_python)?;
                Ok((&*info.name, info.dtype.name(), info.shape.clone(), crc32))
            })
            .collect()
    }

    /// The name, offsets, shape and checksum of each region of these tensors. For memory on a GPU, what keeps it is in place
    /// of the checksum.
    fn checksums(&self, py: Python<'_>, names: HashSet<String>) -> PyResult<Vec<Checksum>> {
        let chosen =
            self.specs.iter().zip(&self.owners).filter(|(spec, _)| names.contains(&spec.info.name));
        let summed = chosen.map(|(spec, owner)| {
            let offsets = spec.region.as_ref().map(|region| region.offsets.clone());
            let offsets = offsets.unwrap_or_else(|| vec![0; spec.info.shape.len()]);
            let summed = match spec.is_on_host() {
                true => Summed::Crc32(spec.crc32().map_err(to_python)?),
                false => Summed::Owner(spec.tensor(py, owner)),
            };
            Ok((spec.info.name.clone(), offsets, spec.info.shape.clone(), summed))
        });
        summed.collect()
    }

    /// Keeps what this rank writes. `ranks` is its number among those that have all the replicated tensors, and how many
    /// there are; `holders` says it for tensors that only some ranks have, and has none for what others write.
    fn deal(&mut self, ranks: (u32, u32), holders: HashMap<String, Option<(u32, u32)>>) {
        (self.by_name, self.by_place) = Default::default();
        let (specs, owners) = (std::mem::take(&mut self.specs), std::mem::take(&mut self.owners));
        for (spec, owner) in specs.into_iter().zip(owners) {
            let of_all = || holders.get(&spec.info.name).copied().unwrap_or(Some(ranks));
            let replica = spec.replica.map(|one| (one.number, one.count)).or_else(of_all);
            let replica = replica.map(|(number, count)| Replica { number, count });
            if let Some(share) = replica.and_then(|replica| spec.share_of(replica)) {
                self.specs.push(share);
                self.owners.push(owner);
            }
        }
    }

    fn __len__(&self) -> usize {
        self.specs.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        let none = || pyo3::exceptions::PyIndexError::new_err(index);
        let Spec { info, strides, data, .. } = self.specs.get(index).ok_or_else(none)?;
        let shape = PyTuple::new(py, &info.shape)?;
        let strides = strides.as_ref().map(|strides| PyTuple::new(py, strides)).transpose()?;
        let data = match data {
            Data::Address(address) => address.into_pyobject(py)?,
            Data::Lazy(load) => load.bind(py).clone(),
        };
        let nbytes = info.nbytes().map_err(to_python)?;
        let owner = self.owners[index].bind(py);
        let memory = (info.dtype.name(), shape, strides, data, nbytes, owner);
        Ok((info.name.as_str(), memory).into_pyobject(py)?.into_any())
    }
}

impl Tensors {
    /// Notes one of torch's. Returns the name that it is stored under.
    pub(crate) fn add_plain(&mut self, name: &str, plain: Plain<'_>, tensor: Py<PyAny>) -> &str {
        let Plain { dtype, shape, address, nbytes, owner, held } = plain;
        let info = TensorInfo { name: name.to_owned(), dtype, shape };
        let data = Data::Address(address);
        let (strides, version, region, replica) = Default::default();
        let tensor = Some(tensor);
        let spec = Spec { info, strides, data, tensor, version, held, region, replica };
        self.store(spec, nbytes, owner.unbind())
    }

    /// Notes a tensor, unless it was met before. Returns the name that it is stored under.
    fn store(&mut self, mut spec: Spec, nbytes: u64, owner: Py<PyAny>) -> &str {
        let place = (nbytes > 0).then(|| self.hasher.hash_one(spec.place(&owner)));
        if let Some(number) = place.and_then(|hash| self.met(hash, &spec, &owner)) {
            return &self.specs[number].info.name;
        }
        let mut name = self.hasher.hash_one(&spec.info.name);
        if !self.is_free_at(name, &spec.info.name) {
            spec.info.name = self.unique(&spec.info.name);
            name = self.hasher.hash_one(&spec.info.name);
        }
        self.specs.push(spec);
        self.owners.push(owner);
        self.index(name, place)
    }

    /// Makes room for so many more.
    pub(crate) fn make_room(&mut self, count: usize) {
        let Self { specs, owners, by_name, by_place, hasher, .. } = self;
        let name = |&number: &usize| hasher.hash_one(&specs[number].info.name);
        by_name.reserve(count, name);
        by_place.reserve(count, |&number| hasher.hash_one(specs[number].place(&owners[number])));
        specs.reserve(count);
        owners.reserve(count);
    }

    /// The tensor that is the same elements of the same memory, whose hash is given.
    fn met(&self, hash: u64, spec: &Spec, owner: &Py<PyAny>) -> Option<usize> {
        let place = spec.place(owner);
        let is_same = |&number: &usize| {
            let known = &self.specs[number];
            known.place(&self.owners[number]) == place && known.is_like(spec)
        };
        self.by_place.find(hash, is_same).copied()
    }

    /// Has the last tensor found by the hash of its name and, if it has any memory, that of its place. Returns its name.
    fn index(&mut self, name: u64, place: Option<u64>) -> &str {
        let Self { specs, owners, by_name, by_place, hasher, .. } = self;
        let last = specs.len() - 1;
        by_name.insert_unique(name, last, |&n| hasher.hash_one(&specs[n].info.name));
        if let Some(hash) = place {
            by_place.insert_unique(hash, last, |&n| hasher.hash_one(specs[n].place(&owners[n])));
        }
        &specs[last].info.name
    }

    fn is_free(&self, name: &str) -> bool {
        self.is_free_at(self.hasher.hash_one(name), name)
    }

    fn is_free_at(&self, hash: u64, name: &str) -> bool {
        let is_it = |&number: &usize| self.specs[number].info.name == name;
        let met = self.by_name.find(hash, is_it);
        met.is_none() && (self.taken.is_empty() || !self.taken.contains(name))
    }

    fn unique(&self, name: &str) -> String {
        let mut numbered = (2..).map(|count| format!("{name}#{count}"));
        numbered.find(|name| self.is_free(name)).expect("there are more numbers than names")
    }

    /// What is to be saved at a path. The owners stay here.
    pub(crate) fn take(
        &mut self,
        py: Python<'_>,
        path: &Path,
        raised: &Raised,
    ) -> Result<StateDict<'static>> {
        (self.by_name, self.by_place) = Default::default();
        let (mut dict, mut ready) = (StateDict::new(), Ready::default());
        let mut watched = WatchList::default();
        for (at, spec) in std::mem::take(&mut self.specs).into_iter().enumerate() {
            if let Some(version) = spec.version {
                let (tensor, owner) = (spec.tensor(py, &self.owners[at]), &self.owners[at]);
                let storage = match spec.held {
                    Some(held) => Some(Storage::new(owner.clone_ref(py), held)),
                    None => Storage::of(tensor.bind(py)),
                };
                watched.push(&spec.info.name, Watched { tensor, version, storage });
            }
            let (item, source) = spec.source(raised, &mut ready)?;
            dict.item(item, source);
        }
        watch(&mut dict, Arc::new(watched), path, raised);
        Ok(dict)
    }
}

/// Has a save to a path fail if one of the tensors has been changed when their last byte was copied.
pub(crate) fn watch(
    dict: &mut StateDict<'static>,
    watched: Arc<WatchList>,
    path: &Path,
    raised: &Raised,
) {
    if !watched.is_empty() {
        let (path, raised) = (path.to_path_buf(), raised.clone());
        dict.check_staged(move || watched.check(&path, &raised));
    }
}

impl Spec {
    /// Bytes of the dense data.
    pub(crate) fn nbytes(&self) -> u64 {
        self.info.nbytes().expect("it was counted when the tensor was added")
    }

    /// What has a version, if anything has.
    pub(crate) fn tensor(&self, py: Python<'_>, owner: &Py<PyAny>) -> Py<PyAny> {
        self.tensor.as_ref().unwrap_or(owner).clone_ref(py)
    }

    /// The tensor's bytes, to be read when they are written.
    pub(crate) fn source(
        self,
        raised: &Raised,
        ready: &mut Ready,
    ) -> Result<(Item, TensorSource<'static>)> {
        let Self { info, strides, data, region, .. } = self;
        let source = match data {
            // SAFETY: the caller, `ringstow._state.tree._encode`, took the address from a live tensor with this shape
            // and these strides, and keeps the tensor alive until the save has staged it.
            Data::Address(address) => unsafe { place::source(&info, strides, address, ready)? },
            Data::Lazy(load) => {
                Box::new(Lazy::new(info.clone(), info.nbytes()?, load, raised.clone())).into()
            }
        };
        Ok((Item { info, region, object: false }, source))
    }

    fn is_on_host(&self) -> bool {
        matches!(self.data, Data::Address(Address::Host(_)))
    }

    /// The checksum of the elements, which are in host memory.
    fn crc32(&self) -> Result<u32> {
        let nbytes = self.nbytes() as usize;
        let mut hasher = crc32fast::Hasher::new();
        let mut block = vec![0; nbytes.min(BLOCK_BYTES)];
        for at in (0..nbytes).step_by(BLOCK_BYTES) {
            let block = &mut block[..BLOCK_BYTES.min(nbytes - at)];
            self.strided()?.read(at, block)?;
            hasher.update(block);
        }
        Ok(hasher.finalize())
    }

    /// What a replica writes of it, if anything.
    fn share_of(mut self, replica: Replica) -> Option<Self> {
        let is_lazy = matches!(self.data, Data::Lazy(_));
        // Half a byte an element: a row may begin within a byte.
        let is_one = is_lazy || self.info.shape.is_empty() || self.info.dtype == Dtype::F4;
        let (nbytes, rows) = (self.nbytes(), if is_one { 1 } else { self.info.shape[0] });
        let share = rows_of(&self.info.name, nbytes, rows, replica)?;
        if share == (0..rows) {
            return Some(self);
        }
        let shape = self.info.shape.clone();
        let mut region =
            self.region.unwrap_or_else(|| Region { offsets: vec![0; shape.len()], shape });
        region.offsets[0] += share.start;
        self.region = Some(region);
        let step = self.strides.as_ref().map_or((nbytes / rows) as isize, |strides| strides[0]);
        if let Data::Address(address) = &mut self.data {
            *address = address.moved(step * share.start as isize);
        }
        self.info.shape[0] = share.end - share.start;
        Some(self)
    }

    /// The tensor in host memory.
    pub(crate) fn strided(&self) -> Result<Strided> {
        let Data::Address(Address::Host(address)) = self.data else {
            return Err(Error::invalid(
                "a tensor that is not in host memory cannot be copied here",
            ));
        };
        // SAFETY: as in `source`.
        unsafe { place::strided(&self.info, self.strides.clone(), address) }
    }

    fn place(&self, owner: &Py<PyAny>) -> Place {
        match self.data {
            Data::Address(Address::Host(address)) => Place::Host(address),
            Data::Address(Address::Cuda(base, gpu, _)) => Place::Cuda(base, gpu),
            Data::Lazy(_) => Place::Lazy(owner.as_ptr() as usize),
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        let (one, two) = (&self.info, &other.info);
        one.dtype == two.dtype && one.shape == two.shape && self.strides == other.strides
    }
}
