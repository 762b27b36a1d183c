//! burn's types of elements, and the format's.

use burn_core::tensor::{BoolStore, DType};
use ringstow::{Dtype, Error, Result};

/// The type in a checkpoint. All ways of storing a Boolean become one.
///
/// # Errors
/// [`Error::Unsupported`] for quantized tensors.
pub fn stored(name: &str, dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
        DType::QFloat(_) => {
            return Err(Error::Unsupported {
                what: format!("tensor {name:?} is quantized ({dtype:?})"),
                remedy: "save the module before it is quantized, and quantize it after the load"
                    .into(),
            });
        }
    })
}

/// burn's type of a checkpoint's tensor.
///
/// # Errors
/// [`Error::Unsupported`] for a type that burn does not have.
pub fn loaded(name: &str, dtype: Dtype) -> Result<DType> {
    Ok(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => {
            return Err(Error::Unsupported {
                what: format!("tensor {name:?} is of {dtype}, which burn does not have"),
                remedy: "load it by `ringstow::load`, and convert it".into(),
            });
        }
    })
}
