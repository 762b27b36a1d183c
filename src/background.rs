//! Loads in the background, for programs that await them.

use crate::device::Target;
use crate::error::Result;
use crate::handle::{Handle, LoadHandle, Work};
use crate::pipeline::job::Job;
use crate::pipeline::report::LoadReport;
use crate::store::{Checkpoint, LoadOptions};
use std::sync::Arc;

/// What [`Checkpoint::load_into_async`] gives: names and memory as they were handed over, now filled.
pub type Filled<M> = (Vec<(String, M)>, LoadReport);

impl Checkpoint {
    /// [`Checkpoint::load_names`] in the background.
    ///
    /// # Errors
    /// As for [`load_async`](crate::load_async).
    pub fn load_names_async<S: Into<String>>(
        self: &Arc<Self>,
        names: impl IntoIterator<Item = S>,
        verify: bool,
    ) -> Result<LoadHandle> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let checkpoint = self.clone();
        Handle::start(Work::Load, self.path().into(), Job::of(self.config()), move |job| {
            let options = LoadOptions { verify, job: Some(job), ..LoadOptions::default() };
            checkpoint.load_names(names, options)
        })
    }

    /// [`Checkpoint::load_into`] in the background. The memory is handed over for as long as the load
    /// writes to it, and comes back with the report; of a load that fails it is dropped.
    ///
    /// # Errors
    /// As for [`load_async`](crate::load_async).
    pub fn load_into_async<M: AsMut<[u8]> + Send + 'static>(
        self: &Arc<Self>,
        mut targets: Vec<(String, M)>,
        verify: bool,
    ) -> Result<LoadHandle<Filled<M>>> {
        let checkpoint = self.clone();
        Handle::start(Work::Load, self.path().into(), Job::of(self.config()), move |job| {
            let memory = targets.iter_mut().map(|(name, to)| (&*name, Target::new(to.as_mut())));
            let memory: Vec<(&String, Target)> = memory.collect();
            let report = checkpoint.load_into(
                &memory,
                LoadOptions { verify, job: Some(job), ..LoadOptions::default() },
            )?;
            Ok((targets, report))
        })
    }
}
