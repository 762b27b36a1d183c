//! File systems on disks whose power can be cut.

use crate::disk::{Disk, NAME, Power};
use fastrand::Rng;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// How a file system is made, and how large.
#[derive(Debug, Clone, Copy)]
pub struct FileSystem {
    /// What the kernel calls it.
    pub name: &'static str,
    mkfs: &'static [&'static str],
    bytes: u64,
}

/// ext4 with its journal.
pub const EXT4: FileSystem =
    FileSystem { name: "ext4", mkfs: &["mkfs.ext4", "-q", "-F"], bytes: 128 << 20 };
/// XFS, as small as it may be.
pub const XFS: FileSystem = FileSystem { name: "xfs", mkfs: &["mkfs.xfs", "-q"], bytes: 320 << 20 };
/// btrfs, which has no journal: it writes elsewhere, and its superblock last.
pub const BTRFS: FileSystem =
    FileSystem { name: "btrfs", mkfs: &["mkfs.btrfs", "-q"], bytes: 160 << 20 };

impl FileSystem {
    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        [EXT4, XFS, BTRFS].into_iter().find(|known| known.name == name)
    }
}

/// Mounted file systems, each on a disk of its own, that lose their power together.
pub struct Powered {
    // Fields are dropped in this order: mounts, disks, directories.
    mounts: Vec<Mounted>,
    disks: Vec<Disk>,
    root: tempfile::TempDir,
    power: Power,
    random: Rng,
}

impl Powered {
    /// So many. `seed` decides what each cut loses.
    ///
    /// # Errors
    /// What the machine lacks: the right to mount, FUSE, loop devices, a program.
    pub fn new(of: FileSystem, count: usize, seed: u64) -> Result<Self, String> {
        let root = tempfile::tempdir().map_err(|e| e.to_string())?;
        let power = Arc::new(AtomicBool::new(true));
        let random = Rng::with_seed(seed);
        let mut new = Self { mounts: Vec::new(), disks: Vec::new(), root, power, random };
        for number in 0..count {
            let [plug, point] = new.places(number);
            fs::create_dir(&plug)
                .and_then(|()| fs::create_dir(&point))
                .map_err(|e| e.to_string())?;
            let disk = Disk::new(of.bytes, Arc::clone(&new.power), &plug);
            new.disks.push(disk.map_err(|e| format!("no FUSE: {e}"))?);
            on_loop(&plug.join(NAME), SECTOR, |device| {
                run(of.mkfs[0], &[&of.mkfs[1..], &[device]].concat())
            })?;
            new.mounts.push(Mounted::new(&plug.join(NAME), &point)?);
        }
        Ok(new)
    }

    fn places(&self, number: usize) -> [PathBuf; 2] {
        [format!("plug-{number}"), format!("disk-{number}")].map(|name| self.root.path().join(name))
    }

    /// Where a file system is mounted.
    pub fn path(&self, number: usize) -> PathBuf {
        self.places(number)[1].clone()
    }

    /// From now on everything that reaches a disk fails.
    pub fn cut(&self) {
        self.power.store(false, SeqCst);
    }

    /// After a cut: disks that have lost some of what was in their caches, mounted again.
    pub fn restore(&mut self) -> Result<(), String> {
        self.mounts.clear();
        self.disks.iter().for_each(|disk| disk.lose(&mut self.random));
        self.power.store(true, SeqCst);
        for number in 0..self.disks.len() {
            let [plug, point] = self.places(number);
            self.mounts.push(Mounted::new(&plug.join(NAME), &point)?);
        }
        Ok(())
    }
}

/// As loop devices have them by default.
const SECTOR: u32 = 512;

/// A mounted file system; unmounted, and its device gone, when dropped.
struct Mounted {
    point: PathBuf,
    /// Where the kernel says what is behind the loop device, and what it says.
    behind: (PathBuf, String),
}

impl Mounted {
    fn new(image: &Path, point: &Path) -> Result<Self, String> {
        let device = on_loop(image, SECTOR, |device| {
            run("mount", &[device, &point.to_string_lossy()])?;
            Ok(device.to_owned())
        })?;
        let name = device.rsplit('/').next().unwrap_or_default();
        let file = Path::new("/sys/block").join(name).join("loop/backing_file");
        let behind = fs::read_to_string(&file).map_err(|e| e.to_string())?;
        Ok(Self { point: point.into(), behind: (file, behind) })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The kernel holds files that were registered with a ring a little longer than the ring.
        let point = self.point.to_string_lossy();
        for wait in 0.. {
            match run("umount", &[&point]) {
                Err(why) if why.contains("busy") && wait < 3000 => pause(),
                Err(why) => return eprintln!("{why}"),
                Ok(_) => break,
            }
        }
        // What is still on its way to the disk must fail before the power comes back.
        let (file, behind) = &self.behind;
        while fs::read_to_string(file).is_ok_and(|now| now == *behind) {
            pause();
        }
    }
}

fn pause() {
    std::thread::sleep(Duration::from_millis(10));
}

/// Does something with a loop device over an image. It is detached by the kernel at the unmount, or now
/// if it was not mounted.
///
/// # Errors
/// That of a program; of the work.
pub fn on_loop<T>(
    image: &Path,
    sector: u32,
    work: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, String> {
    let (image, sector) = (image.to_string_lossy(), sector.to_string());
    let device = run("losetup", &["--find", "--show", "--sector-size", &sector, &image])?;
    let device = device.trim();
    let done = work(device);
    let _ = run("losetup", &["--detach", device]);
    done
}

/// Runs a program; its output.
///
/// # Errors
/// What it said about its failure.
pub fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .map_err(|error| format!("{program} cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}
