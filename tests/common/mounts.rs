//! File systems in image files or in memory, mounted for a test. Mounts are made in a mount namespace of
//! the test's thread, so that they end with it, whatever becomes of the test.

use super::rig;
use cut_disk::on_loop;
pub use cut_disk::run;
use nix::sched::{CloneFlags, unshare};
use std::fs;
use std::path::{Path, PathBuf};

pub const MIB: u64 = 1 << 20;

pub const EXT4: &[&str] = &["mkfs.ext4", "-q", "-F"];
pub const XFS: &[&str] = &["mkfs.xfs", "-q"];

/// A mounted file system, unmounted when dropped.
pub struct Mount {
    root: tempfile::TempDir,
    point: PathBuf,
}

impl Mount {
    pub fn path(&self) -> &Path {
        &self.point
    }

    /// A file system that lives in an image, on a loop device with sectors of this size.
    pub fn image(mkfs: &[&str], bytes: u64, sector: u32, options: &str) -> Result<Self, String> {
        let root = tempfile::tempdir().unwrap();
        let image = root.path().join("image");
        fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        on_loop(&image, sector, |device| {
            run(mkfs[0], &[&mkfs[1..], &[device]].concat())?;
            Self::mounted(root, &["-o", options, device])
        })
    }

    /// Has the file system (ext4, XFS) stop on the spot, its journal's last entries not written: what
    /// it had on its disk is all that is left. Everything that uses it fails from then on.
    pub fn cut_power(&self) -> Result<(), String> {
        run("xfs_io", &["-x", "-c", "shutdown", self.point.to_str().unwrap()]).map(drop)
    }

    /// A file system without a device.
    pub fn of_memory(kind: &str, options: &str) -> Result<Self, String> {
        Self::mounted(tempfile::tempdir().unwrap(), &["-t", kind, "-o", options, "none"])
    }

    fn mounted(root: tempfile::TempDir, how: &[&str]) -> Result<Self, String> {
        let point = root.path().join("mounted");
        fs::create_dir(&point).unwrap();
        run("mount", &[how, &[point.to_str().unwrap()]].concat())?;
        Ok(Self { root, point })
    }

    pub fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        run("mount", &["-o", &options, self.point.to_str().unwrap()]).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let point = self.point.to_str().unwrap();
        // Lazily if something still holds it: it goes when that does, with the thread at the latest.
        if let Err(error) = run("umount", &[point]).or_else(|_| run("umount", &["-l", point])) {
            eprintln!("{}: {error}", self.root.path().display());
        }
    }
}

/// Runs a test where it may mount. [`rig::missing`] says so if there is no such place or no such file system.
pub fn where_mounts_work(test: impl FnOnce() -> Result<(), String> + Send) {
    let outcome = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS).map_err(|e| format!("no mount namespace: {e}"))?;
            run("mount", &["--make-rprivate", "/"])?;
            test()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if let Err(why) = outcome {
        rig::missing(&format!("it needs root and the file system's tools: {why}"));
    }
}
