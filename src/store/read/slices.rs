//! Reads regions of chunks into strided memory, as resharding loads do.

use crate::device::{StridedTarget, Target};
use crate::error::{Error, Result};
use crate::format::{Dtype, TensorEntry};
use crate::pipeline::report::LoadReport;
use crate::plan::slab::{Dense, Place, Slab};
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::load::{LoadOptions, OnCorrupt};
use crate::store::read::places::bytes_of;
use std::collections::HashSet;

/// A region of one chunk of a tensor, and the memory for its elements.
#[derive(Debug)]
pub struct Slice<'a> {
    /// The tensor.
    pub name: &'a str,
    /// Number of the chunk in [`TensorEntry::chunks`].
    pub chunk: usize,
    /// Where in the chunk the region starts, in elements per dimension.
    pub offsets: &'a [u64],
    /// The region's lengths, in elements per dimension.
    pub lengths: &'a [u64],
    /// The region's memory, with a stride per dimension.
    pub to: StridedTarget<'a>,
}

impl Checkpoint {
    /// Reads regions of chunks into memory of any strides, in one pass that reads nothing twice.
    ///
    /// With `verify`, whole checksum chunks are read and checked; without it, only the pages that are needed.
    /// A region lies in one chunk. In one rank's share, chunks may not cover a tensor ([`TensorEntry::holes`]). No
    /// two slices share memory; they may read the same bytes of the checkpoint.
    ///
    /// # Errors
    /// Before a byte is changed, naming all that is wrong: [`Error::Keys`] for tensors that are not
    /// in the checkpoint, [`Error::Invalid`] for regions that leave their chunk or their memory.
    /// [`Error::Corrupt`] for a damaged block and [`Error::Io`], when blocks read before it are in
    /// place already.
    pub fn read(&self, slices: &[Slice<'_>], options: LoadOptions<'_>) -> Result<LoadReport> {
        if options.on_corrupt == OnCorrupt::Skip {
            return Err(Error::invalid(
                "regions cannot be read with on_corrupt = skip: ask Checkpoint::damaged first which tensors are damaged",
            ));
        }
        let (runtime, job) = self.resources(options)?;
        let loading = self.loading(options.verify, &runtime, &job).taking(options.arrivals);
        let (slabs, targets) = self.slabs_of(slices)?;
        let plan = self.plan_slabs(&slabs, loading);
        job.set_total(bytes_of(&plan.reads));
        let fetched = self.scatter(&slabs, &targets, &plan, loading)?;
        let tensors: HashSet<&str> = slices.iter().map(|slice| slice.name).collect();
        let needed = slabs.iter().map(Slab::nbytes).sum();
        Ok(self.report(tensors.len(), needed, vec![fetched], loading))
    }

    /// The slices that are not empty, as slabs and their memory.
    fn slabs_of<'a, 'm>(
        &self,
        slices: &'a [Slice<'m>],
    ) -> Result<(Vec<Slab>, Vec<&'a Target<'m>>)> {
        let (mut slabs, mut targets) = (Vec::with_capacity(slices.len()), Vec::new());
        let (mut missing, mut bad) = (Vec::new(), Vec::new());
        for slice in slices {
            let Some(entry) = self.tensor(slice.name) else {
                missing.push(slice.name.to_owned());
                continue;
            };
            match slab_of(entry, slice) {
                Ok(Some(slab)) => {
                    slabs.push(slab);
                    targets.push(slice.to.memory());
                }
                Ok(None) => {}
                Err(why) => {
                    bad.push(format!("{:?}, chunk {}: {why}", slice.name, slice.chunk));
                }
            }
        }
        if !missing.is_empty() {
            missing.dedup();
            let path = self.path().into();
            return Err(Error::Keys { path, missing, unexpected: Vec::new(), mismatched: bad });
        }
        let used: HashSet<&str> = slices.iter().map(|slice| slice.name).collect();
        used.iter().filter_map(|name| self.tensor(name)).try_for_each(|e| self.check_faults(e))?;
        match bad.is_empty() {
            true => Ok((slabs, targets)),
            false => Err(Error::invalid(format!(
                "{}: {} of {} slices cannot be read: {}",
                self.path().display(),
                bad.len(),
                slices.len(),
                crate::error::some_of(&bad)
            ))),
        }
    }
}

/// A slice as a slab whose memory has room for it; `None` if it is empty.
fn slab_of(entry: &TensorEntry, slice: &Slice) -> std::result::Result<Option<Slab>, String> {
    let Some(chunk) = entry.chunks.get(slice.chunk) else {
        return Err(format!("the tensor has {} chunk(s)", entry.chunks.len()));
    };
    let strides = strides_in_bits(entry.dtype, slice.to.strides())?;
    let array = Dense {
        file: chunk.file as usize,
        begin: chunk.begin,
        dtype: entry.dtype,
        sizes: chunk.sizes().unwrap_or(&entry.shape),
    };
    let to = Place { at: 0, strides: &strides };
    let slab = Slab::new(array, slice.offsets, slice.lengths, to)?;
    match &slab {
        Some(slab) if !slice.to.memory().has_room_for(&slab.reach()) => {
            Err("its elements do not fit in the memory that was given".into())
        }
        _ => Ok(slab),
    }
}

/// Strides in bytes as strides in bits. The innermost one of a type of less than a byte must be
/// dense: the stride of the smallest number of elements that fills whole bytes.
fn strides_in_bits(dtype: Dtype, strides: &[isize]) -> std::result::Result<Vec<i128>, String> {
    let mut bits: Vec<i128> = strides.iter().map(|&stride| stride as i128 * 8).collect();
    let group = match dtype.bits() {
        4 => 1,
        6 => 3,
        _ => return Ok(bits),
    };
    match bits.last_mut() {
        Some(stride) if *stride == group * 8 => *stride = dtype.bits().into(),
        Some(stride) => {
            let got = *stride / 8;
            return Err(format!(
                "{dtype} is packed: its innermost stride must be {group}, is {got}"
            ));
        }
        None => {}
    }
    Ok(bits)
}
