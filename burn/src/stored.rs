//! A checkpoint's tensors as burn's.

use crate::kinds;
use burn_core::tensor::{Bytes, DType, Shape};
use burn_pack::{Error as PackError, Tensor};
use ringstow::{Checkpoint, Error, Loaded, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Where the bytes come from.
#[derive(Clone)]
pub enum Origin {
    /// They are in memory.
    Loaded(Arc<Loaded>),
    /// They are read, and checked, when burn asks for them. Keeps the first error: burn only keeps its text.
    Opened(Arc<Checkpoint>, Failed),
}

/// The first error of a read.
pub type Failed = Arc<Mutex<Option<Error>>>;

impl Origin {
    fn bytes(&self, name: &str) -> std::result::Result<Bytes, PackError> {
        let of = |loaded: &Loaded| {
            let view = loaded.tensor(name).expect("the checkpoint has it");
            Bytes::from_bytes_vec(view.data().to_vec())
        };
        match self {
            Self::Loaded(loaded) => Ok(of(loaded)),
            Self::Opened(checkpoint, failed) => {
                checkpoint.load([name]).map(|it| of(&it)).map_err(|error| {
                    let text = error.to_string();
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    PackError::IoError(text)
                })
            }
        }
    }
}

/// The tensors of a part: name in the checkpoint, type, shape.
pub type Listed = Vec<(String, ringstow::Dtype, Vec<u64>)>;

/// The tensors of a part, which read their bytes when burn asks for them.
///
/// # Errors
/// [`Error::Unsupported`] for a type that burn does not have.
pub fn tensors(part: &str, listed: Listed, origin: &Origin) -> Result<Vec<Tensor>> {
    let in_part = listed.into_iter().filter_map(|(full, dtype, shape)| {
        let name = match part {
            "" => full.as_str(),
            _ => full.strip_prefix(part)?.strip_prefix('.')?,
        };
        Some((name.to_owned(), full, dtype, shape))
    });
    in_part
        .map(|(name, full, dtype, shape)| {
            let dtype: DType = kinds::loaded(&full, dtype)?;
            let shape: Vec<usize> = shape.iter().map(|&dim| dim as usize).collect();
            let byte_len = shape.iter().product::<usize>() * dtype.size();
            let origin = origin.clone();
            let bytes = move || origin.bytes(&full);
            Ok(Tensor::deferred(name, dtype, Shape::from(shape), None, byte_len, bytes))
        })
        .collect()
}

/// The tensors of a part of a loaded checkpoint.
///
/// # Errors
/// As for [`tensors`].
pub fn of_loaded(part: &str, loaded: &Arc<Loaded>) -> Result<Vec<Tensor>> {
    let listed =
        loaded.tensors().map(|(name, view)| (name.into(), view.dtype(), view.shape().into()));
    let listed = listed.collect();
    tensors(part, listed, &Origin::Loaded(loaded.clone()))
}
