//! The moments of a commit, each as a kill or a failure leaves it.

use crate::config::Config;
use crate::plan::save::Options;
use crate::store::cleanup::prune::prune;
use crate::store::cleanup::remove::{Disposal, remove_checkpoint};
use crate::store::read::checkpoint::Checkpoint;
use crate::store::write::transaction::*;
use crate::sys::dir::file_names;
use crate::sys::seam::{Call, fail_call, watch};
use nix::errno::Errno;
use std::fs;

/// A one-shard manifest whose only tensor is `mark`, and its shard under the uncommitted name.
fn write_part(tx: &mut Transaction, mark: u8) -> Manifest {
    use crate::format::{Dtype, TensorInfo};
    let info = TensorInfo { name: "t".into(), dtype: Dtype::U8, shape: vec![1] };
    let generation = tx.generation();
    let (block_bytes, shard_bytes) = (4096, 0);
    let options = Options { rank: 0, generation, block_bytes, shard_bytes, lanes: 1, apart: &[] };
    let items = [info.into()];
    let plan = crate::plan::save::plan(&items, options).unwrap();
    let shard = &plan.shards[0];
    let mut bytes = shard.header_bytes(&items);
    bytes.push(mark);
    let part = tx.stripes().dir_of(shard, 0).join(names::uncommitted(&shard.name));
    tx.begin_files(std::slice::from_ref(&part));
    fs::write(&part, &bytes).unwrap();
    let crc32 = bytes.chunks(4096).map(crc32fast::hash).collect();
    let file = FileEntry {
        name: shard.name.clone(),
        bytes: bytes.len() as u64,
        crc32,
        hashes: Vec::new(),
    };
    let state = serde_json::value::to_raw_value(&()).unwrap();
    Manifest::new(generation, 1, 4096, vec![file], plan.entries(&items).iter().collect(), state)
}

fn mark_at(dir: &Path) -> u8 {
    let checkpoint = Checkpoint::open(dir).unwrap();
    *fs::read(&checkpoint.files[0].path).unwrap().last().unwrap()
}

fn commit(dir: &Path, mark: u8) {
    let mut tx = Transaction::begin(dir, &[]).unwrap();
    let manifest = write_part(&mut tx, mark);
    tx.commit(&manifest).unwrap();
}

/// A save that lacks only the commit itself.
fn about_to_publish(dir: &Path, mark: u8) -> (Transaction, Manifest) {
    let mut tx = Transaction::begin(dir, &[]).unwrap();
    let manifest = write_part(&mut tx, mark);
    tx.write_manifest(&manifest, None).unwrap();
    (tx, manifest)
}

/// A save that is committed, and has cleared nothing away yet.
fn published(dir: &Path, mark: u8) -> (Transaction, Manifest) {
    let (mut tx, manifest) = about_to_publish(dir, mark);
    tx.publish(&manifest).unwrap();
    (tx, manifest)
}

/// Dies without any clean-up, as if killed; only the lock goes, as the kernel would see to.
fn die(mut tx: Transaction) {
    tx.rollback.keep();
}

fn safetensors_in(dir: &Path) -> Vec<String> {
    file_names(dir).unwrap().into_iter().filter(|n| n.ends_with(".safetensors")).collect()
}

#[test]
fn written_shard_that_cannot_be_looked_at_is_not_called_gone() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    let mut tx = Transaction::begin(dir.path(), &[]).unwrap();
    let manifest = write_part(&mut tx, 2);
    let part = dir.path().join(names::uncommitted(&manifest.files[0].name));
    let failing = fail_call(Call::Look, &part, Errno::EIO as i32);
    let error = tx.commit(&manifest).unwrap_err();
    drop(failing);
    assert!(matches!(&error, Error::Io { path, .. } if *path == part), "{error}");
    assert_eq!(mark_at(dir.path()), 1);
}

#[test]
fn killed_before_the_rename_keeps_the_old_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    die(about_to_publish(dir.path(), 2).0);
    assert_eq!(mark_at(dir.path()), 1);
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.safetensors"]);
    prune(dir.path(), &Config::default()).unwrap();
    assert_eq!(
        file_names(dir.path()).unwrap(),
        ["manifest.json", "rank00000-0.safetensors"],
        "nothing of the killed save is left"
    );
    assert_eq!(mark_at(dir.path()), 1);
}

#[test]
fn killed_right_after_the_rename_has_the_new_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    die(published(dir.path(), 2).0);
    assert_eq!(mark_at(dir.path()), 2);
    commit(dir.path(), 3);
    assert_eq!(mark_at(dir.path()), 3);
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g2.safetensors"]);
}

#[test]
fn killed_between_commit_and_renames_is_finished_by_prune() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    die(published(dir.path(), 2).0);
    let swept = prune(dir.path(), &Config::default()).unwrap();
    assert_eq!((swept.renamed.len(), swept.removed.len()), (1, 1));
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
    assert_eq!(mark_at(dir.path()), 2);
}

#[test]
fn checkpoint_opened_right_after_its_commit_loads_under_its_final_names() {
    let dir = tempfile::tempdir().unwrap();
    let (mut tx, manifest) = published(dir.path(), 7);
    let opened = Checkpoint::open(dir.path()).unwrap();
    tx.settle(&manifest.files).unwrap();
    let runtime = crate::Runtime::new(crate::Config::default()).unwrap();
    let loaded = opened
        .load_names(["t"], crate::LoadOptions::default().on(&runtime, &Default::default()))
        .unwrap();
    assert_eq!(loaded.tensor("t").unwrap().data(), [7]);
}

#[test]
fn damaged_checkpoint_is_replaced_and_kept_until_then() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    fs::write(dir.path().join(names::MANIFEST), "rubbish").unwrap();
    drop(Transaction::begin(dir.path(), &[]).unwrap());
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.safetensors"]);
    commit(dir.path(), 2);
    assert_eq!(mark_at(dir.path()), 2);
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
}

/// A network file system may show a listing of a moment ago.
#[test]
fn generation_is_not_reused_if_a_listing_hides_its_files() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    let shard = dir.path().join("rank00000-0.safetensors");
    fs::rename(&shard, dir.path().join("hidden")).unwrap();
    let mut tx = Transaction::begin(dir.path(), &[]).unwrap();
    fs::rename(dir.path().join("hidden"), &shard).unwrap();
    assert_eq!(tx.generation(), 1);
    let manifest = write_part(&mut tx, 2);
    tx.commit(&manifest).unwrap();
    assert_eq!(mark_at(dir.path()), 2);
}

#[test]
fn commit_is_refused_if_a_final_name_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    let mut tx = Transaction::begin(dir.path(), &[]).unwrap();
    let manifest = write_part(&mut tx, 2);
    let taken = dir.path().join("rank00000-0.g1.safetensors");
    fs::write(&taken, "another saver's").unwrap();
    let error = tx.commit(&manifest).unwrap_err().to_string();
    assert!(
        error.contains("rank00000-0.g1.safetensors") && error.contains("nothing was committed")
    );
    assert_eq!(mark_at(dir.path()), 1);
    assert_eq!(fs::read(&taken).unwrap(), b"another saver's");
}

#[test]
fn clean_up_keeps_both_files_of_a_listed_shard() {
    let dir = tempfile::tempdir().unwrap();
    let (tx, _) = published(dir.path(), 7);
    die(tx);
    let [part, shard] = ["rank00000-0.safetensors.part", "rank00000-0.safetensors"];
    let bytes = fs::read(dir.path().join(part)).unwrap();
    fs::write(dir.path().join(shard), "of whom?").unwrap();
    let swept = prune(dir.path(), &Config::default()).unwrap();
    assert_eq!((swept.removed.len(), swept.renamed.len(), swept.left.len()), (0, 0, 1));
    assert!(swept.left[0].reason.contains(shard), "{swept:?}");
    assert_eq!(fs::read(dir.path().join(part)).unwrap(), bytes);
    // The next save has other names, and is in no doubt about either.
    commit(dir.path(), 8);
    assert_eq!(mark_at(dir.path()), 8);
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
}

#[test]
fn save_of_a_new_checkpoint_only_never_replaces_one() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("c");
    commit(&dir, 1);
    let exists = |error: Error| {
        assert_eq!(error.io_error().unwrap().kind(), io::ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains("manifest.json"), "{error}");
    };
    exists(Transaction::begin(&dir, &[]).unwrap().only_new().unwrap_err());
    assert_eq!(mark_at(&dir), 1);
    // Another host commits meanwhile.
    let dir = root.path().join("d");
    let mut tx = Transaction::begin(&dir, &[]).unwrap();
    tx.only_new().unwrap();
    let manifest = write_part(&mut tx, 2);
    fs::write(dir.join(names::MANIFEST), "theirs").unwrap();
    exists(tx.commit(&manifest).unwrap_err());
    assert_eq!(fs::read(dir.join(names::MANIFEST)).unwrap(), b"theirs");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
}

#[test]
fn commit_whose_sync_fails_is_not_durable() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    let (mut tx, manifest) = about_to_publish(dir.path(), 2);
    let failing = fail_call(Call::Sync, dir.path(), Errno::EIO as i32);
    let error = tx.publish(&manifest).unwrap_err();
    assert!(matches!(error, Error::NotDurable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("is committed") && text.contains("may not survive a crash"), "{text}");
    drop((tx, manifest));
    // Both checkpoints are whole, whichever a crash leaves.
    assert_eq!(mark_at(dir.path()), 2);
    assert!(dir.path().join("rank00000-0.safetensors").exists());
    // Nobody removes the earlier one's files while that is so.
    assert!(Transaction::begin(dir.path(), &[]).is_err());
    assert!(prune(dir.path(), &Config::default()).unwrap().left[0].failed);
    assert!(remove_checkpoint(dir.path(), Disposal::Remove, &Config::default()).is_err());
    assert!(dir.path().join("rank00000-0.safetensors").exists());
    drop(failing);
    commit(dir.path(), 3);
    assert_eq!(mark_at(dir.path()), 3);
}

#[test]
fn manifest_of_a_killed_save_is_synced_before_files_go() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    die(published(dir.path(), 2).0);
    let watch = watch();
    let plan = Transaction::begin(dir.path(), &[]).unwrap();
    let synced = watch.take_paths(Call::Sync);
    assert_eq!(synced.iter().filter(|synced| *synced == dir.path()).count(), 2, "before and after");
    drop(plan);
    watch.take();
    // Where there is nothing to remove, nothing is synced.
    drop(Transaction::begin(dir.path(), &[]).unwrap());
    assert!(!watch.take_paths(Call::Sync).contains(&dir.path().into()));
}

#[test]
fn killed_removal_is_durable_before_files_go() {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    fs::rename(dir.path().join(names::MANIFEST), dir.path().join(names::REMOVAL_MARK)).unwrap();
    let failing = fail_call(Call::Sync, dir.path(), Errno::EIO as i32);
    assert!(remove_checkpoint(dir.path(), Disposal::Remove, &Config::default()).is_err());
    assert!(prune(dir.path(), &Config::default()).unwrap().left[0].failed);
    assert!(dir.path().join("rank00000-0.safetensors").exists());
    drop(failing);
    prune(dir.path(), &Config::default()).unwrap();
    assert!(file_names(dir.path()).unwrap().is_empty());
}

#[test]
fn manifest_on_a_bad_sector_is_replaced() {
    // What a sector, a checksum of the file system and an NVMe disk say.
    for errno in [Errno::EIO, Errno::EBADMSG, Errno::ENODATA] {
        replace_manifest_on_a_bad_sector(errno);
    }
}

fn replace_manifest_on_a_bad_sector(errno: Errno) {
    let dir = tempfile::tempdir().unwrap();
    commit(dir.path(), 1);
    let failing = fail_call(Call::Read, &dir.path().join(names::MANIFEST), errno as i32);
    // Until the commit, it and its files stay: the disk may be read again.
    drop(Transaction::begin(dir.path(), &[]).unwrap());
    assert_eq!(file_names(dir.path()).unwrap().len(), 2);
    let swept = prune(dir.path(), &Config::default()).unwrap();
    assert!(swept.removed.is_empty() && swept.left.len() == usize::from(!swept.left.is_empty()));
    commit(dir.path(), 2);
    drop(failing);
    assert_eq!(mark_at(dir.path()), 2);
    assert_eq!(safetensors_in(dir.path()), ["rank00000-0.g1.safetensors"]);
    // A manifest that is there and cannot be reached is another matter.
    let _failing = fail_call(Call::Read, &dir.path().join(names::MANIFEST), Errno::ESTALE as i32);
    assert!(matches!(Transaction::begin(dir.path(), &[]), Err(Error::Io { .. })));
}

/// A checkpoint's path, and a directory that it is striped over.
fn striped() -> (tempfile::TempDir, std::path::PathBuf, Vec<std::path::PathBuf>) {
    let root = tempfile::tempdir().unwrap();
    let stripe = root.path().join("disk");
    fs::create_dir(&stripe).unwrap();
    let dir = root.path().join("step");
    (root, dir, vec![stripe])
}

#[test]
fn stripe_marker_is_durable_before_any_shard() {
    let (_root, dir, stripe) = striped();
    let watch = watch();
    let mut tx = Transaction::begin(&dir, &stripe).unwrap();
    let stripe_dir = stripe[0].join("step");
    assert!(watch.take_paths(Call::Sync).contains(&stripe_dir));
    let manifest = write_part(&mut tx, 1);
    tx.commit(&manifest).unwrap();
    let synced = watch.take_paths(Call::Sync);
    assert!(synced.contains(&stripe_dir) && synced.contains(&stripe[0]), "{synced:?}");
}

/// A crash must leave no stripe directory that no checkpoint's directory leads to, and no shard without a marker.
#[test]
fn stripe_directories_are_durable_after_their_checkpoint_and_gone_before_it() {
    let (root, dir, stripe) = striped();
    let stripe_dir = stripe[0].join("step");
    let watch = watch();
    let mut tx = Transaction::begin(&dir, &stripe).unwrap();
    let order = |calls: Vec<(Call, std::path::PathBuf)>, wanted: &[(Call, &Path)]| {
        let mut calls = calls.iter();
        let next = |(call, path): &(Call, &Path)| calls.any(|(c, p)| (c, &**p) == (call, path));
        assert!(wanted.iter().all(next), "{wanted:?}");
    };
    let begun = [(Call::MakeDir, &*dir), (Call::Sync, root.path()), (Call::MakeDir, &*stripe_dir)];
    order(watch.take(), &begun);
    let (part, marker) =
        (stripe_dir.join("rank00000-1.safetensors.part"), stripe_dir.join("companion.json"));
    tx.begin_files(std::slice::from_ref(&part));
    fs::write(&part, "half").unwrap();
    drop(tx);
    let gone = [
        (Call::Remove, &*part),
        (Call::Sync, &stripe_dir),
        (Call::Remove, &marker),
        (Call::RemoveDir, &stripe_dir),
        (Call::Sync, &stripe[0]),
        (Call::RemoveDir, &dir),
    ];
    order(watch.take(), &gone);
}

/// A failed save may be killed while it removes what it wrote.
#[test]
fn rollback_killed_at_any_removal_lets_the_next_save_begin() {
    use crate::sys::seam::{Outcome, on_thread};
    for removals in 0..5 {
        let (_root, dir, stripe) = striped();
        let mut tx = Transaction::begin(&dir, &stripe).unwrap();
        write_part(&mut tx, 1);
        let part = stripe[0].join("step").join("rank00000-1.safetensors.part");
        tx.begin_files(std::slice::from_ref(&part));
        fs::write(&part, "half").unwrap();
        let mut left = removals;
        let killed = on_thread(move |_, call, _| match call {
            Call::Remove | Call::RemoveDir if left == 0 => Outcome::Fail(Errno::EIO as i32),
            Call::Remove => {
                left -= 1;
                Outcome::Pass
            }
            _ => Outcome::Pass,
        });
        drop(tx);
        drop(killed);
        let begun = Transaction::begin(&dir, &stripe);
        assert!(begun.is_ok(), "after {removals} removals: {begun:?}");
    }
}

#[test]
fn stripe_directory_that_cannot_be_reached_is_an_error() {
    let (_root, dir, stripe) = striped();
    let stripe_dir = stripe[0].join("step");
    let begin = || Transaction::begin(&dir, &stripe);
    let mut tx = begin().unwrap();
    let manifest = write_part(&mut tx, 1);
    tx.commit(&manifest).unwrap();
    for errno in [Errno::EIO, Errno::ESTALE] {
        let mut tx = begin().unwrap();
        let failing = fail_call(Call::Look, &stripe_dir, errno as i32);
        assert!(matches!(tx.stripes().existing(), Err(Error::Io { .. })));
        drop(failing);
        let manifest = write_part(&mut tx, 2);
        let failing = fail_call(Call::Sync, &stripe_dir, errno as i32);
        assert!(matches!(tx.commit(&manifest), Err(Error::Io { .. })));
        drop(failing);
        // A marker that cannot be read is not taken for a missing one: the shards beside it are somebody's.
        let _failing = fail_call(Call::Open, &stripe_dir.join(names::STRIPE_MARKER), errno as i32);
        fs::create_dir_all(&stripe_dir).unwrap();
        assert!(matches!(begin(), Err(Error::Io { .. })));
    }
    assert_eq!(mark_at(&dir), 1);
}
