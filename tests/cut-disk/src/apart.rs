//! File systems in image files or in memory, and the mount namespace for them.

use crate::mount::{on_loop, run};
use nix::sched::{CloneFlags, unshare};
use std::fs;
use std::path::{Path, PathBuf};

/// Gives this thread, and those that it starts later, mounts of its own: what they mount ends with them.
///
/// # Errors
/// Why that is unavailable.
pub fn unshare_mounts() -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(|e| format!("no mount namespace: {e}"))?;
    run("mount", &["--make-rprivate", "/"]).map(drop)
}

/// A mounted file system, unmounted when dropped.
pub struct Mount {
    root: tempfile::TempDir,
    point: PathBuf,
}

impl Mount {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.point
    }

    /// A file system that lives in an image, on a loop device with sectors of this size.
    ///
    /// # Errors
    /// What the machine lacks: the right to mount, loop devices, a program.
    pub fn image(mkfs: &[&str], bytes: u64, sector: u32, options: &str) -> Result<Self, String> {
        let root = tempfile::tempdir().map_err(|e| e.to_string())?;
        let image = root.path().join("image");
        fs::File::create(&image).and_then(|file| file.set_len(bytes)).map_err(|e| e.to_string())?;
        on_loop(&image, sector, |device| {
            run(mkfs[0], &[&mkfs[1..], &[device]].concat())?;
            Self::mounted(root, &["-o", options, device])
        })
    }

    /// Has the file system (ext4, XFS) stop on the spot, its journal's last entries not written: what
    /// it had on its disk is all that is left. Everything that uses it fails from then on.
    ///
    /// # Errors
    /// What `xfs_io` said.
    pub fn cut_power(&self) -> Result<(), String> {
        run("xfs_io", &["-x", "-c", "shutdown", &self.point.to_string_lossy()]).map(drop)
    }

    /// A file system without a device.
    ///
    /// # Errors
    /// The right to mount is missing.
    pub fn of_memory(kind: &str, options: &str) -> Result<Self, String> {
        let root = tempfile::tempdir().map_err(|e| e.to_string())?;
        Self::mounted(root, &["-t", kind, "-o", options, "none"])
    }

    fn mounted(root: tempfile::TempDir, how: &[&str]) -> Result<Self, String> {
        let point = root.path().join("mounted");
        fs::create_dir(&point).map_err(|e| e.to_string())?;
        run("mount", &[how, &[&*point.to_string_lossy()]].concat())?;
        Ok(Self { root, point })
    }

    /// Mounts it anew with other options.
    ///
    /// # Errors
    /// What `mount` said.
    pub fn remount(&self, options: &str) -> Result<(), String> {
        let options = format!("remount,{options}");
        run("mount", &["-o", &options, &self.point.to_string_lossy()]).map(drop)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let point = &*self.point.to_string_lossy();
        // Lazily if something still holds it: it goes when that does, with the thread at the latest.
        if let Err(error) = run("umount", &[point]).or_else(|_| run("umount", &["-l", point])) {
            eprintln!("{}: {error}", self.root.path().display());
        }
    }
}
