//! Lends the memory of variables to a save. candle changes a variable in place, under the write lock of its storage. A thread
//! holds the read locks while a save copies, so that every change waits, also one in another thread.

#![allow(unsafe_code)]

use crate::device::Source;
use crate::error::{Error, Result};
use bytemuck::cast_slice;
use candle_core::{CpuStorage, DType, Device, Layout, Storage, StorageRef, Tensor};
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

/// A tensor, and its memory while it is locked.
pub(super) struct Lendable {
    name: String,
    tensor: Tensor,
    nbytes: usize,
    bytes: RwLock<Option<Bytes>>,
}

/// A tensor's dense bytes.
enum Bytes {
    /// In the tensor's own memory.
    Lent(*const u8),
    /// Of a tensor whose own memory is elsewhere, or in another form.
    Copied(Vec<u8>),
}

// SAFETY: the pointer is to memory that any thread may read: its lock is held for as long as the pointer is there.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// A copy of `nbytes` bytes that are locked.
    fn copied(self, nbytes: usize) -> Self {
        match self {
            Self::Lent(base) => {
                // SAFETY: the caller holds the lock, and the tensor has as many bytes.
                Self::Copied(unsafe { std::slice::from_raw_parts(base, nbytes) }.to_vec())
            }
            copied => copied,
        }
    }
}

/// The bytes of a dense tensor in memory; a copy of elements that are not plain bytes.
fn bytes_of(storage: &CpuStorage, layout: &Layout) -> Bytes {
    let start = layout.start_offset();
    let own = start..start + layout.shape().elem_count();
    let lent: &[u8] = match storage {
        CpuStorage::U32(all) => cast_slice(&all[own]),
        CpuStorage::I16(all) => cast_slice(&all[own]),
        CpuStorage::I32(all) => cast_slice(&all[own]),
        CpuStorage::I64(all) => cast_slice(&all[own]),
        CpuStorage::BF16(all) => cast_slice(&all[own]),
        CpuStorage::F16(all) => cast_slice(&all[own]),
        CpuStorage::F32(all) => cast_slice(&all[own]),
        CpuStorage::F64(all) => cast_slice(&all[own]),
        CpuStorage::F8E4M3(all) => {
            return Bytes::Copied(all[own].iter().map(|element| element.to_bits()).collect());
        }
        CpuStorage::U8(all)
        | CpuStorage::F6E2M3(all)
        | CpuStorage::F6E3M2(all)
        | CpuStorage::F4(all)
        | CpuStorage::F8E8M0(all) => &all[own],
    };
    Bytes::Lent(lent.as_ptr())
}

impl Lendable {
    /// # Errors
    /// [`Error::Unsupported`] for a type that candle only stores, and for elements that are not in row-major order.
    pub fn new(name: String, tensor: Tensor) -> Result<Arc<Self>> {
        use DType::{F4, F6E2M3, F6E3M2, F8E8M0};
        if matches!(tensor.dtype(), F4 | F6E2M3 | F6E3M2 | F8E8M0) {
            return Err(Error::Unsupported {
                what: format!(
                    "variable {name:?} is of {:?}, which candle only stores",
                    tensor.dtype()
                ),
                remedy: "leave it out of the map, or save it as bytes (U8)".into(),
            });
        }
        if !tensor.is_contiguous() {
            return Err(Error::Unsupported {
                what: format!("variable {name:?} is not contiguous: candle cannot set it"),
                remedy: "make it of `tensor.contiguous()?`".into(),
            });
        }
        let nbytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        Ok(Arc::new(Self { name, tensor, nbytes, bytes: RwLock::new(None) }))
    }

    fn set_bytes(&self, bytes: Option<Bytes>) {
        *self.bytes.write().unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    /// The address of the storage, which other tensors may share. It does not change while the tensor lives.
    fn storage(&self) -> usize {
        std::ptr::from_ref::<Storage>(&*self.tensor.storage_and_layout().0).addr()
    }

    /// Makes the bytes readable. The caller keeps the guard until they no longer are.
    fn lend(&self, storage: &Storage) -> Result<()> {
        let bytes = self.bytes_in(storage).map_err(|error| {
            Error::invalid(format!(
                "variable {:?} cannot be copied from its device: {error}",
                self.name
            ))
        })?;
        self.set_bytes(Some(bytes));
        Ok(())
    }

    /// The bytes: lent by the storage, which is locked, if they can be read where they are.
    fn bytes_in(&self, storage: &Storage) -> candle_core::Result<Bytes> {
        match storage {
            Storage::Cpu(storage) => Ok(bytes_of(storage, self.tensor.layout())),
            _ => {
                let here = self.tensor.to_device(&Device::Cpu)?;
                let (storage, layout) = here.storage_and_layout();
                match &*storage {
                    Storage::Cpu(storage) => Ok(bytes_of(storage, layout).copied(self.nbytes)),
                    _ => candle_core::bail!("it is not on the CPU after a copy to it"),
                }
            }
        }
    }
}

/// A source for a save. Its bytes can be read only while a [`Lock`] is held.
pub(super) struct LentSource(pub Arc<Lendable>);

impl Source for LentSource {
    fn nbytes(&self) -> u64 {
        self.0.nbytes as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(to.len()).filter(|&end| end <= self.0.nbytes);
        let end = end.ok_or_else(|| Error::invalid("a read beyond the end of a variable"))?;
        let bytes = self.0.bytes.read().unwrap_or_else(PoisonError::into_inner);
        match &*bytes {
            Some(Bytes::Copied(bytes)) => to.copy_from_slice(&bytes[offset..end]),
            Some(Bytes::Lent(base)) => {
                // SAFETY: `nbytes` bytes are there, and nobody writes to them: the thread of the `Lock` holds the read lock
                // of the storage, and takes the pointer away, under the lock that is held here, before it unlocks.
                to.copy_from_slice(unsafe {
                    std::slice::from_raw_parts(base.add(offset), to.len())
                });
            }
            None => {
                return Err(Error::invalid(format!(
                    "variable {:?} is not locked: another save of the same state has ended. Make a state for each save",
                    self.0.name
                )));
            }
        }
        Ok(())
    }
}

/// Keeps variables as they are. Dropping it unlocks them.
pub(super) struct Lock {
    release: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lock {
    /// Waits for changes that are in progress, and keeps all others waiting.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started; [`Error::Invalid`] if candle cannot copy a variable from its device.
    pub fn hold(tensors: &Arc<[Arc<Lendable>]>) -> Result<Self> {
        let ((locked, is_locked), (release, released)) = (channel(), channel::<()>());
        let tensors = tensors.clone();
        // candle's guards cannot leave the thread that made them.
        let hold = move || {
            // One guard for each storage: a second one would wait for a writer that waits for the first.
            let storages: Vec<usize> = tensors.iter().map(|tensor| tensor.storage()).collect();
            let mut guards: HashMap<usize, StorageRef<'_>> = HashMap::new();
            for (storage, it) in storages.iter().zip(&*tensors) {
                guards.entry(*storage).or_insert_with(|| it.tensor.storage_and_layout().0);
            }
            let _unlend = Unlend(&tensors); // dropped before the guards
            let mut each = storages.iter().zip(&*tensors);
            let lent = each.try_for_each(|(storage, it)| it.lend(&guards[storage]));
            let failed = lent.is_err();
            if locked.send(lent).is_ok() && !failed {
                let _ = released.recv(); // an error: the other end was dropped
            }
        };
        let thread = thread::Builder::new()
            .name("ringstow-lock".into())
            .spawn(hold)
            .map_err(|error| Error::io("starting a thread to lock", "variables", error))?;
        let lock = Self { release: Some(release), thread: Some(thread) };
        let ended =
            || Error::Panicked { work: "save", message: "while it locked variables".into() };
        is_locked.recv().map_err(|_| ended())??;
        Ok(lock)
    }
}

/// Takes the bytes of these tensors away when it is dropped.
struct Unlend<'a>(&'a [Arc<Lendable>]);

impl Drop for Unlend<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|tensor| tensor.set_bytes(None));
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        drop(self.release.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
