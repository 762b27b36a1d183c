//! Rust types of tensor elements.

use super::Dtype;
use crate::error::{Error, Result};

/// A Rust type of a tensor's elements.
pub trait Element: bytemuck::Pod {
    /// The corresponding [`Dtype`].
    const DTYPE: Dtype;

    /// Casts the bytes of the tensor `name` to its elements.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor is of another type.
    fn of_bytes<'a>(bytes: &'a [u8], dtype: Dtype, name: &str) -> Result<&'a [Self]> {
        let wrong =
            || Error::invalid(format!("tensor {name:?} is of {dtype}, not of {}", Self::DTYPE));
        if dtype != Self::DTYPE {
            return Err(wrong());
        }
        bytemuck::try_cast_slice(bytes).map_err(|_| wrong())
    }
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
