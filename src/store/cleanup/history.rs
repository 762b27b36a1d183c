//! What was removed from a run and why: a log line, and a line of JSON in the run's history, where managers note their saves.
//! Nothing depends on the file: it may be removed.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::{StepName, names};
use crate::object::is_url;
use crate::store::catalog::found::Found;
use crate::store::catalog::steps::steps;
use crate::store::cleanup::remove::{Disposal, Removed, remove_checkpoint};
use crate::sys::chance::now_unix_ms;
use crate::sys::run_lock::RunLock;
use crate::sys::{dir, file};
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The file in a run's directory.
const FILE: &str = ".ringstow-history.jsonl";

/// Bytes that are read at most. [`add_to_history`] starts a new file at half of that.
const BYTES_MAX: u64 = 4_000_000;

/// A removal that is in the history of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    kind: Kind,
    /// The name of the checkpoint's directory.
    pub name: String,
    /// When it was removed, in milliseconds since 1970-01-01 UTC.
    pub at_unix_ms: u64,
    /// Why.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Removal,
}

/// Removes a step of a run, logs why, and notes it in the run's history.
///
/// # Errors
/// As for [`remove`](crate::remove()).
pub fn remove_step(
    path: &Path,
    reason: &str,
    disposal: Disposal,
    config: &Config,
) -> Result<Removed> {
    let removed = remove_checkpoint(path, disposal, config)?;
    note(path, reason);
    Ok(removed)
}

/// Logs why a step was removed, and notes it in its run's history, if there is one or a manager of this process saves there.
/// Never fails: the step is gone.
pub(in crate::store) fn note(path: &Path, reason: &str) {
    tracing::info!("{} is removed: {reason}", path.display());
    append(path, reason);
}

/// Notes in the history that a removal which was noted before it began has failed.
pub(in crate::store) fn note_failed(path: &Path, failure: &Error) {
    append(path, &format!("is not removed: {failure}"));
}

fn append(path: &Path, reason: &str) {
    let (Some(run), Some(name)) = (path.parent(), path.file_name()) else { return };
    let history = run.join(FILE);
    if is_url(path) || !(dir::has(&history) || RunLock::is_own(run)) {
        return;
    }
    let (name, reason) = (name.to_string_lossy().into_owned(), reason.into());
    let removal = Removal { kind: Kind::Removal, name, at_unix_ms: now_unix_ms(), reason };
    let Ok(line) = serde_json::to_string(&removal) else { return };
    if let Err(error) = add_to_history(run, &line) {
        tracing::debug!(%error, "not noted in {}", history.display());
    }
}

/// Adds a line of JSON to the history of a run. A history that has become long gets another name, in place of the one
/// before, and the next line begins a new one.
///
/// # Errors
/// [`Error::Invalid`] if something else has the file's name; [`Error::Io`].
pub fn add_to_history(run: &Path, line: &str) -> Result<()> {
    let path = run.join(FILE);
    let bytes = file::append_line(&path, line).map_err(|error| {
        let why = match &error {
            link if file::is_link(link) => "a symbolic link".into(),
            other if file::is_no_file(other) => other.to_string(),
            _ => return Error::io("noting in", &path, error),
        };
        let path = path.display();
        Error::invalid(format!(
            "{path} must be a regular file with one name, which only ringstow writes ({why}): remove it, or move it"
        ))
    })?;
    if bytes > BYTES_MAX / 2 {
        dir::rename(&path, &run.join(format!("{FILE}.1")))?;
    }
    Ok(())
}

/// The removals that are noted in a run, oldest first. Skips what cannot be read.
pub fn removals(run: &Path) -> Vec<Removal> {
    let bytes = file::read_start(&run.join(FILE), BYTES_MAX).unwrap_or_default();
    let lines = bytes.split(|byte| *byte == b'\n');
    lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// Whether a step is gone because it was removed: its run's history says so, or a step of a higher number is committed
/// there. A copy of it is then not missing.
pub fn was_removed(path: &Path, config: &Config) -> bool {
    let (Some(run), Some(name)) = (path.parent(), path.file_name()) else { return false };
    if !dir::is_gone(&path.join(names::MANIFEST)) {
        return false;
    }
    let number = StepName::of(name.as_bytes()).ok().map(|name| name.step);
    let is_later = |found: &Found| found.was_committed() && number.is_some() && found.step > number;
    let is_noted = removals(run).iter().any(|removal| *name == *removal.name);
    is_noted || steps(run, None, config).is_ok_and(|steps| steps.iter().any(is_later))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removals_are_noted_where_a_history_is_and_read_among_other_lines() {
        let run = tempfile::tempdir().unwrap();
        let (step, history) = (run.path().join("step-1"), run.path().join(FILE));
        note(&step, "no rule keeps it");
        assert!(!dir::has(&history), "nobody keeps a history here");
        let save = r#"{"kind":"save","name":"step-1","at_unix_ms":5,"bytes":7}"#;
        std::fs::write(&history, format!("{save}\n{{\"cut")).unwrap();
        note(&step, "no rule keeps it");
        let found = removals(run.path());
        assert_eq!(found.len(), 1);
        assert_eq!((&*found[0].name, &*found[0].reason), ("step-1", "no rule keeps it"));
    }

    #[test]
    fn history_has_no_empty_line_and_one_that_a_kill_has_cut_costs_no_other() {
        let run = tempfile::tempdir().unwrap();
        let text = || std::fs::read_to_string(run.path().join(FILE)).unwrap();
        add_to_history(run.path(), "a").unwrap();
        add_to_history(run.path(), "b").unwrap();
        assert_eq!(text(), "a\nb\n");
        std::fs::write(run.path().join(FILE), "a\n{\"cut").unwrap();
        add_to_history(run.path(), "c").unwrap();
        assert_eq!(text(), "a\n{\"cut\nc\n");
    }

    #[test]
    fn step_is_removed_by_the_history_or_by_a_later_one_and_otherwise_lost() {
        let (run, config) = (tempfile::tempdir().unwrap(), Config::default());
        let save = |step: u64| {
            let (mut state, path) =
                (crate::StateDict::new(), run.path().join(format!("step-{step}")));
            state.step(step);
            crate::save(&state, &path).unwrap();
            path
        };
        // The run has gone back from 40 to 31.
        let (lower, higher) = (save(31), save(40));
        assert!(!was_removed(&higher, &config));
        std::fs::remove_dir_all(&higher).unwrap();
        assert!(!was_removed(&higher, &config), "somebody has deleted the newest");
        std::fs::write(run.path().join(FILE), "").unwrap();
        note(&higher, "no rule keeps it");
        assert!(was_removed(&higher, &config));
        save(50);
        assert!(!was_removed(&lower, &config), "it is there");
        std::fs::remove_dir_all(&lower).unwrap();
        assert!(was_removed(&lower, &config));
    }

    #[test]
    fn link_in_place_of_the_history_is_not_written_through() {
        let run = tempfile::tempdir().unwrap();
        let precious = run.path().join("precious");
        std::fs::write(&precious, "mine").unwrap();
        std::os::unix::fs::symlink(&precious, run.path().join(FILE)).unwrap();
        note(&run.path().join("step-1"), "no rule keeps it");
        assert_eq!(std::fs::read(&precious).unwrap(), b"mine");
    }
}
