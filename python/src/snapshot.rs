//! Copies of tensors that are taken while the caller waits: of what is small, of what cannot be watched,
//! or of everything.

use crate::place::{Address, CopyMemory};
use crate::settle::once_settled;
use crate::tensors::{Data, Spec, Tensors};
use crate::watch::{torn, version_of};
use pyo3::prelude::*;
use ringstow::Source;
use ringstow::internals::device::host::Strided;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A cache line, and enough for every dtype.
const ALIGN: usize = 64;
/// What one thread copies at a time: a multiple of every element's size.
const PIECE: usize = 8 << 20;
const THREADS_MAX: usize = 4;

/// Notes the version of every tensor, so that the save fails if one is changed before its last byte has
/// been copied.
#[pyfunction]
pub(crate) fn watch(py: Python<'_>, tensors: &Bound<'_, Tensors>) {
    let Tensors { specs, owners, .. } = &mut *tensors.borrow_mut();
    for (spec, owner) in specs.iter_mut().zip(owners) {
        spec.version = version_of(spec.tensor.as_ref().unwrap_or(owner).bind(py));
    }
}

/// Copies tensors of at most `largest` bytes, and those that cannot be watched: they may be changed from then on.
/// Call it after `watch`. `copy_gpu` gets tensors on GPUs, and returns the address and the owner of each copy.
///
/// Returns whether it copied all of them. It copies nothing if they take more than `room` bytes, and never copies
/// an array on a GPU, which only its own library can copy.
#[pyfunction]
pub(crate) fn copy_now(
    py: Python<'_>,
    tensors: &Bound<'_, Tensors>,
    path: PathBuf,
    largest: u64,
    room: u64,
    copy_gpu: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    let mut tensors = tensors.borrow_mut();
    let Some(chosen) = choose(&tensors.specs, largest, room) else { return Ok(false) };
    let Chosen { host, gpu, nbytes, is_all } = chosen;
    let mut copied = host.clone();
    if !host.is_empty() {
        tensors.copy_host(py, &host, nbytes)?;
    }
    if !gpu.is_empty() {
        let originals: Vec<Py<PyAny>> =
            gpu.iter().map(|&at| tensors.specs[at].tensor(py, &tensors.owners[at])).collect();
        let copies: Option<Vec<(Address, Py<PyAny>)>> = copy_gpu.call1((originals,))?.extract()?;
        let Some(copies) = copies else { return Ok(false) };
        for (&at, (address, owner)) in gpu.iter().zip(copies) {
            tensors.replace(at, address, owner);
        }
        copied.extend(gpu);
    }
    if largest == u64::MAX {
        // An operation of another thread may still be writing, and has given no new version yet. Where
        // only small tensors are copied, that takes microseconds, and the call is not to wait.
        py.detach(|| once_settled(|_| ()));
    }
    // Other threads ran meanwhile.
    let changed = tensors.let_go(py, &copied);
    match changed.is_empty() {
        true => Ok(is_all),
        false => Err(torn(py, &path, changed)?),
    }
}

/// The tensors to be copied, by their numbers.
struct Chosen {
    host: Vec<usize>,
    gpu: Vec<usize>,
    /// What the copies in host memory take.
    nbytes: usize,
    is_all: bool,
}

/// Returns `None` if there is no room for them.
fn choose(specs: &[Spec], largest: u64, room: u64) -> Option<Chosen> {
    let mut chosen = Chosen { host: Vec::new(), gpu: Vec::new(), nbytes: 0, is_all: true };
    let mut on_gpu = 0;
    for (at, spec) in specs.iter().enumerate() {
        let nbytes = spec.nbytes();
        if nbytes == 0 || (nbytes > largest && spec.version.is_some()) {
            continue;
        }
        match spec.data {
            Data::Address(Address::Host(_)) => {
                chosen.host.push(at);
                chosen.nbytes += (nbytes as usize).next_multiple_of(ALIGN);
            }
            Data::Address(Address::Cuda(..)) if spec.version.is_some() => {
                chosen.gpu.push(at);
                on_gpu += nbytes;
            }
            Data::Address(Address::Cuda(..)) => chosen.is_all = false,
            Data::Lazy(_) => {} // loaded while it is written, for this save alone
        }
    }
    let needed = (chosen.nbytes as u64).saturating_add(on_gpu);
    (needed <= room).then_some(chosen)
}

impl Tensors {
    /// Copies tensors in host memory to memory of their own.
    fn copy_host(&mut self, py: Python<'_>, numbers: &[usize], nbytes: usize) -> PyResult<()> {
        let arena = CopyMemory::new(nbytes)?;
        let (mut sources, mut offset) = (Vec::with_capacity(numbers.len()), 0);
        for &at in numbers {
            let source = self.specs[at].strided().map_err(crate::error::to_python)?;
            sources.push((source, offset));
            offset += (self.specs[at].nbytes() as usize).next_multiple_of(ALIGN);
        }
        py.detach(|| copy(&sources, &arena));
        let places: Vec<usize> = sources.iter().map(|(_, offset)| arena.at(*offset)).collect();
        drop(sources);
        let arena = Py::new(py, arena)?.into_any();
        for (&at, place) in numbers.iter().zip(places) {
            self.replace(at, Address::Host(place), arena.clone_ref(py));
        }
        Ok(())
    }

    /// Has a tensor read from a dense copy of it.
    fn replace(&mut self, at: usize, address: Address, owner: Py<PyAny>) {
        let spec = &mut self.specs[at];
        (spec.data, spec.strides, spec.held) = (Data::Address(address), None, None);
        // Kept until it has been looked at once more.
        let original = std::mem::replace(&mut self.owners[at], owner);
        spec.tensor.get_or_insert(original);
    }

    /// Looks at tensors for the last time: returns the names of those that have been changed.
    fn let_go(&mut self, py: Python<'_>, numbers: &[usize]) -> Vec<String> {
        let mut changed = Vec::new();
        for &at in numbers {
            let spec = &mut self.specs[at];
            let (tensor, version) = (spec.tensor.take(), spec.version.take());
            let now = tensor.and_then(|tensor| version_of(tensor.bind(py)));
            if version.is_some() && now != version {
                changed.push(spec.info.name.clone());
            }
        }
        changed
    }
}

/// Copies all sources to their offsets, by several threads if it is much.
fn copy(sources: &[(Strided, usize)], arena: &CopyMemory) {
    let pieces: Vec<(usize, usize, usize)> = sources
        .iter()
        .enumerate()
        .flat_map(|(number, (source, _))| {
            let nbytes = source.nbytes() as usize;
            (0..nbytes).step_by(PIECE).map(move |at| (number, at, PIECE.min(nbytes - at)))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&(number, at, len)) = pieces.get(next.fetch_add(1, Relaxed)) {
            let (source, offset) = &sources[number];
            // SAFETY: a piece of the arena that no other piece overlaps, and nobody reads yet.
            source.copy(at, unsafe { arena.slice(offset + at, len) });
        }
    };
    let threads = crate::cores().min(THREADS_MAX).min(arena.len().div_ceil(PIECE)).max(1);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without more threads this one does it all.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}
