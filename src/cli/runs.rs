//! What `ringstow ls` says of a directory whose sub-directories are runs.

use super::{table, text};
use crate::config::Config;
use crate::error::Result;
use crate::store::{Found, Status, runs};
use std::path::Path;

/// The runs in a directory as a table; `None` if there are none. `found` are the checkpoints of the directory itself.
///
/// # Errors
/// The directory cannot be listed.
pub fn listed(dir: &Path, found: &[Found], config: &Config) -> Result<Option<String>> {
    let runs = runs(dir, found, config)?;
    let Some((first, _)) = runs.first() else { return Ok(None) };
    let rows = runs.iter().map(|(path, found)| {
        let newest = found.iter().rev().find(|found| found.status == Status::Committed);
        [
            text::path(path.strip_prefix(dir).unwrap_or(path)),
            found.len().to_string(),
            text::or_dash(newest.and_then(|found| Some(found.step?.to_string()))),
            text::or_dash(newest.and_then(|found| text::utc(found.created_unix_ms?))),
        ]
    });
    let titles = ["<RUN", ">CHECKPOINTS", ">NEWEST STEP", "<COMMITTED"];
    let (count, rows) = (text::count(runs.len(), "run"), table::table(titles, rows));
    let (dir, first) = (text::path(dir), text::path(first));
    Ok(Some(format!(
        "{count} in {dir}:\n\n{rows}\n\n`ringstow ls {first}` lists the checkpoints of one"
    )))
}
