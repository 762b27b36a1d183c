//! A checkpoint's values, parsed at the first use.

use crate::error::{Error, Result};
use crate::format::{Manifest, Value, names};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The tree of values, and where it comes from.
#[derive(Debug)]
pub(in crate::store) struct Values {
    path: PathBuf,
    manifest: Arc<Manifest>,
    parsed: OnceLock<Value>,
}

impl Values {
    pub fn new(path: &Path, manifest: &Arc<Manifest>) -> Self {
        Self { path: path.into(), manifest: manifest.clone(), parsed: OnceLock::new() }
    }

    /// The whole tree.
    ///
    /// # Errors
    /// [`Error::Format`] if it cannot be read.
    pub fn tree(&self) -> Result<&Value> {
        if let Some(parsed) = self.parsed.get() {
            return Ok(parsed);
        }
        let parsed = Value::from_json(&self.manifest.state)
            .map_err(|e| Error::format(self.path.join(names::MANIFEST), e.to_string()))?;
        Ok(self.parsed.get_or_init(|| parsed))
    }

    /// The value of a name.
    ///
    /// # Errors
    /// [`Error::Keys`] if nothing has it; as for [`Values::tree`].
    pub fn value(&self, name: &str) -> Result<&Value> {
        self.tree()?.find(name).ok_or_else(|| Error::Keys {
            path: self.path.clone(),
            missing: vec![name.to_owned()],
            unexpected: Vec::new(),
            mismatched: Vec::new(),
        })
    }
}
