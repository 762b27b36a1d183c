//! A file system that can write no more calls directories synced. A save does not.

use crate::common::mounts::where_mounts_work;
use crate::operations::{Machine, Operation, save};
use crate::saved::Saved;
use cut_disk::{BTRFS, EXT4, FileSystem, Powered, XFS, run};
use ringstow::{EngineChoice, Error};
use std::fs;
#[cfg(debug_assertions)]
use std::path::{Path, PathBuf};

/// Between the rename that commits and its sync, the disk goes, and somebody else's sync meets that first.
#[cfg(debug_assertions)] // the seam exists in these builds only
fn commit_is_not_called_durable(of: FileSystem, is_overlaid: bool) {
    use ringstow::internals::sys::seam::{Call, Outcome, on_thread};
    use std::sync::Arc;
    where_mounts_work(move || {
        let powered = Arc::new(Powered::new(of, 2, 1)?);
        let saved = Saved::new(powered.path(0), powered.path(1));
        let machine = Machine::new(&saved, EngineChoice::Portable);
        let other = powered.path(0).join("other");
        fs::create_dir(&other).unwrap();
        let root = if is_overlaid { overlay(&powered.path(0))? } else { powered.path(0) };
        let (disk, mut is_renamed) = (Arc::clone(&powered), false);
        let _cutting = on_thread(move |_, call, path| {
            if call == Call::Sync && is_renamed {
                is_renamed = false;
                disk.cut();
                fs::create_dir(other.join("new")).unwrap();
                let synced = fs::File::open(&other).and_then(|other| other.sync_all());
                assert!(synced.is_err(), "a disk that is gone syncs nothing");
            }
            is_renamed |= call == Call::Rename && path.ends_with("manifest.json.part");
            Outcome::Pass
        });
        let done = save(&machine, Operation::New, 1, &root.join("step-1"));
        if is_overlaid {
            run("umount", &[&root.display().to_string()])?;
        }
        assert!(matches!(done, Err(Error::NotDurable { .. })), "{}: {done:?}", of.name);
        Ok(())
    });
}

/// Mounts an overlay whose changes go to a file system, and returns where.
#[cfg(debug_assertions)]
fn overlay(on: &Path) -> Result<PathBuf, String> {
    let dirs = ["lower", "upper", "work", "merged"].map(|name| on.join(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let [lower, upper, work, merged] = dirs.each_ref().map(|dir| dir.display().to_string());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
    run("mount", &["-t", "overlay", "overlay", "-o", &options, &merged])?;
    Ok(merged.into())
}

#[test]
#[cfg(debug_assertions)]
fn commit_whose_journal_the_file_system_below_an_overlay_lost_is_not_called_durable() {
    commit_is_not_called_durable(EXT4, true);
}

#[test]
#[cfg(debug_assertions)]
fn commit_whose_journal_ext4_lost_is_not_called_durable() {
    commit_is_not_called_durable(EXT4, false);
}

#[test]
#[cfg(debug_assertions)]
fn commit_whose_journal_xfs_lost_is_not_called_durable() {
    commit_is_not_called_durable(XFS, false);
}

#[test]
#[cfg(debug_assertions)]
fn commit_whose_journal_btrfs_lost_is_not_called_durable() {
    commit_is_not_called_durable(BTRFS, false);
}

#[test]
fn mount_point_in_a_read_only_directory_is_saved_to() {
    where_mounts_work(|| {
        let powered = Powered::new(EXT4, 2, 1)?;
        let saved = Saved::new(powered.path(0), powered.path(1));
        let [above, data] = ["above", "data"].map(|name| powered.path(0).join(name));
        let point = above.join("point");
        fs::create_dir_all(&point).unwrap();
        fs::create_dir(&data).unwrap();
        let [above, data, point] = [above, data, point].map(|path| path.display().to_string());
        run("mount", &["--bind", &above, &above])?;
        run("mount", &["--bind", &data, &point])?;
        run("mount", &["-o", "remount,bind,ro", &above])?;
        let machine = Machine::new(&saved, EngineChoice::Portable);
        let done = save(&machine, Operation::New, 1, point.as_ref());
        run("umount", &[&point])?;
        run("umount", &[&above])?;
        done.unwrap();
        Ok(())
    });
}
