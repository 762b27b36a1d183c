//! A checkpoint loses the part that it is slimmed by, whole or not at all, and nothing else.

use crate::common::held::Filled;
use crate::common::{
    EXTRA, State, assert_no_litter_in, assert_says, copy_dir, held, is_extra, load_all,
    load_opened, names_in, runtime, shards_in, small_config,
};
use ringstow::internals::store;
use ringstow::{
    Checkpoint, Config, Dtype, Error, LoadOptions, OpenOptions, Result, Runtime, Slimmed,
    StateDict, Store, Value,
};
use std::path::Path;

const SIZES: [usize; 2] = [9_000, 5];

fn slim(dir: &Path, config: &Config) -> Result<Slimmed> {
    store::slim(dir, &[EXTRA.to_owned()], config)
}

/// A run with a checkpoint of step 1 that has the extra part.
fn saved(runtime: &Runtime) -> (tempfile::TempDir, std::path::PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    State::new(1, &SIZES).save_with_extra(runtime, &dir).unwrap();
    (root, dir)
}

#[test]
fn slimmed_checkpoint_has_everything_but_that_part_and_frees_its_files() {
    let runtime = runtime();
    let (_root, dir) = saved(&runtime);
    let before = names_in(&dir);
    assert_eq!(
        load_all(&runtime, &dir).unwrap().tensors().filter(|(name, _)| is_extra(name)).count(),
        2
    );

    let done = slim(&dir, &small_config()).unwrap();
    assert_eq!((done.tensors, done.names), (2, vec![EXTRA.to_owned()]));
    assert!(done.file_bytes > 30_000 && done.left.is_empty());
    let after = names_in(&dir);
    assert_eq!(before.len() - after.len(), done.removed.len());
    assert!(after.iter().all(|name| before.contains(name)));
    State::new(1, &SIZES).assert_at(&runtime, &dir);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert!(!checkpoint.tensors().iter().any(|tensor| is_extra(&tensor.name)));
    assert!(checkpoint.value("extra.lr").is_err());
    assert_eq!(checkpoint.manifest().dropped, [EXTRA]);
    assert!(ringstow::verify(&dir).unwrap().damage.is_empty());

    let again = slim(&dir, &small_config()).unwrap();
    assert_eq!((again.tensors, again.names.len(), again.removed.len()), (0, 0, 0));
    State::new(2, &SIZES).save(&runtime, &dir).unwrap();
    State::new(2, &SIZES).assert_at(&runtime, &dir);
    assert_no_litter_in(&small_config(), &dir);
}

#[test]
fn part_that_shares_files_is_not_dropped() {
    let runtime = runtime();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    let mut state = StateDict::new();
    state.slice("model.w", &[4], &[1f32; 4]).unwrap().slice("extra.m", &[4], &[2f32; 4]).unwrap();
    store::save(&runtime, &state, &dir, &Default::default()).unwrap();
    let before = std::fs::read(dir.join("manifest.json")).unwrap();
    let error = slim(&dir, &small_config()).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("droppable"), "{error}");
    assert_eq!(std::fs::read(dir.join("manifest.json")).unwrap(), before);
}

#[test]
fn checkpoint_in_use_or_absent_is_refused_with_the_reason() {
    let runtime = runtime();
    let (root, dir) = saved(&runtime);
    let session = ringstow::Store::found().unwrap().begin(&dir, 1).unwrap();
    assert!(matches!(slim(&dir, &small_config()), Err(Error::Busy { .. })));
    drop(session);
    let absent = root.path().join("step-2");
    let error = slim(&absent, &small_config()).unwrap_err();
    assert!(error.to_string().contains("step-2"), "{error}");
    assert!(!absent.exists());
    let link = root.path().join("newest");
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    assert!(matches!(slim(&link, &small_config()), Err(Error::Invalid { .. })));
    for name in ["", "extra.", "layer.9", "extr"] {
        let error = store::slim(&dir, &[name.to_owned()], &small_config()).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{name}: {error}");
    }
    State::new(1, &SIZES).assert_at(&runtime, &dir);
}

#[test]
fn striped_checkpoint_frees_its_files_on_all_disks() {
    let (disk, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = Config { stripe: vec![disk.path().into()], files: 2, ..small_config() };
    let runtime = Runtime::new(config.clone()).unwrap();
    let dir = root.path().join("step-1");
    State::new(1, &SIZES).save_with_extra(&runtime, &dir).unwrap();
    let on_disk = names_in(&disk.path().join("step-1")).len();
    let done = slim(&dir, &config).unwrap();
    assert!(done.removed.iter().any(|path| path.starts_with(disk.path())), "{done:?}");
    assert!(names_in(&disk.path().join("step-1")).len() < on_disk);
    State::new(1, &SIZES).assert_at(&runtime, &dir);
}

#[test]
fn checkpoint_opened_before_loads_the_rest_and_says_what_slim_dropped() {
    let runtime = runtime();
    let (_root, dir) = saved(&runtime);
    let opened = Checkpoint::open(&dir).unwrap();
    slim(&dir, &small_config()).unwrap();
    let options = || LoadOptions::default();
    let rest = opened.tensors().iter().map(|tensor| tensor.name.as_str());
    let rest = opened.load_names(rest.filter(|name| !is_extra(name)), options()).unwrap();
    State::new(1, &SIZES).assert_equals(&rest);
    for error in
        [load_opened(&runtime, &opened).unwrap_err(), opened.load_part("extra.a", &[]).unwrap_err()]
    {
        assert!(matches!(&error, Error::Slimmed { dropped, .. } if dropped == &[EXTRA]), "{error}");
        assert_says(&error, &["`slim` has dropped extra from", "open it again"]);
    }
    State::new(2, &SIZES).save(&runtime, &dir).unwrap();
    let error = opened.load(["layer.0.weight"]).unwrap_err();
    assert!(matches!(error, Error::Replaced { .. }), "{error}");
}

#[test]
fn files_of_all_ranks_go() {
    let runtime = runtime();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    State::new(1, &SIZES).save_with_extra_by_ranks(&runtime, &dir).unwrap();
    let opened = Checkpoint::open(&dir).unwrap();
    assert_eq!(opened.tensors().iter().filter(|tensor| is_extra(&tensor.name)).count(), 3);
    let done = slim(&dir, &small_config()).unwrap();
    assert_eq!((done.tensors, done.left.len()), (3, 0));
    for rank in ["rank00000", "rank00001"] {
        let is_own = |path: &&std::path::PathBuf| path.to_string_lossy().contains(rank);
        assert!(done.removed.iter().any(|path| is_own(&path)), "{rank}: {done:?}");
    }
    State::new(1, &SIZES).assert_at(&runtime, &dir);
    assert!(Checkpoint::open(&dir).unwrap().value("extra.lr").is_err());
    assert_no_litter_in(&small_config(), &dir);
}

#[test]
fn striped_checkpoint_of_ranks_frees_its_files_on_every_disk() {
    let disks = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let root = tempfile::tempdir().unwrap();
    let stripe = disks.iter().map(|disk| disk.path().into()).collect();
    let config = Config { stripe, files: 3, ..small_config() };
    let runtime = Runtime::new(config.clone()).unwrap();
    let dir = root.path().join("step-1");
    State::new(1, &[9000, 8000, 7000, 6000, 5000, 4000])
        .save_with_extra_by_ranks(&runtime, &dir)
        .unwrap();
    let done = slim(&dir, &config).unwrap();
    for place in [root.path(), disks[0].path(), disks[1].path()] {
        assert!(done.removed.iter().any(|path| path.starts_with(place)), "{done:?}");
    }
    let kept = OpenOptions::of(&config).open(&dir).unwrap();
    kept.load(kept.tensors().iter().map(|tensor| &tensor.name)).unwrap();
    assert_no_litter_in(&config, &dir);
}

/// Commits what two ranks wrote with these parts apart.
fn commit_apart(apart: [&[&str]; 2]) -> Result<()> {
    let (runtime, root) = (runtime(), tempfile::tempdir().unwrap());
    let dir = root.path().join("step-1");
    let session = Store::found()?.begin(&dir, 2)?;
    let write = |rank: u32| -> Result<_> {
        let (mut state, name) = (StateDict::new(), ["model.w", "opt.m"][rank as usize]);
        state.bytes(name, Dtype::U8, &[3], &[7; 3])?;
        for name in apart[rank as usize] {
            state.droppable(*name);
        }
        Ok(store::write_rank(&runtime, &state, rank, &dir, &Default::default())?.0)
    };
    let receipts = vec![write(0)?, write(1)?];
    session.commit(receipts, Value::Dict(Vec::new()).to_json()?).map(drop)
}

#[test]
fn ranks_that_set_other_parts_apart_or_one_that_is_absent_do_not_commit() {
    commit_apart([&["opt"], &["opt"]]).unwrap();
    let error = commit_apart([&["opt"], &[]]).unwrap_err();
    assert_says(&error, &["rank 0 set [\"opt\"] apart, rank 1 []", "same parts"]);
    let error = commit_apart([&["optimiser"], &["optimiser"]]).unwrap_err();
    assert_says(&error, &["nothing named \"optimiser\"", "to be droppable"]);
}

/// Saves two states with tensors that both parts, or a part and the model, refer to under the part's name.
fn tied(dir: &Path) {
    let mut state = StateDict::new();
    for name in ["opt.w", "opt.m", "opt.e"] {
        held::add(&mut state, name, Filled { byte: 1, bytes: 5000 });
    }
    let tree = r#"{"opt":{"w":{"$tensor":"opt.w"},"m":{"$tensor":"opt.m"},"e":{"$tensor":"opt.e"}},"ema":{"e":{"$tensor":"opt.e"}},"model":{"w":{"$tensor":"opt.w"}}}"#;
    state.set_tree(serde_json::value::RawValue::from_string(tree.into()).unwrap());
    state.droppable("opt").droppable("ema");
    store::save(&runtime(), &state, dir, &Default::default()).unwrap();
}

#[test]
fn tensor_that_the_model_shares_with_the_part_keeps_no_file_of_the_part() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step-1");
    tied(&dir);
    let drop = |name: &str| store::slim(&dir, &[name.to_owned()], &small_config());
    let done = drop("opt").unwrap();
    assert_eq!(done.tensors, 1);
    let left: u64 =
        Checkpoint::open(&dir).unwrap().manifest().files.iter().map(|file| file.bytes).sum();
    assert!(done.file_bytes > 5000 && left < 2 * (5000 + 4096 + 1), "{left} bytes stay");
    let done = drop("ema").unwrap();
    assert_eq!((done.tensors, done.removed.len()), (1, 1), "what only the two parts shared");
    assert_eq!(Checkpoint::open(&dir).unwrap().tensors().len(), 1);
}

#[test]
fn file_that_a_killed_call_left_goes_at_the_next() {
    let runtime = runtime();
    let (_root, dir) = saved(&runtime);
    let all = tempfile::tempdir().unwrap();
    copy_dir(&dir, all.path());
    let removed = slim(&dir, &small_config()).unwrap().removed;
    for path in &removed {
        std::fs::copy(all.path().join(path.file_name().unwrap()), path).unwrap();
    }
    let again = slim(&dir, &small_config()).unwrap();
    assert_eq!((again.names.len(), &again.removed), (0, &removed));
    assert!(!removed.iter().any(|path| path.exists()));
}

#[test]
fn manifest_keeps_mode_and_time_of_its_file() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let runtime = runtime();
    let (_root, dir) = saved(&runtime);
    let manifest = dir.join("manifest.json");
    std::fs::set_permissions(&manifest, std::fs::Permissions::from_mode(0o604)).unwrap();
    let before = std::fs::metadata(&manifest).unwrap();
    slim(&dir, &small_config()).unwrap();
    let after = std::fs::metadata(&manifest).unwrap();
    let of = |file: &std::fs::Metadata| (file.mode(), file.mtime(), file.mtime_nsec(), file.uid());
    assert_eq!(of(&before), of(&after));
    assert_ne!(before.ino(), after.ino());
}

#[test]
fn share_of_one_rank_and_checkpoint_that_lacks_files_stay_as_they_are() {
    let runtime = runtime();
    let (_root, dir) = saved(&runtime);
    std::fs::rename(&shards_in(&dir)[0], dir.join("elsewhere")).unwrap();
    assert!(matches!(slim(&dir, &small_config()), Err(Error::MissingFiles { .. })));
    let whole = dir.with_file_name("step-2");
    State::new(1, &SIZES).save_alone((0, 2), "a", &runtime, &whole);
    assert!(matches!(
        slim(&whole.join("rank00000"), &small_config()),
        Err(Error::Unsupported { .. })
    ));
}
