//! What a Rust trainer saves: named tensors, and other values.

mod base;

pub use base::Base;

use crate::device::TensorSource;
#[cfg(feature = "cuda")]
use crate::device::cuda::CudaSource;
use crate::device::host::{OwnedElements, ViewSource};
use crate::error::{Error, Result};
use crate::format::part::Part;
use crate::format::select::is_below;
use crate::format::value::{Leaf, Named};
use crate::format::{Dtype, Element, Item, Metrics, Region, TensorInfo, Value, metrics};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state to save. Tensors are borrowed or owned; only the save copies them.
#[derive(Default)]
pub struct StateDict<'a> {
    items: Vec<Item>,
    sources: Vec<TensorSource<'a>>,
    values: Vec<(String, Value)>,
    step: Option<u64>,
    metrics: Metrics,
    apart: Vec<String>,
    base: Option<Base>,
    only_new: bool,
    tree: Option<Box<RawValue>>,
    check: Option<Box<Check<'a>>>,
    locks: Vec<Box<Lock<'a>>>,
    held: Held,
}

/// What [`StateDict::check_staged`] calls.
pub(crate) type Check<'a> = dyn Fn() -> Result<()> + Send + Sync + 'a;

/// What [`StateDict::lock_while_read`] calls.
type Lock<'a> = dyn Fn() -> Result<Box<dyn Send>> + Send + Sync + 'a;

/// The locks that a save holds; `None` if no save has begun.
#[derive(Default)]
pub(crate) struct Held(Mutex<Option<Vec<Box<dyn Send>>>>);

impl Held {
    fn inner(&self) -> MutexGuard<'_, Option<Vec<Box<dyn Send>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unlocks the tensors: every byte is copied, or the save has failed. Does nothing in a second call.
    pub fn unlock(&self) {
        let locks = self.inner().as_mut().map(std::mem::take);
        drop(locks);
    }
}

impl<'a> StateDict<'a> {
    /// An empty state, which can be saved like any other.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor of any library whose tensors implement [`safetensors::View`]: candle's,
    /// burn's, a wrapper over an array.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a dtype that this version does not know.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        view: impl safetensors::View + Send + Sync + 'a,
    ) -> Result<&mut Self> {
        let name = name.into();
        let Some(dtype) = Dtype::from_safetensors(view.dtype()) else {
            return Err(Error::Unsupported {
                what: format!("tensor {name:?} is of {}, which is not known here", view.dtype()),
                remedy: "upgrade ringstow, or save it as bytes (U8)".into(),
            });
        };
        let shape = view.shape().iter().map(|&dim| dim as u64).collect();
        Ok(self.source(TensorInfo { name, dtype, shape }, Box::new(ViewSource::new(view))))
    }

    /// Adds a tensor as its bytes: dense, in row-major order, little-endian.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more or fewer bytes than dtype and shape say.
    pub fn bytes(
        &mut self,
        name: impl Into<String>,
        dtype: Dtype,
        shape: &[u64],
        data: &'a [u8],
    ) -> Result<&mut Self> {
        let info = TensorInfo { name: name.into(), dtype, shape: shape.to_vec() };
        info.check_bytes(data.len() as u64)?;
        Ok(self.source(info, Box::new(data)))
    }

    /// Adds a tensor as its elements: dense, in row-major order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more or fewer elements than the shape says.
    pub fn slice<T: Element>(
        &mut self,
        name: impl Into<String>,
        shape: &[u64],
        data: &'a [T],
    ) -> Result<&mut Self> {
        self.bytes(name, T::DTYPE, shape, bytemuck::cast_slice(data))
    }

    /// Adds a tensor as elements that the state owns or shares: a `Vec`, an `Arc<Vec>`, an `Arc<[T]>`.
    /// [`save_async`](crate::save_async()) needs such a state, and has an example.
    ///
    /// # Errors
    /// As for [`StateDict::slice`].
    pub fn shared<T: Element>(
        &mut self,
        name: impl Into<String>,
        shape: &[u64],
        data: impl Deref<Target: AsRef<[T]>> + Send + Sync + 'a,
    ) -> Result<&mut Self> {
        let info = TensorInfo { name: name.into(), dtype: T::DTYPE, shape: shape.to_vec() };
        let data = OwnedElements::new(data);
        info.check_bytes(data.bytes().len() as u64)?;
        Ok(self.source(info, Box::new(data)))
    }

    /// Adds a tensor in a GPU's memory: a slice of cudarc's, borrowed or shared (`&CudaSlice`,
    /// `Arc<CudaSlice>`). The save waits for the work that is queued on its stream now, then copies it.
    ///
    /// ```no_run
    /// use cudarc::driver::CudaContext;
    /// use ringstow::{Dtype, StateDict};
    /// use std::sync::Arc;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let weight = Arc::new(stream.alloc_zeros::<f32>(1024)?);
    /// let mut state = StateDict::new();
    /// state.cuda("layer.weight", Dtype::F32, &[32, 32], weight.clone())?;
    /// let saving = ringstow::save_async(state, "run/step-1000")?;
    /// saving.wait_staged(None); // from now on the stream may have work that changes the weight
    /// saving.result()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the slice has more or fewer bytes than dtype and shape say; as for
    /// [`CudaSource::of_slice`].
    #[cfg(feature = "cuda")]
    pub fn cuda<T: 'a>(
        &mut self,
        name: impl Into<String>,
        dtype: Dtype,
        shape: &[u64],
        slice: impl std::ops::Deref<Target = cudarc::driver::CudaSlice<T>> + Send + Sync + 'a,
    ) -> Result<&mut Self> {
        let info = TensorInfo { name: name.into(), dtype, shape: shape.to_vec() };
        info.check_bytes(slice.num_bytes() as u64)?;
        Ok(self.source(info, CudaSource::of_slice(slice)?))
    }

    /// Adds a tensor whose bytes come from a boxed [`Source`](crate::device::Source) or a
    /// [`CudaSource`](crate::device::cuda::CudaSource).
    pub fn source(&mut self, info: TensorInfo, source: impl Into<TensorSource<'a>>) -> &mut Self {
        self.item(info.into(), source)
    }

    /// Adds a region of a tensor. Other ranks, or other regions here, hold the rest.
    ///
    /// `info` has the tensor's name and the region's own shape; `region` is its place in the tensor.
    pub fn region(
        &mut self,
        info: TensorInfo,
        region: Region,
        source: impl Into<TensorSource<'a>>,
    ) -> &mut Self {
        self.item(Item { info, region: Some(region), object: false }, source)
    }

    /// Adds an item of any kind.
    pub fn item(&mut self, item: Item, source: impl Into<TensorSource<'a>>) -> &mut Self {
        self.items.push(item);
        self.sources.push(source.into());
        self
    }

    /// Adds a value that is not a tensor: a step, a learning rate, a list of them.
    pub fn value(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.values.push((name.into(), value.into()));
        self
    }

    /// Saves this state as a step of training. The manifest notes the number, and [`latest`](crate::latest),
    /// [`steps`](crate::steps) and [`retain`](crate::retain()) use it instead of the checkpoint's name. Give a step
    /// only to the run's checkpoints: `retain` removes an old one even if its name is `best`.
    pub fn step(&mut self, step: u64) -> &mut Self {
        self.step = Some(step);
        self
    }

    /// Notes metrics of the step, such as `[("loss", 0.25)]`, in the manifest: [`steps`](crate::steps) reports them, and
    /// [`RetainOptions::best`](crate::RetainOptions) compares them. NaN and infinities come back, too. A name that was
    /// given before gets the new number.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than 256 metrics, an empty name, or one of more than 256 bytes.
    pub fn metrics<K: Into<String>>(
        &mut self,
        metrics: impl IntoIterator<Item = (K, f64)>,
    ) -> Result<&mut Self> {
        self.metrics = metrics::with(self.metrics.clone(), metrics)?;
        Ok(self)
    }

    /// Writes the tensors of this name and below it (`optimizer` and `optimizer.state.0`) into files of their own, so that
    /// [`Store::slim`](crate::Store::slim) can free them later. A save of a state that has nothing of the name fails.
    pub fn droppable(&mut self, name: impl Into<String>) -> &mut Self {
        let name = name.into();
        if !self.apart.contains(&name) {
            self.apart.push(name);
        }
        self
    }

    /// Takes over files of an earlier checkpoint whose tensors have not changed, by hard links, and stores a hash of each
    /// tensor, so that a later save can do the same with this one. Each checkpoint stays whole by itself.
    ///
    /// A save reads every tensor that the base has, and writes those that differ. Files that cannot be linked are written;
    /// [`Moved::fallbacks`](crate::Moved) says why, and [`SaveReport::linked_bytes`](crate::SaveReport) how many bytes were.
    /// The save fails if the base cannot be opened, unless it is [optional](Base::or_none).
    ///
    /// ```
    /// # fn main() -> ringstow::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let root = dir.path();
    /// use ringstow::{Base, StateDict};
    ///
    /// let frozen = vec![7u8; 100_000];
    /// let mut base = Base::none();
    /// for step in 0..3 {
    ///     let trained = vec![step; 100];
    ///     let mut state = StateDict::new();
    ///     state.slice("frozen", &[100_000], &frozen)?.slice("trained", &[100], &trained)?;
    ///     let path = root.join(format!("step-{step}"));
    ///     let report = ringstow::save(state.base(base), &path)?;
    ///     // The second save moves what has not changed to files of its own, which the third links.
    ///     assert_eq!(report.linked_bytes > 100_000, step == 2);
    ///     base = Base::at(path);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn base(&mut self, base: Base) -> &mut Self {
        self.base = Some(base);
        self
    }

    /// Makes the save fail instead of replacing a checkpoint, also one that another process commits meanwhile. The
    /// error is an [`Error::Io`] of [`AlreadyExists`](std::io::ErrorKind::AlreadyExists).
    pub fn only_new(&mut self) -> &mut Self {
        self.only_new = true;
        self
    }

    /// Replaces the tree of values with the caller's, in the format's JSON. It must refer to the tensors itself.
    pub fn set_tree(&mut self, tree: Box<RawValue>) -> &mut Self {
        self.tree = Some(tree);
        self
    }

    /// Sets a check for tensors that may change meanwhile, if such a change can be detected afterwards. A thread of
    /// the save calls it once every byte is copied, before the save counts as staged. If it returns an error, so does
    /// the save, and nothing is committed. A save of no bytes, or one that fails earlier, does not call it.
    pub fn check_staged(&mut self, check: impl Fn() -> Result<()> + Send + Sync + 'a) -> &mut Self {
        self.check = Some(Box::new(check));
        self
    }

    /// Sets how to lock tensors that their library can change in place. Each save calls `lock` when it begins:
    /// [`save_async`](crate::save_async) and its like before they return. It drops the guard once every byte is copied, or
    /// the save has failed. So the save stores the values of its call, and code that changes a tensor waits.
    ///
    /// The thread that drops the guard is not the one that made it.
    pub fn lock_while_read<G: Send + 'static>(
        &mut self,
        lock: impl Fn() -> Result<G> + Send + Sync + 'a,
    ) -> &mut Self {
        self.locks.push(Box::new(move || Ok(Box::new(lock()?))));
        self
    }

    /// Locks the tensors for a save, unless the caller of this save has done so.
    ///
    /// # Errors
    /// Those of [`StateDict::lock_while_read`].
    pub(crate) fn lock(&self) -> Result<()> {
        let mut held = self.held.inner();
        if held.is_none() {
            *held = Some(self.locks.iter().map(|lock| lock()).collect::<Result<_>>()?);
        }
        Ok(())
    }

    /// Runs a save. The tensors are locked until the save has copied every byte, or ends.
    pub(crate) fn while_locked<T>(&self, save: impl FnOnce() -> Result<T>) -> Result<T> {
        struct Unlock<'s>(&'s Held);
        impl Drop for Unlock<'_> {
            fn drop(&mut self) {
                drop(self.0.inner().take());
            }
        }
        let _unlock = Unlock(&self.held);
        self.lock()?;
        save()
    }

    /// Checks that the state has something of each droppable name: a misspelled one would get no files.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming one that it does not have.
    pub(crate) fn check_apart(&self) -> Result<()> {
        let has = |name: &&String| self.entries().any(|(entry, _)| is_below(entry, name));
        match self.apart.iter().find(|name| self.tree.is_none() && !has(name)) {
            None => Ok(()),
            Some(name) => Err(Error::invalid(format!(
                "the state has nothing named {name:?}, which is to be droppable, and nothing below it"
            ))),
        }
    }

    /// The number set by [`StateDict::step`].
    pub(crate) fn saved_step(&self) -> Option<u64> {
        self.step
    }

    /// What [`StateDict::metrics`] noted.
    pub(crate) fn saved_metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The values that are not tensors.
    pub(crate) fn saved_values(&self) -> &[(String, Value)] {
        &self.values
    }

    /// What [`StateDict::set_tree`] set.
    pub(crate) fn saved_tree(&self) -> Option<&RawValue> {
        self.tree.as_deref()
    }

    /// Whether [`StateDict::only_new`] was called.
    pub(crate) fn is_only_new(&self) -> bool {
        self.only_new
    }

    /// The tensors, for the save.
    pub(crate) fn contents(&self) -> Contents<'_> {
        let (items, sources, apart) = (&self.items, &self.sources, &self.apart);
        let (tree, check, held) = (self.tree.as_deref(), self.check.as_deref(), &self.held);
        Contents { items, sources, apart, base: self.base.as_ref(), tree, check, held }
    }

    /// The tree of values, as it is written.
    ///
    /// # Errors
    /// [`Error::Invalid`] if two entries have the same name.
    pub(crate) fn tree(&self) -> Result<Tree<'_>> {
        if self.tree.is_some() {
            return Ok(Tree(self)); // its names are the caller's
        }
        let mut seen = HashSet::with_capacity(self.items.len() + self.values.len());
        match self.entries().find(|(name, _)| !seen.insert(*name)) {
            None => Ok(Tree(self)),
            Some((twice, _)) => {
                Err(Error::invalid(format!("two entries of the state are named {twice:?}")))
            }
        }
    }

    /// All tensors and values.
    fn entries(&self) -> impl Iterator<Item = (&str, Leaf<'_>)> + Clone {
        let tensors =
            self.items.iter().map(|item| (item.info.name.as_str(), Leaf::Tensor(&item.info.name)));
        let values = self.values.iter().map(|(name, value)| (name.as_str(), Leaf::Value(value)));
        tensors.chain(values)
    }
}

/// The tensors of a state: items, and for each the source of its bytes.
pub(crate) struct Contents<'a> {
    pub items: &'a [Item],
    pub sources: &'a [TensorSource<'a>],
    /// Names of parts whose tensors get files of their own.
    pub apart: &'a [String],
    /// The earlier checkpoint that files are taken over from.
    pub base: Option<&'a Base>,
    /// The tree of values that refers to them, if [`StateDict::set_tree`] set one.
    tree: Option<&'a RawValue>,
    /// Called once all of these bytes have been copied.
    pub check: Option<&'a Check<'a>>,
    /// Unlocked after that.
    pub held: &'a Held,
}

impl Contents<'_> {
    /// The parts whose tensors get files of their own, and all of these parts together: a tensor of two of them goes with
    /// neither alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tree that cannot be read.
    pub fn parts(&self) -> Result<Vec<Part>> {
        let part = |names: &[String]| match self.tree {
            Some(tree) => Part::of_tree(tree, names),
            None => Ok(Part::named(names)),
        };
        let together = (self.apart.len() > 1).then_some(self.apart);
        self.apart.iter().map(std::slice::from_ref).chain(together).map(part).collect()
    }
}

/// The tree of values of a state: one dictionary of all tensors and values, unless [`StateDict::set_tree`] set
/// another. Built while it is written.
pub(crate) struct Tree<'a>(&'a StateDict<'a>);

impl Serialize for Tree<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match &self.0.tree {
            Some(tree) => tree.serialize(to),
            None => Named(self.0.entries()).serialize(to),
        }
    }
}
