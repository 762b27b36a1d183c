//! Finds the damaged tensors of a checkpoint, so that a load can skip them.

use crate::error::{Error, Result};
use crate::pipeline::report::DamagedTensor;
use crate::plan::load::Want;
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::fault::{Fault, wants_of};
use crate::store::read::load::{Fetched, LoadOptions, Loading};
use std::collections::HashMap;

impl Checkpoint {
    /// Reads and checks the tensors of these names, and returns those that are damaged, in the order of the names. A
    /// tensor is damaged if a checksum chunk with bytes of it is not what was written, or cannot be read.
    ///
    /// # Errors
    /// [`Error::Keys`] listing all names that are not in the checkpoint; [`Error::Invalid`] without checksums: for
    /// another program's files, or with `verify` off; failures that are not damage.
    pub fn damaged<S: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = S>,
        options: LoadOptions<'_>,
    ) -> Result<Vec<DamagedTensor>> {
        let (runtime, job) = self.resources(options)?;
        let names: Vec<S> = names.into_iter().collect();
        let loading = self.loading(options.verify, &runtime, &job);
        self.find_damaged(&names, loading).map(|(damaged, _)| damaged)
    }

    /// [`Checkpoint::damaged`], and what was read to find out.
    pub(in crate::store) fn find_damaged<S: AsRef<str>>(
        &self,
        names: &[S],
        loading: Loading,
    ) -> Result<(Vec<DamagedTensor>, Fetched)> {
        if !loading.verify {
            return Err(Error::invalid(format!(
                "{}: damage is found by its checksums, so on_corrupt = skip needs verify = true and a checkpoint of \
                 ringstow's",
                self.path().display()
            )));
        }
        for fault in self.faults.iter().filter(|fault| fault.lost.is_empty()) {
            let (file, Fault { expected, got, .. }) =
                (self.files[fault.file].path.display(), fault);
            tracing::warn!(%file, expected, got, "a file is longer than the manifest says; the bytes that it lists are checked and loaded");
        }
        let requests = self.find(names)?;
        let wants: Vec<Want> =
            requests.iter().flat_map(|request| wants_of(request.entry)).collect();
        let (damage, checked) = self.check_wants(&wants, loading.runtime, loading.job)?;
        let mut found = DamagedTensor::all_in(&damage);
        let names = requests.iter().map(|request| request.entry.name.as_str());
        let order: HashMap<&str, usize> = names.zip(0..).collect();
        found.retain(|tensor| order.contains_key(tensor.name.as_str()));
        found.sort_by_key(|tensor| order[tensor.name.as_str()]);
        Ok((found, checked))
    }
}
