//! Loaded tensors, in memory of their own.

use crate::error::Result;
use crate::format::{Dtype, Element, Manifest, TensorEntry, Value};
use crate::pipeline::report::LoadReport;
use crate::pool::Mapping;
use crate::store::read::index::NameIndex;
use crate::store::read::values::Values;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Tensors in memory of their own.
#[derive(Debug)]
pub struct Loaded {
    tensors: Vec<LoadedTensor>,
    /// Built at the first lookup of a name.
    by_name: OnceLock<NameIndex>,
    values: Arc<Values>,
    /// What the load did.
    pub report: LoadReport,
}

/// A loaded tensor: its manifest entry and its memory.
#[derive(Debug, Clone)]
pub struct LoadedTensor {
    /// The checkpoint's manifest, and the tensor's number in it.
    manifest: Arc<Manifest>,
    number: usize,
    /// The memory that holds it, shared by all tensors of a shard, or by all that were assembled from several
    /// chunks.
    pub arena: Arc<Mapping>,
    /// Its bytes in that memory.
    pub range: Range<usize>,
}

/// Where a tensor will be in memory.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct LoadPlace {
    /// Address of the first byte of the mapping that it will be in.
    pub address: usize,
    /// Its bytes in that mapping.
    pub range: Range<usize>,
}

/// A tensor's type, shape and bytes. Implements [`safetensors::View`].
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    entry: &'a TensorEntry,
    data: &'a [u8],
}

impl Loaded {
    pub(in crate::store) fn new(
        tensors: Vec<LoadedTensor>,
        values: Arc<Values>,
        report: LoadReport,
    ) -> Self {
        Self { tensors, by_name: OnceLock::new(), values, report }
    }

    /// The value of a name, such as the step. A name is the path joined by dots, where dictionaries and lists are
    /// nested: `optimizer.param_groups.0.lr`.
    ///
    /// # Errors
    /// [`Error::Keys`](crate::Error::Keys) if nothing in the checkpoint has that name;
    /// [`Error::Format`](crate::Error::Format) if its values cannot be read.
    pub fn value(&self, name: &str) -> Result<&Value> {
        self.values.value(name)
    }

    /// All values, and where among them the tensors belong.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) if they cannot be read.
    pub fn state(&self) -> Result<&Value> {
        self.values.tree()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        fn name_of(tensor: &LoadedTensor) -> &str {
            &tensor.entry().name
        }
        let by_name = self.by_name.get_or_init(|| NameIndex::new(self.tensors.iter().map(name_of)));
        by_name.find(name, |index| name_of(&self.tensors[index])).map(|i| self.tensors[i].view())
    }

    /// Names and tensors, in the order in which they were asked for.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|t| (t.entry().name.as_str(), t.view()))
    }

    /// The tensors one by one, for bindings.
    pub fn into_tensors(self) -> Vec<LoadedTensor> {
        self.tensors
    }
}

impl LoadedTensor {
    pub(in crate::store) fn new(
        (manifest, number): (&Arc<Manifest>, usize),
        (arena, range): (&Arc<Mapping>, Range<usize>),
    ) -> Self {
        assert_eq!(range.len() as u64, manifest.tensors[number].nbytes(), "a tensor has its bytes");
        assert!(range.end <= arena.as_slice().len(), "a tensor lies within its memory");
        Self { manifest: manifest.clone(), number, arena: arena.clone(), range }
    }

    /// Its manifest entry.
    pub fn entry(&self) -> &TensorEntry {
        &self.manifest.tensors[self.number]
    }

    fn view(&self) -> TensorView<'_> {
        TensorView { entry: self.entry(), data: &self.arena.as_slice()[self.range.clone()] }
    }
}

impl<'a> TensorView<'a> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Elements a dimension.
    pub fn shape(&self) -> &'a [u64] {
        &self.entry.shape
    }

    /// The bytes, dense and in row-major order, aligned to the dtype.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if `T` is not the tensor's type.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        T::of_bytes(self.data, self.entry.dtype, &self.entry.name)
    }
}

impl safetensors::View for TensorView<'_> {
    /// The type; U8 for a dtype that safetensors does not have.
    fn dtype(&self) -> safetensors::Dtype {
        self.entry.dtype.safetensors().unwrap_or(safetensors::Dtype::U8)
    }

    fn shape(&self) -> &[usize] {
        bytemuck::cast_slice(&self.entry.shape)
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.data.into()
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}
