//! Other file systems than this machine's: made in image files, mounted, used and unmounted.
//! Mounting needs root; each test says so and does nothing without.
#![cfg(target_os = "linux")]

use crate::common::mounts::{EXT4, MIB, XFS, where_mounts_work};
use crate::common::{State, assert_no_litter, errno, names_in, verify};
use cut_disk::Mount;
use nix::libc;
use ringstow::{
    CheckpointManager, Config, EngineChoice, Error, FallbackKind, Job, Retention, Runtime,
    SaveReport, Shortage, StateDict, Switch,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Around a block, some blocks, odd lengths; a few MB in all.
const SIZES: [usize; 5] = [1, 65_537, 1_000_003, 65_536, 2_000_000];

fn config(engine: EngineChoice, direct: Switch) -> Config {
    Config { block_bytes: 65_536, pool_bytes: 8 * 65_536, engine, direct, ..Config::default() }
}

fn runtime() -> Runtime {
    Runtime::new(config(EngineChoice::Auto, Switch::Auto)).unwrap()
}

/// Saves twice over one path and once to another, each byte checked, and returns the last report.
fn round_trip(on: &Path, engine: EngineChoice, direct: Switch) -> SaveReport {
    let runtime = Runtime::new(config(engine, direct)).unwrap();
    let dir = on.join(format!("{engine:?}-{direct:?}"));
    for step in 0..2 {
        let state = State::new(step, &SIZES);
        let report = state.save(&runtime, &dir).unwrap();
        state.assert_at(&runtime, &dir);
        let check = verify(&runtime, &dir).unwrap();
        assert!(check.damage.is_empty());
        assert_eq!(check.moved.direct, report.moved.direct);
        assert_no_litter(&dir);
        if step == 1 {
            return report;
        }
    }
    unreachable!()
}

/// What a file system is known to have.
struct Has {
    direct: bool,
    fallocate: bool,
}

/// Round trips through both engines, and reports that tell the truth about the file system.
fn assert_works(on: &Path, has: Has) {
    for engine in [EngineChoice::Auto, EngineChoice::Portable] {
        for direct in [Switch::Auto, Switch::Off] {
            let report = round_trip(on, engine, direct);
            let told = |word: &str| {
                report.moved.fallbacks.iter().find(|f| f.reason.contains(word)).cloned()
            };
            assert_eq!(report.moved.direct, has.direct && direct == Switch::Auto, "{report:?}");
            assert_eq!(told("fallocate").is_none(), has.fallocate, "{report:?}");
            let refused = told("does not take O_DIRECT");
            assert_eq!(refused.is_some(), !has.direct && direct == Switch::Auto, "{report:?}");
            assert!(refused.is_none_or(|f| f.remedy.contains("direct = off")));
        }
        if has.direct {
            assert!(round_trip(on, engine, Switch::On).moved.direct);
        } else {
            assert_insisting_on_direct_fails(on, engine);
        }
    }
}

fn assert_insisting_on_direct_fails(on: &Path, engine: EngineChoice) {
    let before = names_in(on);
    let runtime = Runtime::new(config(engine, Switch::On)).unwrap();
    let error = State::new(1, &SIZES).save(&runtime, &on.join("insists")).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("O_DIRECT") && text.contains("set direct = off"), "{text}");
    assert_eq!(names_in(on), before);
}

macro_rules! works_on {
    ($($name:ident: $mount:expr, direct $direct:literal, fallocate $fallocate:literal;)*) => {
        $(#[test]
        fn $name() {
            where_mounts_work(|| {
                let mount = $mount?;
                assert_works(mount.path(), Has { direct: $direct, fallocate: $fallocate });
                Ok(())
            });
        })*
    };
}

/// Files mapped block by block, as on ext2 and ext3: no extents, and so no fallocate.
const EXT4_OF_OLD: &[&str] = &["mkfs.ext4", "-q", "-F", "-O", "^extent,^64bit"];

works_on! {
    ext4_takes_all: Mount::image(EXT4, 64 * MIB, 512, "rw"), direct true, fallocate true;
    ext4_on_4k_sectors_takes_all: Mount::image(EXT4, 64 * MIB, 4096, "rw"), direct true, fallocate true;
    ext4_without_extents_has_no_fallocate:
        Mount::image(EXT4_OF_OLD, 64 * MIB, 512, "rw"), direct true, fallocate false;
    xfs_takes_all: Mount::image(XFS, 320 * MIB, 512, "rw"), direct true, fallocate true;
    xfs_on_4k_sectors_takes_all:
        Mount::image(XFS, 320 * MIB, 4096, "rw"), direct true, fallocate true;
    btrfs_takes_all: Mount::image(&["mkfs.btrfs", "-q"], 128 * MIB, 512, "rw"), direct true, fallocate true;
    ramfs_has_neither_direct_io_nor_fallocate:
        Mount::of_memory("ramfs", "rw"), direct false, fallocate false;
}

#[test]
fn an_overlay_as_containers_have_it_works() {
    where_mounts_work(|| {
        let below = Mount::image(EXT4, 64 * MIB, 512, "rw")?;
        let of = |name: &str| {
            let dir = below.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir.to_str().unwrap().to_owned()
        };
        let options =
            format!("lowerdir={},upperdir={},workdir={}", of("low"), of("up"), of("work"));
        let overlay = Mount::of_memory("overlay", &options)?;
        assert_works(overlay.path(), Has { direct: true, fallocate: true });
        Ok(())
    });
}

/// A save that the file system has no room for, over an earlier checkpoint and beside it.
fn assert_full_disk_is_told_before_a_byte_is_written(on: &Path, too_much: usize) {
    for engine in [EngineChoice::Auto, EngineChoice::Portable] {
        let runtime = Runtime::new(config(engine, Switch::Auto)).unwrap();
        let (old, fresh) = (on.join("old"), on.join("new/er"));
        let before = State::new(1, &SIZES);
        before.save(&runtime, &old).unwrap();
        let files = names_in(&old);
        for path in [&old, &fresh] {
            let job = Arc::<Job>::default();
            let error = State::new(2, &[too_much]).save_as(&runtime, path, &job).unwrap_err();
            assert_eq!(errno(&error), Some(libc::ENOSPC), "{error}");
            let text = error.to_string();
            assert!(text.contains("preallocating") && text.contains("free some space"), "{text}");
            assert!(text.contains("safetensors"), "{text}");
            let Error::Io { shortage: Some(Shortage::Bytes { needed, free }), .. } = error else {
                panic!("{error:?}")
            };
            assert!(free < needed && needed >= too_much as u64, "{free} of {needed}");
            let said = format!("needs {needed} bytes on this file system, which has {free} free");
            assert!(text.contains(&said), "{text}");
            assert_eq!((job.progress().staged, job.progress().written), (0, 0));
            assert_eq!(names_in(&old), files);
            assert!(!on.join("new").exists());
        }
        before.assert_at(&runtime, &old);
        // There is room for another small one: what the failed save took was given back.
        let after = State::new(3, &SIZES);
        after.save(&runtime, &old).unwrap();
        after.assert_at(&runtime, &old);
    }
}

#[test]
fn full_disk_fails_before_the_first_byte() {
    where_mounts_work(|| {
        // The last has no fallocate.
        for (mount, too_much) in [
            (Mount::image(EXT4, 32 * MIB, 512, "rw")?, 40 << 20),
            (Mount::of_memory("tmpfs", "size=16m")?, 20 << 20),
            (Mount::image(EXT4_OF_OLD, 32 * MIB, 512, "rw")?, 40 << 20),
        ] {
            assert_full_disk_is_told_before_a_byte_is_written(mount.path(), too_much);
        }
        Ok(())
    });
}

#[test]
fn full_disk_of_a_manager_names_the_room_that_its_rules_need() {
    where_mounts_work(|| {
        let mount = Mount::of_memory("tmpfs", "size=16m")?;
        let keep = Retention { last: Some(3), ..Retention::default() };
        let mut manager = CheckpointManager::found(mount.path().join("run"), keep).unwrap();
        let large = Arc::new(vec![7u8; 20 << 20]);
        let state = || {
            let mut state = StateDict::new();
            state.shared("w", &[20 << 20], large.clone()).unwrap();
            state
        };
        let errors = [
            manager.save(1, &mut state(), [("loss", 0.5)]).unwrap_err(),
            manager
                .save_async(1, state(), [("loss", 0.5)])
                .and_then(|_| manager.wait())
                .unwrap_err(),
        ];
        for error in errors.map(|error| error.to_string()) {
            assert!(error.contains("keep + 1 steps: `Retention::last` of 3 for 4"), "{error}");
            assert!(error.contains("too few"), "{error}");
        }
        Ok(())
    });
}

/// A save into a file system on which no file can be created, although it has space.
fn assert_lack_of_inodes_is_told(on: &Path) {
    let (old, fresh) = (on.join("old"), on.join("fresh"));
    let before = State::new(1, &SIZES);
    before.save(&runtime(), &old).unwrap();
    let fillers = (0..).map(|n| on.join(format!("filler-{n}")));
    let made: Vec<PathBuf> = fillers.take_while(|path| fs::File::create(path).is_ok()).collect();
    // With no inode left, and with one for the directory or the shard alone.
    for freed in 0..2 {
        made.iter().take(freed).for_each(|filler| fs::remove_file(filler).unwrap());
        for path in [&old, &fresh] {
            let error = State::new(2, &SIZES).save(&runtime(), path).unwrap_err();
            assert_eq!(errno(&error), Some(libc::ENOSPC), "{error}");
            assert!(matches!(error, Error::Io { shortage: Some(Shortage::Inodes), .. }), "{error}");
            let said = error.to_string();
            assert!(said.contains("no free inodes") && !said.contains("free some space"), "{said}");
            let said = error.without_path().unwrap();
            assert!(said.contains("no free inodes"), "{said}");
        }
        before.assert_at(&runtime(), &old);
        assert!(!fresh.exists());
    }
}

#[test]
fn lack_of_inodes_is_told_from_a_lack_of_space() {
    const FEW: &[&str] = &["mkfs.ext4", "-q", "-F", "-N", "32"];
    where_mounts_work(|| {
        assert_lack_of_inodes_is_told(Mount::of_memory("tmpfs", "size=64m,nr_inodes=16")?.path());
        assert_lack_of_inodes_is_told(Mount::image(FEW, 64 * MIB, 512, "rw")?.path());
        Ok(())
    });
}

#[test]
fn no_space_for_the_manifest_keeps_the_old_checkpoint() {
    where_mounts_work(|| {
        let mount = Mount::of_memory("tmpfs", "size=8m")?;
        let dir = mount.path().join("ckpt");
        let before = State::new(1, &[100_000]);
        before.save(&runtime(), &dir).unwrap();
        let files = names_in(&dir);
        // Room for the shard to the page, and none for the manifest.
        let free = free_on(mount.path());
        let filler = fs::File::create(mount.path().join("filler")).unwrap();
        let shard = 4096 + 65_536;
        nix::fcntl::posix_fallocate(&filler, 0, (free - shard) as i64).unwrap();
        let error = State::new(2, &[65_536]).save(&runtime(), &dir).unwrap_err();
        assert_eq!(errno(&error), Some(libc::ENOSPC), "{error}");
        assert!(error.to_string().contains("manifest.json.part"), "{error}");
        assert_eq!(names_in(&dir), files);
        before.assert_at(&runtime(), &dir);
        drop(filler);
        fs::remove_file(mount.path().join("filler")).unwrap();
        let after = State::new(2, &[65_536]);
        after.save(&runtime(), &dir).unwrap();
        after.assert_at(&runtime(), &dir);
        Ok(())
    });
}

/// Leaves so many recycled files of so many bytes beside the checkpoints of a directory.
fn leave_recycled(root: &Path, files: usize, bytes: usize) -> PathBuf {
    let spares = root.join(".ringstow-spares");
    fs::create_dir(&spares).unwrap();
    for rank in 0..files {
        fs::write(spares.join(format!("rank{rank:05}-0.spare")), vec![1; bytes]).unwrap();
    }
    spares
}

#[test]
fn recycled_files_are_removed_when_a_save_needs_space() {
    where_mounts_work(|| {
        for mount in
            [Mount::image(EXT4, 32 * MIB, 512, "rw")?, Mount::of_memory("tmpfs", "size=16m")?]
        {
            let (old, new) = (mount.path().join("old"), mount.path().join("new"));
            let before = State::new(1, &SIZES);
            before.save(&runtime(), &old).unwrap();
            let free = free_on(mount.path());
            // The save takes one of them, and needs the room of the others.
            let spares = leave_recycled(mount.path(), 4, (free / 8) as usize);
            let state = State::new(2, &[(free / 4 * 3) as usize]);
            let report = state.save(&runtime(), &new).unwrap();
            let mut told = report.moved.fallbacks.iter();
            let told = told.find(|f| f.kind == FallbackKind::Recycling);
            let told = told.unwrap_or_else(|| panic!("{:?}", report.moved.fallbacks));
            assert!(told.reason.contains("free some space"), "{told:?}");
            state.assert_at(&runtime(), &new);
            assert!(!spares.exists());
            // What has no room all the same fails as ever.
            leave_recycled(mount.path(), 2, 4096);
            let error = State::new(3, &[free as usize]).save(&runtime(), &old).unwrap_err();
            assert_eq!(errno(&error), Some(libc::ENOSPC), "{error}");
            before.assert_at(&runtime(), &old);
        }
        Ok(())
    });
}

#[test]
fn recycled_files_are_given_up_for_the_manifest() {
    where_mounts_work(|| {
        let mount = Mount::of_memory("tmpfs", "size=8m")?;
        // No shard of the save can take the second, which has the room that the manifest lacks.
        leave_recycled(mount.path(), 2, 65_536);
        fs::remove_file(mount.path().join(".ringstow-spares/rank00000-0.spare")).unwrap();
        fs::create_dir(mount.path().join("ckpt")).unwrap();
        let filler = fs::File::create(mount.path().join("filler")).unwrap();
        let shard = 4096 + 65_536;
        let free = free_on(mount.path());
        nix::fcntl::posix_fallocate(&filler, 0, (free - shard) as i64).unwrap();
        let state = State::new(2, &[65_536]);
        state.save(&runtime(), &mount.path().join("ckpt")).unwrap();
        state.assert_at(&runtime(), &mount.path().join("ckpt"));
        Ok(())
    });
}

fn free_on(path: &Path) -> u64 {
    let found = nix::sys::statvfs::statvfs(path).unwrap();
    found.blocks_free() * found.fragment_size()
}

#[test]
fn read_only_mount_refuses_saves_and_loads() {
    where_mounts_work(|| {
        for mount in
            [Mount::image(EXT4, 64 * MIB, 512, "rw")?, Mount::of_memory("tmpfs", "size=64m")?]
        {
            let (old, fresh) = (mount.path().join("old"), mount.path().join("new"));
            let before = State::new(1, &SIZES);
            before.save(&runtime(), &old).unwrap();
            let files = names_in(&old);
            mount.remount("ro")?;
            for path in [&old, &fresh] {
                let error = State::new(2, &SIZES).save(&runtime(), path).unwrap_err();
                assert_eq!(errno(&error), Some(libc::EROFS), "{error}");
                assert!(error.to_string().contains("mounted read-only"), "{error}");
            }
            before.assert_at(&runtime(), &old);
            assert_eq!(names_in(&old), files);
            assert!(!fresh.exists());
        }
        Ok(())
    });
}

#[test]
fn failing_disk_is_an_error_and_not_a_hang() {
    where_mounts_work(|| {
        let mount = Mount::image(EXT4, 64 * MIB, 512, "rw,errors=continue")?;
        let dir = mount.path().join("ckpt");
        let before = State::new(1, &SIZES);
        before.save(&runtime(), &dir).unwrap();
        // On request, ext4 fails all that follows, as it does when its disk is gone.
        mount.cut_power()?;
        let error = State::new(2, &SIZES).save(&runtime(), &dir).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
        Ok(())
    });
}

#[test]
fn a_stripe_without_direct_io_steps_down_by_itself() {
    where_mounts_work(|| {
        let (fast, slow) = (tempfile::tempdir().unwrap(), Mount::of_memory("ramfs", "rw")?);
        let on_both = |direct| {
            let stripe = vec![slow.path().to_path_buf()];
            Runtime::new(Config { stripe, ..config(EngineChoice::Auto, direct) }).unwrap()
        };
        let (runtime, state) = (on_both(Switch::Auto), State::new(1, &SIZES));
        let report = state.save(&runtime, &fast.path().join("step")).unwrap();
        state.assert_at(&runtime, &fast.path().join("step"));
        let steps = report.moved.fallbacks;
        let stepped_down = |dir: &Path| {
            let dir = format!("in {}", dir.display());
            steps.iter().any(|s| s.reason.starts_with(&dir) && s.got.contains("buffered"))
        };
        assert!(stepped_down(slow.path()) && !stepped_down(fast.path()), "{steps:?}");
        assert!(!report.moved.direct);
        // Asked for by name it is an error, and nothing is left in either place.
        let error = state.save(&on_both(Switch::On), &fast.path().join("other")).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert_eq!(names_in(slow.path()), ["step"]);
        assert_eq!(names_in(fast.path()), ["step"]);
        Ok(())
    });
}

#[test]
fn the_doctor_knows_what_direct_writes_of_btrfs_cost() {
    where_mounts_work(|| {
        let mount = Mount::image(&["mkfs.btrfs", "-q"], 128 * MIB, 512, "rw")?;
        let [usual, plain] = ["usual", "plain"].map(|name| mount.path().join(name));
        fs::create_dir(&usual).unwrap();
        fs::create_dir(&plain).unwrap();
        let remedy = |dir: &Path| {
            let checks = ringstow::internals::doctor::diagnose(dir, &Config::default()).checks;
            checks.into_iter().find(|check| check.name == "O_DIRECT").unwrap().remedy
        };
        assert!(remedy(&usual).is_some_and(|text| text.contains("chattr +C")));
        let set = std::process::Command::new("chattr").arg("+C").arg(&plain).status();
        assert!(set.is_ok_and(|status| status.success()), "chattr comes with mkfs.ext4");
        assert_eq!(remedy(&plain), None);
        Ok(())
    });
}

#[test]
fn the_doctor_calls_a_full_disk_full() {
    where_mounts_work(|| {
        let mount = Mount::of_memory("tmpfs", "size=64k")?;
        fs::write(mount.path().join("all of it"), [0; 65_536]).unwrap();
        let checks = ringstow::internals::doctor::diagnose(mount.path(), &Config::default()).checks;
        for name in ["O_DIRECT", "preallocation"] {
            let check = checks.iter().find(|check| check.name == name).unwrap();
            assert!(check.found.contains("the disk is full"), "{check:?}");
            assert!(check.remedy.as_ref().unwrap().contains("free some space"), "{check:?}");
        }
        assert_eq!(names_in(mount.path()), ["all of it"]);
        Ok(())
    });
}

#[test]
fn report_says_why_nothing_is_recycled_on_a_file_system_that_copies_on_write() {
    where_mounts_work(|| {
        let mount = Mount::image(&["mkfs.btrfs", "-q"], 128 * MIB, 512, "rw")?;
        let config = Config { recycle: true, ..config(EngineChoice::Auto, Switch::Auto) };
        let (runtime, dir) = (Runtime::new(config).unwrap(), mount.path().join("last"));
        let told = [1, 2].map(|step| {
            let report = State::new(step, &SIZES).save(&runtime, &dir).unwrap();
            let mut told = report.moved.fallbacks.into_iter();
            told.find(|f| f.kind == FallbackKind::Recycling).map(|told| told.reason)
        });
        assert_eq!(told[0], None);
        assert!(told[1].as_ref().unwrap().contains("copies on write"), "{told:?}");
        assert_eq!(names_in(mount.path()), ["last"]);
        Ok(())
    });
}
