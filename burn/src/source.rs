//! Hands burn's tensors over to a save.

use crate::kinds;
use burn_core::tensor::{BoolStore, Bytes, DType};
use burn_pack::Tensor;
use burn_store::bridge;
use ringstow::{Error, Result, Source, StateDict, TensorInfo};
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor whose bytes burn makes when the save reaches it. They are freed once the save has copied them: the extra memory is
/// that of the tensors being copied at the time.
struct TensorBytes {
    tensor: Tensor,
    /// The bytes while they are needed, and how many of them were read.
    made: Mutex<(Option<Arc<Bytes>>, usize)>,
}

impl TensorBytes {
    /// All bytes, of which the caller reads `count`.
    fn bytes(&self, count: usize) -> Result<Arc<Bytes>> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match made.0.take() {
            Some(bytes) => bytes,
            None => Arc::new(self.tensor.to_bytes().map_err(|error| {
                Error::invalid(format!("tensor {:?} cannot be read: {error}", self.tensor.name))
            })?),
        };
        made.1 += count;
        if made.1 >= self.tensor.byte_len() {
            made.1 = 0;
        } else {
            made.0 = Some(bytes.clone());
        }
        Ok(bytes)
    }
}

impl Source for TensorBytes {
    fn nbytes(&self) -> u64 {
        self.tensor.byte_len() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let bytes = self.bytes(to.len())?;
        let from = bytes.get(offset..offset + to.len()).ok_or_else(|| {
            let (name, has) = (&self.tensor.name, bytes.len());
            Error::invalid(format!("tensor {name:?} has {has} bytes, not {}", self.nbytes()))
        })?;
        to.copy_from_slice(from);
        Ok(())
    }
}

/// Adds tensors under the name of their part.
///
/// # Errors
/// [`Error::Unsupported`] for quantized tensors.
pub fn add(state: &mut StateDict<'static>, part: &str, tensors: Vec<Tensor>) -> Result<()> {
    for tensor in tensors {
        let dtype = kinds::stored(&tensor.name, tensor.dtype)?;
        let shape = tensor.shape.iter().map(|&dim| dim as u64).collect();
        let info = TensorInfo { name: below(part, &tensor.name), dtype, shape };
        let tensor = plain(tensor);
        state.source(info, Box::new(TensorBytes { tensor, made: Mutex::default() }));
    }
    Ok(())
}

/// A name in a part; the part without a name is the whole checkpoint.
pub fn below(part: &str, name: &str) -> String {
    if part.is_empty() { name.into() } else { format!("{part}.{name}") }
}

/// The tensor with Booleans of a byte each.
fn plain(tensor: Tensor) -> Tensor {
    const PLAIN: DType = DType::Bool(BoolStore::Native);
    match tensor.dtype {
        DType::Bool(stored) if stored != BoolStore::Native => {
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            bridge::map_data(tensor, name, PLAIN, shape, |data| data.convert_dtype(PLAIN))
        }
        _ => tensor,
    }
}
