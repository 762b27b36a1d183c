//! In place of `gpu` in a build without CUDA.

use crate::config::Config;
use crate::device::Target;
use crate::error::{Error, Result};
use crate::state::StateDict;
use serde::Serialize;
use std::path::Path;

/// What a GPU's copies reach: nothing.
#[derive(Debug, Serialize)]
pub(super) enum GpuFigures {}

/// Tensors in a GPU's memory: none.
pub(super) enum GpuTensors {}

impl GpuTensors {
    pub fn on(_: u32) -> Result<Self> {
        Err(Error::Unsupported {
            what: "tensors on GPUs are not part of this build".into(),
            remedy: "build with the cargo feature `cuda`, or leave --gpu out".into(),
        })
    }

    pub fn fill(&mut self, _: &[u8]) -> Result<()> {
        match *self {}
    }

    pub fn state(&self, _: usize) -> Result<StateDict<'static>> {
        match *self {}
    }

    pub fn targets(&mut self) -> Result<Vec<(String, Target<'_>)>> {
        match *self {}
    }

    pub fn figures(&self, _: &Config, _: &Path, _: u16) -> Result<GpuFigures> {
        match *self {}
    }
}
