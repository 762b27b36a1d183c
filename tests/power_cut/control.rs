//! The rig finds what it looks for: the disks lose what was not synced and nothing else, and the checks find a save that
//! does not sync.

use crate::common::mounts::where_mounts_work;
use crate::operations::{Machine, Operation, save};
use crate::saved::Saved;
use cut_disk::{BTRFS, EXT4, FileSystem, Powered, XFS};
use nix::libc::O_DIRECT;
use ringstow::EngineChoice;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A disk that loses nothing in so many cuts never does.
const CUTS_MAX: usize = 40;
const PAGE: usize = 4096;
const BYTES: usize = 16 * PAGE;

fn write_synced(path: &Path, byte: u8) {
    let mut file = File::create(path).unwrap();
    file.write_all(&[byte; BYTES]).unwrap();
    file.sync_all().unwrap();
    File::open(path.parent().unwrap()).unwrap().sync_all().unwrap();
}

/// Past the page cache, so that only the disk can lose it.
fn write_to_the_disk(path: &Path, byte: u8) {
    let memory = vec![byte; BYTES + PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    let file = OpenOptions::new().write(true).custom_flags(O_DIRECT).open(path).unwrap();
    file.write_all_at(&memory[start..start + BYTES], 0).unwrap();
}

fn loses_only_what_was_not_synced(of: FileSystem) {
    where_mounts_work(|| {
        let mut powered = Powered::new(of, 1, 1)?;
        let root = powered.path(0);
        let (mut lost_name, mut lost_bytes) = (false, false);
        for cut in 0..CUTS_MAX {
            write_synced(&root.join("over"), 1);
            write_synced(&root.join(format!("synced-{cut}")), 2);
            let unsynced = root.join(format!("unsynced-{cut}"));
            fs::write(&unsynced, [3; BYTES]).unwrap();
            write_to_the_disk(&root.join("over"), 4);
            powered.cut();
            powered.restore().unwrap();
            for cut in 0..=cut {
                let synced = fs::read(root.join(format!("synced-{cut}"))).unwrap();
                assert!(synced == [2; BYTES], "{} lost what was synced", of.name);
            }
            lost_name |= fs::read(&unsynced).ok().is_none_or(|there| there != [3; BYTES]);
            lost_bytes |= fs::read(root.join("over")).unwrap().contains(&1);
            if lost_name && lost_bytes {
                return Ok(());
            }
        }
        panic!("{}: a name was lost: {lost_name}, bytes were: {lost_bytes}", of.name);
    });
}

#[test]
fn cut_disk_of_ext4_loses_only_what_was_not_synced() {
    loses_only_what_was_not_synced(EXT4);
}

#[test]
fn cut_disk_of_xfs_loses_only_what_was_not_synced() {
    loses_only_what_was_not_synced(XFS);
}

#[test]
fn cut_disk_of_btrfs_loses_only_what_was_not_synced() {
    loses_only_what_was_not_synced(BTRFS);
}

#[test]
fn the_check_finds_a_save_that_does_not_sync() {
    where_mounts_work(|| {
        let mut powered = Powered::new(EXT4, 2, 1)?;
        let saved = Saved::new(powered.path(0), powered.path(1));
        let elsewhere = tempfile::tempdir().unwrap();
        for _ in 0..CUTS_MAX {
            let machine = Machine::new(&saved, EngineChoice::Portable);
            saved.pretend(Operation::New, |step, to| {
                let from = elsewhere.path().join(step.to_string());
                save(&machine, Operation::New, step, &from).unwrap();
                fs::create_dir(to).unwrap();
                for file in fs::read_dir(&from).unwrap().map(|file| file.unwrap().file_name()) {
                    fs::copy(from.join(&file), to.join(&file)).unwrap();
                }
            });
            drop(machine);
            powered.cut();
            powered.restore().unwrap();
            let machine = Machine::new(&saved, EngineChoice::Portable);
            let checked = AssertUnwindSafe(|| saved.check(&machine, "a save that does not sync"));
            if catch_unwind(checked).is_err() {
                return Ok(());
            }
        }
        panic!("{CUTS_MAX} cuts, and the check found nothing wrong");
    });
}
