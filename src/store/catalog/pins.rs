//! Steps that stay until somebody lets them go. A pin is a link `.ringstow-keep-step-1000` in the run's directory to the
//! step, which protects it as every link does: from all rules, also from losing parts.

use crate::error::{Error, Result};
use crate::sys::dir;
use std::path::{Path, PathBuf};

const PREFIX: &str = ".ringstow-keep-";

/// Where the pin of a step is, and the step's name.
fn pin_of(step: &Path) -> Result<(PathBuf, String)> {
    let name = step.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        Error::invalid(format!("{} has no name by which to keep it", step.display()))
    })?;
    Ok((step.with_file_name(format!("{PREFIX}{name}")), name.into()))
}

/// Keeps a step: no rule removes it, or parts of it. Does nothing if it is kept.
///
/// # Errors
/// [`Error::Io`]; [`Error::Invalid`] for a name that is not UTF-8.
pub fn pin(step: &Path) -> Result<()> {
    let (pin, name) = pin_of(step)?;
    match dir::link_to(&pin, Path::new(&name)) {
        Err(_) if dir::is_same(&pin, step) => Ok(()),
        made => made,
    }
}

/// Lets a step go that was [kept](pin); says whether it was.
///
/// # Errors
/// As for [`pin`].
pub fn unpin(step: &Path) -> Result<bool> {
    let (pin, _) = pin_of(step)?;
    let is_pin = dir::is_link(&pin);
    if is_pin {
        dir::remove(&pin)?;
        dir::sync(pin.parent().unwrap_or(Path::new(".")))?;
    }
    Ok(is_pin)
}

/// Where the step of this number is that is kept, or was when somebody removed it; `None` if none is kept.
pub fn kept(run: &Path, step: u64) -> Option<PathBuf> {
    let names = [format!("step-{step:08}"), format!("step-{step}")];
    pinned(run).iter().find(|name| names.contains(name)).map(|name| run.join(name))
}

/// The names of the steps of a run that are kept.
pub fn pinned(run: &Path) -> Vec<String> {
    let entries = dir::try_entries(run).unwrap_or_default().into_iter();
    let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    let names = links.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| Some(name.strip_prefix(PREFIX)?.to_owned())).collect()
}
