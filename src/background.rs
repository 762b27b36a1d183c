//! Loads in the background, for programs that await them.

use crate::device::Target;
use crate::error::Result;
use crate::handle::{Handle, LoadHandle, Work};
use crate::pipeline::job::Job;
use crate::pipeline::report::LoadReport;
use crate::pipeline::runtime::Runtime;
use crate::store::{Checkpoint, LoadOptions};
use crate::{Config, load_all};
use std::path::Path;
use std::sync::Arc;

/// What [`Checkpoint::load_into_async`] gives: names and memory as they were handed over, now filled.
pub type Filled<M> = (Vec<(String, M)>, LoadReport);

/// [`load`](crate::load) in the background: opens the checkpoint at `path` and loads all its tensors.
///
/// # Errors
/// What [`Config::found`] gives, or the system's when it has no more threads; all else comes through
/// the handle.
pub fn load_async(path: impl AsRef<Path>) -> Result<LoadHandle> {
    let config = Config::found()?;
    let runtime = Runtime::shared(&config)?;
    let path = crate::sys::path::absolute(path.as_ref())?;
    Handle::start(Work::Load, path.clone(), Job::of(&config), move |job| {
        load_all(&path, &runtime, job)
    })
}

impl Checkpoint {
    /// [`Checkpoint::load_names`] in the background.
    ///
    /// # Errors
    /// As for [`load_async`].
    pub fn load_names_async<S: Into<String>>(
        self: &Arc<Self>,
        names: impl IntoIterator<Item = S>,
        options: LoadOptions,
        runtime: &Arc<Runtime>,
    ) -> Result<LoadHandle> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let (checkpoint, runtime) = (self.clone(), runtime.clone());
        let job = Job::of(runtime.config());
        Handle::start(Work::Load, self.path().into(), job, move |job| {
            checkpoint.load_names(names, options, &runtime, job)
        })
    }

    /// [`Checkpoint::load_into`] in the background. The memory is handed over for as long as the load
    /// writes to it, and comes back with the report; of a load that fails it is dropped.
    ///
    /// # Errors
    /// As for [`load_async`].
    pub fn load_into_async<M: AsMut<[u8]> + Send + 'static>(
        self: &Arc<Self>,
        mut targets: Vec<(String, M)>,
        options: LoadOptions,
        runtime: &Arc<Runtime>,
    ) -> Result<LoadHandle<Filled<M>>> {
        let (checkpoint, runtime) = (self.clone(), runtime.clone());
        let job = Job::of(runtime.config());
        Handle::start(Work::Load, self.path().into(), job, move |job| {
            let memory = targets.iter_mut().map(|(name, to)| (&*name, Target::new(to.as_mut())));
            let memory: Vec<(&String, Target)> = memory.collect();
            let report = checkpoint.load_into(&memory, options, &runtime, job)?;
            Ok((targets, report))
        })
    }
}
