//! Models that are built from checkpoints: candle's `VarBuilder` over one.

use crate::error::Result;
use crate::store::{Checkpoint, Loaded, OpenOptions};
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Error as CandleError, Result as CandleResult, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::path::Path;

/// A `VarBuilder` that reads each tensor from the checkpoint at `path` when the model asks for it. In place of
/// `VarBuilder::from_mmaped_safetensors`: each byte is checked, and nothing is mapped. It may also be a directory of other
/// programs' safetensors files; those have no checksums.
///
/// Tensors are converted to `dtype`, as by candle's own builders. A model that was saved as the part `model` is at
/// `var_builder(...)?.pp("model")`.
///
/// # Errors
/// As for [`OpenOptions::open`] with `foreign`.
pub fn var_builder(
    path: impl AsRef<Path>,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    let backend = CheckpointBackend(OpenOptions::new().foreign(true).open(path)?);
    Ok(VarBuilder::from_backend(Box::new(backend), dtype, device.clone()))
}

/// An open checkpoint as the back end of a `VarBuilder`, for `VarBuilder::from_backend`.
#[derive(Debug)]
pub struct CheckpointBackend(pub Checkpoint);

impl CheckpointBackend {
    fn shape(&self, name: &str) -> CandleResult<Vec<usize>> {
        let entry = self.0.tensor(name).ok_or_else(|| {
            let path = format!("{name} in {}", self.0.path().display());
            CandleError::CannotFindTensor { path }.bt()
        })?;
        Ok(entry.shape.iter().map(|&dim| dim as usize).collect())
    }
}

impl SimpleBackend for CheckpointBackend {
    /// Ignores the hints: a tensor that the checkpoint does not have is an error. Compares the shape before it reads.
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> CandleResult<Tensor> {
        let got = Shape::from(self.shape(name)?);
        if got != shape {
            let msg = format!("shape mismatch for {name} of {}", self.0.path().display());
            return Err(CandleError::UnexpectedShape { msg, expected: shape, got }.bt());
        }
        self.get_unchecked(name, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> CandleResult<Tensor> {
        let shape = self.shape(name)?;
        let loaded: Loaded = self.0.load([name]).map_err(CandleError::wrap)?;
        let view = loaded.tensor(name).expect("it was loaded");
        let Some(stored) = view.dtype().safetensors() else {
            return Err(CandleError::Msg(format!(
                "{name} is of {}, which candle does not have",
                view.dtype()
            ))
            .bt());
        };
        let view = safetensors::tensor::TensorView::new(stored, shape, view.data())
            .map_err(CandleError::wrap)?;
        view.load(device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.tensor(name).is_some()
    }
}
