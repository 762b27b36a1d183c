//! Runs tests that mount file systems. Mounts are made in a mount namespace of the test's thread, so that they end with it,
//! whatever becomes of the test.

use super::rig;

pub const MIB: u64 = 1 << 20;

pub const EXT4: &[&str] = &["mkfs.ext4", "-q", "-F"];
pub const XFS: &[&str] = &["mkfs.xfs", "-q"];

/// Runs a test where it may mount. [`rig::missing`] says so if there is no such place or no such file system.
pub fn where_mounts_work(test: impl FnOnce() -> Result<(), String> + Send) {
    let outcome = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            cut_disk::unshare_mounts()?;
            test()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if let Err(why) = outcome {
        rig::missing(&format!("it needs root and the file system's tools: {why}"));
    }
}
