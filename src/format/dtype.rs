//! Element types: those of safetensors, and two complex ones that it lacks.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $bits:literal, $stored:expr;)*) => {
        /// Type of a tensor's elements. Names are those of the safetensors format.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[allow(non_camel_case_types)]
        #[non_exhaustive]
        pub enum Dtype { $($(#[$doc])* $name,)* }

        impl Dtype {
            /// All types.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$name,)*];

            /// Bits of one element.
            pub fn bits(self) -> u64 {
                match self { $(Dtype::$name => $bits,)* }
            }

            /// Name in manifests, headers and messages.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$name => stringify!($name),)* }
            }

            /// The same type in the safetensors format; `None` if that lacks it.
            pub fn safetensors(self) -> Option<safetensors::Dtype> {
                match self { $(Dtype::$name => $stored,)* }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    BOOL = 8, Some(safetensors::Dtype::BOOL);
    /// Unsigned, 8 bits.
    U8 = 8, Some(safetensors::Dtype::U8);
    /// Unsigned, 16 bits.
    U16 = 16, Some(safetensors::Dtype::U16);
    /// Unsigned, 32 bits.
    U32 = 32, Some(safetensors::Dtype::U32);
    /// Unsigned, 64 bits.
    U64 = 64, Some(safetensors::Dtype::U64);
    /// Signed, 8 bits.
    I8 = 8, Some(safetensors::Dtype::I8);
    /// Signed, 16 bits.
    I16 = 16, Some(safetensors::Dtype::I16);
    /// Signed, 32 bits.
    I32 = 32, Some(safetensors::Dtype::I32);
    /// Signed, 64 bits.
    I64 = 64, Some(safetensors::Dtype::I64);
    /// IEEE half precision.
    F16 = 16, Some(safetensors::Dtype::F16);
    /// bfloat16.
    BF16 = 16, Some(safetensors::Dtype::BF16);
    /// IEEE single precision.
    F32 = 32, Some(safetensors::Dtype::F32);
    /// IEEE double precision.
    F64 = 64, Some(safetensors::Dtype::F64);
    /// MX float4 e2m1, two to a byte.
    F4 = 4, Some(safetensors::Dtype::F4);
    /// MX float6 e2m3, packed.
    F6_E2M3 = 6, Some(safetensors::Dtype::F6_E2M3);
    /// MX float6 e3m2, packed.
    F6_E3M2 = 6, Some(safetensors::Dtype::F6_E3M2);
    /// float8 e5m2.
    F8_E5M2 = 8, Some(safetensors::Dtype::F8_E5M2);
    /// float8 e4m3 ("fn").
    F8_E4M3 = 8, Some(safetensors::Dtype::F8_E4M3);
    /// float8 e8m0, a scale.
    F8_E8M0 = 8, Some(safetensors::Dtype::F8_E8M0);
    /// float8 e4m3 ("fnuz").
    F8_E4M3FNUZ = 8, Some(safetensors::Dtype::F8_E4M3FNUZ);
    /// float8 e5m2 ("fnuz").
    F8_E5M2FNUZ = 8, Some(safetensors::Dtype::F8_E5M2FNUZ);
    /// Complex of two F16. Stored in its shard as U8, under a reserved name.
    C32 = 32, None;
    /// Complex of two F32.
    C64 = 64, Some(safetensors::Dtype::C64);
    /// Complex of two F64. Lies in its shard as U8, under a reserved name.
    C128 = 128, None;
}

impl Dtype {
    /// The type with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// The counterpart of a safetensors type; `None` for one that this version does not know.
    pub fn from_safetensors(dtype: safetensors::Dtype) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| known.safetensors() == Some(dtype))
    }

    /// Bytes of a dense tensor of this shape; `None` if that overflows 2^63 or, for types of less
    /// than a byte, is not a whole number.
    pub fn nbytes(self, shape: &[u64]) -> Option<u64> {
        if shape.contains(&0) {
            return Some(0);
        }
        let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8).filter(|&bytes| bytes < 1 << 63)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_agree_with_safetensors() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            if let Some(theirs) = dtype.safetensors() {
                assert_eq!(theirs.bitsize() as u64, dtype.bits());
                assert_eq!(theirs.to_string(), dtype.name());
                assert_eq!(Dtype::from_safetensors(theirs), Some(dtype));
            }
        }
    }

    #[test]
    fn sizes_that_overflow_or_split_a_byte_are_none() {
        assert_eq!(Dtype::F32.nbytes(&[1 << 32, 1 << 32]), None);
        assert_eq!(Dtype::F32.nbytes(&[1 << 32, 1 << 32, 0]), Some(0));
        assert_eq!(Dtype::F4.nbytes(&[3]), None);
        assert_eq!(Dtype::F4.nbytes(&[4]), Some(2));
        assert_eq!(Dtype::C128.nbytes(&[]), Some(16));
    }
}
