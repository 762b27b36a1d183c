//! One rank's share of a model that several ranks export: bytes of tensors, to places in files that the coordinator has
//! created ([`ModelSession`]). Durable, and nothing is published.
//!
//! [`ModelSession`]: crate::store::write::model_session::ModelSession

use crate::error::Result;
use crate::pipeline::job::Job;
use crate::pipeline::report::SaveReport;
use crate::pipeline::report::TARGET;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::save::Written;
use crate::pipeline::trace::What;
use crate::plan::share::{Place, SharedFile, plan_share};
use crate::state::StateDict;
use crate::store::write::save::report;
use crate::sys::{dir, late};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Writes bytes of the state's tensors to places in files of `dir`, which are sorted by file and offset. Creates no file,
/// and changes no file's length.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the places touch pages that another rank writes;
/// [`Error::Io`](crate::Error::Io), also if the coordinator has removed the files.
pub fn write_model_share(
    runtime: &Runtime,
    state: &StateDict<'_>,
    dir: &Path,
    (files, places): (&[(PathBuf, SharedFile)], &[Place]),
    job: &Arc<Job>,
) -> Result<SaveReport> {
    let written = job.traced(runtime.config(), || {
        let started = Instant::now();
        let contents = state.contents();
        contents.check_sizes()?;
        contents.refuse_base()?;
        let (paths, shared): (Vec<PathBuf>, Vec<SharedFile>) = files.iter().cloned().unzip();
        let plan = plan_share(&shared, places, runtime.config().block_bytes)?;
        let planned = started.elapsed().as_secs_f64();
        job.note(What::Plan, started, None, 0);
        let written = match places.is_empty() {
            true => {
                job.set_staged();
                Written::nothing()
            }
            false => {
                late::awaited(
                    dir,
                    "the files of the export",
                    || !job.stopped(),
                    || paths.iter().all(dir::has),
                );
                contents.write(runtime, &plan, (dir, &paths), job)?
            }
        };
        let mut report = report(dir, 0, &plan, contents.items.len(), written);
        report.seconds.plan = planned;
        report.seconds.total = started.elapsed().as_secs_f64();
        Ok(report)
    });
    written.inspect(|report| tracing::info!(target: TARGET, "{report}"))
}
