//! Loaded tensors, in memory of their own.

use super::index::Index;
use crate::error::{Error, Result};
use crate::format::{Dtype, Manifest, TensorEntry};
use crate::pipeline::report::LoadReport;
use crate::pool::Mapping;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Tensors in memory of their own.
#[derive(Debug)]
pub struct Loaded {
    tensors: Vec<LoadedTensor>,
    /// Made when a tensor is first asked for by its name.
    by_name: OnceLock<Index>,
    /// What the load did.
    pub report: LoadReport,
}

/// One of them: what it is, and where.
#[derive(Debug, Clone)]
pub struct LoadedTensor {
    /// The manifest of its checkpoint, and its number there: what it is.
    manifest: Arc<Manifest>,
    number: usize,
    /// The memory in which it lies, one for all tensors of a shard, or for all that were put
    /// together from several chunks.
    pub arena: Arc<Mapping>,
    /// Where in that memory.
    pub range: Range<usize>,
}

/// A tensor's type, shape and bytes. Implements [`safetensors::View`].
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    entry: &'a TensorEntry,
    data: &'a [u8],
}

impl Loaded {
    pub(super) fn new(tensors: Vec<LoadedTensor>, report: LoadReport) -> Self {
        Self { tensors, by_name: OnceLock::new(), report }
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        fn name_of(tensor: &LoadedTensor) -> &str {
            &tensor.entry().name
        }
        let by_name = self.by_name.get_or_init(|| Index::new(self.tensors.iter().map(name_of)));
        by_name.find(name, |index| name_of(&self.tensors[index])).map(|i| self.tensors[i].view())
    }

    /// Names and tensors, in the order in which they were asked for.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|t| (t.entry().name.as_str(), t.view()))
    }

    /// Takes the tensors apart, for bindings that hand each out by itself.
    pub fn into_tensors(self) -> Vec<LoadedTensor> {
        self.tensors
    }
}

impl LoadedTensor {
    pub(super) fn new(
        (manifest, number): (&Arc<Manifest>, usize),
        (arena, range): (&Arc<Mapping>, Range<usize>),
    ) -> Self {
        Self { manifest: manifest.clone(), number, arena: arena.clone(), range }
    }

    /// What it is.
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
    /// [`Error::Invalid`] if `T` is not the tensor's type.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        let wrong = || {
            Error::invalid(format!(
                "tensor {:?} is of {}, not of {}",
                self.entry.name,
                self.entry.dtype,
                T::DTYPE
            ))
        };
        if self.entry.dtype != T::DTYPE {
            return Err(wrong());
        }
        bytemuck::try_cast_slice(self.data).map_err(|_| wrong())
    }
}

impl safetensors::View for TensorView<'_> {
    /// The type; U8 for a dtype of which safetensors knows nothing.
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

/// A Rust type that is some [`Dtype`]'s element.
pub trait Element: bytemuck::AnyBitPattern {
    /// That type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}

elements! {
    u8 => U8, u16 => U16, u32 => U32, u64 => U64, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64,
}
