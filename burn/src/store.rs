//! burn's `ModuleStore` over a ringstow checkpoint.

use crate::stored::{self, Failed, Origin};
use crate::{modules, source};
use burn_pack::Tensor;
use burn_store::{
    ApplyResult, IdentityAdapter, KeyRemapper, ModuleAdapter, ModuleSnapshot, ModuleStore,
    PathFilter, map_indices_contiguous_except,
};
use ringstow::{Error, OpenOptions, Result, SaveHandle, StateDict};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

/// A module's weights in the checkpoint at a path: `module.save_into(&mut store)`, `module.load_from(&mut store)`. Has the
/// options of burn's `SafetensorsStore`, with the same names and meanings.
///
/// A save is durable when it returns, and replaces an earlier checkpoint as a whole, or not at all. A load also takes a directory
/// of other programs' safetensors files; those have no checksums.
pub struct RingstowStore {
    path: PathBuf,
    config: ringstow::Store,
    part: String,
    filter: PathFilter,
    remapper: KeyRemapper,
    from_adapter: Box<dyn ModuleAdapter>,
    to_adapter: Box<dyn ModuleAdapter>,
    validate: bool,
    allow_partial: bool,
    overwrite: bool,
    skip_enum_variants: bool,
    map_indices_contiguous: bool,
    keep_indices: PathFilter,
    cache: Option<Listed>,
}

/// What a checkpoint has, under burn's names.
struct Listed {
    tensors: BTreeMap<String, Tensor>,
    failed: Failed,
}

impl RingstowStore {
    /// A store of the checkpoint at `path`, with the configuration that is [found](ringstow::Config::found).
    ///
    /// # Errors
    /// As for [`ringstow::Store::found`].
    pub fn new(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::with(ringstow::Store::found()?, path))
    }

    /// A store of the checkpoint at `path`, with this configuration.
    pub fn with(config: ringstow::Store, path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().into(),
            config,
            part: String::new(),
            filter: PathFilter::new(),
            remapper: KeyRemapper::new(),
            from_adapter: Box::new(IdentityAdapter),
            to_adapter: Box::new(IdentityAdapter),
            validate: true,
            allow_partial: false,
            overwrite: true,
            skip_enum_variants: false,
            map_indices_contiguous: false,
            keep_indices: PathFilter::new(),
            cache: None,
        }
    }

    /// Saves or loads the module as this part of a checkpoint. `model` is that of [`state`](crate::state).
    pub fn part(mut self, name: impl Into<String>) -> Self {
        (self.part, self.cache) = (name.into(), None);
        self
    }

    /// Saves or loads only tensors that the filter matches.
    pub fn filter(mut self, filter: PathFilter) -> Self {
        self.filter = filter;
        self
    }

    /// Adds a regular expression to the filter.
    ///
    /// # Panics
    /// If it is not a regular expression.
    pub fn with_regex(mut self, pattern: impl AsRef<str>) -> Self {
        self.filter = self.filter.with_regex(pattern);
        self
    }

    /// Adds the name of a tensor to the filter.
    pub fn with_full_path(mut self, path: impl Into<String>) -> Self {
        self.filter = self.filter.with_full_path(path);
        self
    }

    /// Renames tensors: on a save the module's, on a load the checkpoint's.
    pub fn remap(mut self, remapper: KeyRemapper) -> Self {
        (self.remapper, self.cache) = (remapper, None);
        self
    }

    /// Adds a regular expression, and what it is replaced with, to the renamings.
    ///
    /// # Panics
    /// If it is not a regular expression.
    pub fn with_key_remapping(self, from: impl AsRef<str>, to: impl Into<String>) -> Self {
        let remapper = self.remapper.clone().add_pattern(from, to);
        self.remap(remapper.expect("a regular expression"))
    }

    /// Sets what changes tensors on a load.
    pub fn with_from_adapter(mut self, adapter: impl ModuleAdapter + 'static) -> Self {
        self.from_adapter = Box::new(adapter);
        self
    }

    /// Sets what changes tensors on a save.
    pub fn with_to_adapter(mut self, adapter: impl ModuleAdapter + 'static) -> Self {
        self.to_adapter = Box::new(adapter);
        self
    }

    /// Whether a tensor of another shape or kind fails a load. Default true; with false, [`ApplyResult`] lists them.
    pub fn validate(mut self, validate: bool) -> Self {
        self.validate = validate;
        self
    }

    /// Whether a load may leave tensors of the module as they are. Default false.
    pub fn allow_partial(mut self, allow: bool) -> Self {
        self.allow_partial = allow;
        self
    }

    /// Whether a save replaces an earlier checkpoint. Default true, unlike burn's: the earlier one stays until the commit.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Leaves names of enum variants out of tensors' names.
    pub fn skip_enum_variants(mut self, skip: bool) -> Self {
        self.skip_enum_variants = skip;
        self
    }

    /// Renumbers lists with gaps on a load.
    pub fn map_indices_contiguous(mut self, map: bool) -> Self {
        (self.map_indices_contiguous, self.cache) = (map, None);
        self
    }

    /// Leaves the numbers below prefixes that a regular expression matches.
    ///
    /// # Panics
    /// If it is not a regular expression.
    pub fn map_indices_contiguous_except(mut self, pattern: impl AsRef<str>) -> Self {
        (self.keep_indices, self.cache) = (self.keep_indices.with_regex(pattern), None);
        self
    }

    /// The module's tensors as they are now, to be saved with other parts or values.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for quantized tensors.
    pub fn state<M: ModuleSnapshot>(&self, module: &M) -> Result<StateDict<'static>> {
        let adapter = Some(self.to_adapter.clone());
        let mut tensors = modules::collect(module, adapter, self.skip_enum_variants);
        if !self.filter.is_empty() {
            tensors.retain(|tensor| self.filter.matches(&tensor.name));
        }
        if !self.remapper.is_empty() {
            tensors = self.remapper.remap(tensors).0;
        }
        let mut state = StateDict::new();
        source::add(&mut state, &self.part, tensors)?;
        if !self.overwrite {
            state.only_new();
        }
        Ok(state)
    }

    /// `module.save_into` in the background: saves the values of the call. Steps may go on.
    ///
    /// # Errors
    /// As for [`RingstowStore::state`] and [`ringstow::save_async`].
    pub fn save_async<M: ModuleSnapshot>(&mut self, module: &M) -> Result<SaveHandle> {
        self.cache = None;
        self.config.save_async(self.state(module)?, &self.path)
    }

    fn listed(&mut self) -> Result<&Listed> {
        if self.cache.is_none() {
            self.cache = Some(self.list()?);
        }
        Ok(self.cache.as_ref().expect("it was just made"))
    }

    /// Opens the checkpoint. Reads no tensor.
    fn list(&self) -> Result<Listed> {
        let checkpoint =
            Arc::new(OpenOptions::of(self.config.config()).foreign(true).open(&self.path)?);
        let failed = Failed::default();
        let origin = Origin::Opened(checkpoint.clone(), failed.clone());
        let all = checkpoint.tensors().iter();
        let all = all.map(|it| (it.name.clone(), it.dtype, it.shape.to_vec())).collect();
        let mut tensors = stored::tensors(&self.part, all, &origin)?;
        if !self.remapper.is_empty() {
            tensors = self.remapper.remap(tensors).0;
        }
        if self.map_indices_contiguous {
            tensors = map_indices_contiguous_except(tensors, |list| self.keeps(list)).0;
        }
        let tensors = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        Ok(Listed { tensors, failed })
    }

    /// Whether the numbers below a prefix stay.
    fn keeps(&self, list: &str) -> bool {
        !self.keep_indices.is_empty() && self.keep_indices.matches(list) // an empty filter matches all
    }

    /// Whether burn's report of a load is that of a load that failed.
    fn judge(&self, result: &ApplyResult, failed: &Failed) -> Result<()> {
        if let Some(error) = failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error); // of a read
        }
        let missing: Vec<String> = match self.allow_partial {
            true => Vec::new(),
            false => result.missing.iter().map(|(name, _)| name.clone()).collect(),
        };
        let mismatched: Vec<String> = match self.validate {
            true => result.errors.iter().map(ToString::to_string).collect(),
            false => Vec::new(),
        };
        if missing.is_empty() && mismatched.is_empty() {
            return Ok(());
        }
        let (path, unexpected) = (self.path.clone(), result.unused.clone());
        Err(Error::Keys { path, missing, unexpected, mismatched })
    }
}

impl ModuleStore for RingstowStore {
    type Error = Error;

    fn collect_from<M: ModuleSnapshot>(&mut self, module: &M) -> Result<()> {
        self.cache = None;
        self.config.save(&self.state(module)?, &self.path).map(drop)
    }

    /// Reads the tensors that the module takes. If the load fails, the module has not changed.
    fn apply_to<M: ModuleSnapshot>(&mut self, module: &mut M) -> Result<ApplyResult> {
        self.cache = None; // another process may have saved since
        let listed = self.listed()?;
        let (tensors, failed) =
            (listed.tensors.values().cloned().collect::<Vec<_>>(), listed.failed.clone());
        let filter = (!self.filter.is_empty()).then(|| self.filter.clone());
        let adapter = Some(self.from_adapter.clone());
        modules::change(module, |changed| {
            let result = changed.apply(tensors, filter, adapter, self.skip_enum_variants);
            self.judge(&result, &failed)?;
            Ok(result)
        })
    }

    fn get_tensor(&mut self, name: &str) -> Result<Option<&Tensor>> {
        Ok(self.listed()?.tensors.get(name))
    }

    fn get_all_tensors(&mut self) -> Result<&BTreeMap<String, Tensor>> {
        Ok(&self.listed()?.tensors)
    }

    fn keys(&mut self) -> Result<Vec<String>> {
        Ok(self.listed()?.tensors.keys().cloned().collect())
    }
}

impl std::fmt::Debug for RingstowStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingstowStore")
            .field("path", &self.path)
            .field("part", &self.part)
            .finish_non_exhaustive()
    }
}
