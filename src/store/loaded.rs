//! Loaded tensors, in memory of their own.

use crate::error::{Error, Result};
use crate::format::{Dtype, TensorEntry};
use crate::pipeline::report::LoadReport;
use crate::pool::Mapping;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Tensors in memory of their own.
#[derive(Debug)]
pub struct Loaded {
    tensors: Vec<LoadedTensor>,
    by_name: HashMap<String, usize>,
    /// What the load did.
    pub report: LoadReport,
}

/// One of them: what it is, and where.
#[derive(Debug, Clone)]
pub struct LoadedTensor {
    /// What it is.
    pub entry: TensorEntry,
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
        let names = tensors.iter().enumerate().map(|(i, t)| (t.entry.name.clone(), i));
        Self { by_name: names.collect(), tensors, report }
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.by_name.get(name).map(|&index| self.tensors[index].view())
    }

    /// Names and tensors, in the order in which they were asked for.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|t| (t.entry.name.as_str(), t.view()))
    }

    /// Takes the tensors apart, for bindings that hand each out by itself.
    pub fn into_tensors(self) -> Vec<LoadedTensor> {
        self.tensors
    }
}

impl LoadedTensor {
    fn view(&self) -> TensorView<'_> {
        TensorView { entry: &self.entry, data: &self.arena.as_slice()[self.range.clone()] }
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
