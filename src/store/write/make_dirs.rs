//! Creates a checkpoint's stripe directories, each with the marker that says whose it is.

use crate::error::{Error, Result};
use crate::format::names;
use crate::store::layout::stripes::{Owner, Stripes};
use crate::store::write::rollback::Rollback;
use crate::sys::chance::unique;
use crate::sys::lock::DirLock;
use crate::sys::{dir, file};
use std::io::Write;
use std::path::Path;

/// Creates the stripe directories. The caller holds the lock on the checkpoint's own directory.
///
/// # Errors
/// [`Error::Busy`] if another checkpoint of this name claims one at this moment; [`Error::Invalid`] if it has
/// claimed one already; [`Error::Io`].
pub(in crate::store) fn make_stripe_dirs(stripes: &Stripes, rollback: &mut Rollback) -> Result<()> {
    for dir in stripes.stripe_dirs() {
        rollback.make_dir(dir)?;
        // Only without a marker can two checkpoints want the same directory.
        let claiming = match DirLock::take(dir) {
            // A clean-up has just removed it.
            Err(error) if error.is_not_found() => {
                rollback.make_dir(dir)?;
                DirLock::take(dir)?
            }
            lock => lock?,
        };
        match stripes.owner(dir)? {
            Owner::This => {}
            Owner::Nobody => mark(dir, (&claiming, &stripes.marker()), rollback)?,
            Owner::Other(checkpoint, _) | Owner::Unknown(checkpoint) => {
                return Err(Error::invalid(format!(
                    "{} was taken for {checkpoint} just now: save under another name",
                    dir.display()
                )));
            }
        }
    }
    Ok(())
}

fn mark(dir: &Path, (lock, marker): (&DirLock, &str), rollback: &mut Rollback) -> Result<()> {
    let path = dir.join(names::STRIPE_MARKER);
    let part = match lock.is_shared() {
        false => {
            rollback.marked.push(dir.into());
            dir.join(names::UNCOMMITTED_STRIPE_MARKER)
        }
        // Another host may have written the same marker at the same time, and rely on it: it stays, whatever becomes
        // of this save.
        true => dir.join(names::unique_stripe_marker(&unique())),
    };
    rollback.files.push(part.clone());
    file::write_durably(&part, |mut file| writeln!(file, "{marker}"))?;
    dir::rename(&part, &path)?;
    // Before any shard: without the marker, nobody could tell whose the shards are.
    dir::sync(dir)
}
