//! Checkpoints of several files at the same time, and over several directories: whole in all of them
//! or in none, and nobody else's files are touched.

mod pruned;
mod refused;
mod removal;

use crate::common::held::{self, made};
use crate::common::{
    SIZES, State, assert_no_litter_in, assert_says, load_all, names_in, no_values, noise,
    prune_as_planned, scratch, small_config, verify,
};
use ringstow::internals::format::names;
use ringstow::internals::store;
use ringstow::{
    Config, Disposal, Dtype, Error, LoadOptions, OpenOptions, Removed, RetainOptions, Runtime,
    SaveReport, Session, Slice, StateDict, Store, StridedTarget, Swept, Target,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run's directory and the directories that its checkpoints are striped over.
struct Disks {
    root: tempfile::TempDir,
    stripes: usize,
}

impl Disks {
    fn new(stripes: usize) -> Self {
        let root = scratch();
        (0..stripes).for_each(|n| fs::create_dir(root.path().join(format!("disk{n}"))).unwrap());
        Self { root, stripes }
    }

    fn run(&self) -> PathBuf {
        self.root.path().join("run")
    }

    /// The run's first checkpoint.
    fn dir(&self) -> PathBuf {
        self.run().join("step-1")
    }

    fn stripe(&self, number: usize) -> PathBuf {
        self.root.path().join(format!("disk{number}"))
    }

    fn companion(&self, number: usize) -> PathBuf {
        self.stripe(number).join("step-1")
    }

    fn config(&self) -> Config {
        Config { stripe: (0..self.stripes).map(|n| self.stripe(n)).collect(), ..small_config() }
    }

    fn runtime(&self) -> Runtime {
        Runtime::new(self.config()).unwrap()
    }

    /// Saves a state of this step.
    fn save(&self, step: i64) -> SaveReport {
        State::new(step, &SIZES).save(&self.runtime(), &self.dir()).unwrap()
    }

    /// The run's first checkpoint is the state of this step.
    #[track_caller]
    fn assert_holds(&self, step: i64) {
        State::new(step, &SIZES).assert_at(&self.runtime(), &self.dir());
    }

    /// Removes the run's first checkpoint.
    fn remove(&self, disposal: Disposal) -> ringstow::Result<Removed> {
        store::remove_checkpoint(&self.dir(), disposal, &self.config())
    }

    /// Prunes the run, after checking that the plan says the same.
    #[track_caller]
    fn prune(&self) -> Swept {
        prune_as_planned(&self.run(), &self.config())
    }

    /// Nothing is left of any save.
    #[track_caller]
    fn assert_empty(&self) {
        assert!(!self.dir().exists());
        for number in 0..self.stripes {
            assert_eq!(names_in(&self.stripe(number)), Vec::<String>::new());
        }
    }
}

/// A state that writes something everywhere before it fails.
fn failing() -> StateDict<'static> {
    static BYTES: [u8; 50_000] = [7; 50_000];
    let mut state = StateDict::new();
    for name in ["a", "b", "c", "d"] {
        state.bytes(name, Dtype::U8, &[50_000], &BYTES).unwrap();
    }
    let gone = made(100_000, |_, _| Err(Error::invalid("the source is gone")));
    held::add(&mut state, "gone", gone);
    state
}

#[test]
fn several_files_in_one_directory_are_one_checkpoint() {
    let root = scratch();
    let runtime = Runtime::new(Config { files: 3, ..small_config() }).unwrap();
    let state = State::new(1, &SIZES);
    let report = state.save(&runtime, root.path()).unwrap();
    assert_eq!(report.files, 3);
    assert!(report.moved.fallbacks.iter().all(|step| !step.got.contains("stripes")));
    state.assert_at(&runtime, root.path());
    let files: Vec<String> = (0..3).map(|n| format!("rank00000-{n}.safetensors")).collect();
    assert_eq!(names_in(root.path())[1..], files[..]);
    for file in files {
        let bytes = fs::read(root.path().join(file)).unwrap();
        assert!(!safetensors::SafeTensors::deserialize(&bytes).unwrap().is_empty());
    }
}

#[test]
fn striped_checkpoint_loads_from_all_its_directories() {
    let disks = Disks::new(2);
    let report = disks.save(1);
    assert_eq!(report.files, 3);
    assert_eq!(names_in(&disks.dir()), ["manifest.json", "rank00000-0.safetensors"]);
    assert_eq!(names_in(&disks.companion(0)), ["companion.json", "rank00000-1.safetensors"]);
    assert_eq!(names_in(&disks.companion(1)), ["companion.json", "rank00000-2.safetensors"]);
    let note = report.moved.fallbacks.last().unwrap();
    assert!(note.remedy.contains("striping over one disk wins nothing"), "{note:?}");

    let state = State::new(1, &SIZES);
    state.assert_at(&disks.runtime(), &disks.dir());
    let checked = verify(&disks.runtime(), &disks.dir()).unwrap();
    assert_eq!((checked.files, checked.damage.len()), (3, 0));
    let checkpoint = OpenOptions::of(&disks.config()).open(disks.dir()).unwrap();
    let stripes: Vec<String> =
        disks.config().stripe.iter().map(|s| s.display().to_string()).collect();
    assert_eq!(checkpoint.manifest().stripes, stripes);

    let mut memory: Vec<(String, Vec<u8>)> =
        state.tensors.iter().map(|(name, data)| (name.clone(), vec![0; data.len()])).collect();
    let targets: Vec<(&String, Target)> =
        memory.iter_mut().map(|(name, to)| (&*name, Target::new(to))).collect();
    let (options, runtime) = (LoadOptions::default(), disks.runtime());
    let loaded = checkpoint.load_into(&targets, options.on(&runtime, &Arc::default())).unwrap();
    assert_eq!(loaded.tensors, SIZES.len());
    drop(targets);
    assert_eq!(memory, state.tensors);
}

#[test]
fn slices_of_tensors_in_all_places_are_read_at_once() {
    let disks = Disks::new(2);
    disks.save(1);
    let state = State::new(1, &SIZES);
    let checkpoint = OpenOptions::of(&disks.config()).open(disks.dir()).unwrap();
    for verify in [true, false] {
        let mut memory: Vec<Vec<u8>> = vec![vec![0; 1500]; 3];
        let slices: Vec<Slice> = state.tensors[1..]
            .iter()
            .zip(&mut memory)
            .map(|((name, _), to)| Slice {
                name,
                chunk: 0,
                offsets: &[1000],
                lengths: &[1500],
                to: StridedTarget::new(to, 0, &[1]),
            })
            .collect();
        let options = LoadOptions { verify, ..LoadOptions::default() };
        checkpoint.read(&slices, options.on(&disks.runtime(), &Arc::default())).unwrap();
        drop(slices);
        for ((_, data), read) in state.tensors[1..].iter().zip(memory) {
            assert_eq!(read, data[1000..2500]);
        }
    }
}

#[test]
fn reader_without_stripes_learns_which_they_were() {
    let disks = Disks::new(2);
    disks.save(1);
    let error = OpenOptions::of(&Config::default()).open(disks.dir()).unwrap_err();
    assert!(matches!(error, Error::MissingFiles { .. }));
    let (one, other) =
        (disks.stripe(0).display().to_string(), disks.stripe(1).display().to_string());
    assert_says(&error, &["2 of 3 files", &one, &other, "not configured here", "RINGSTOW_STRIPE"]);
    // A disk that is not mounted is no reason to begin anew.
    let error = ringstow::latest(disks.run()).unwrap_err();
    assert!(matches!(error, Error::MissingFiles { .. }), "{error}");
    let found =
        Store::new(disks.config()).unwrap().latest(disks.run(), &Default::default()).unwrap();
    assert_eq!(found, Some(disks.dir()));

    fs::rename(disks.stripe(1), disks.root.path().join("unmounted")).unwrap();
    let error = OpenOptions::of(&disks.config()).open(disks.dir()).unwrap_err();
    assert_says(&error, &["1 of 3 files", "rank00000-2.safetensors", &other, "is not there"]);

    fs::rename(disks.root.path().join("unmounted"), disks.stripe(1)).unwrap();
    fs::remove_file(disks.companion(0).join("rank00000-1.safetensors")).unwrap();
    let error = OpenOptions::of(&disks.config()).open(disks.dir()).unwrap_err();
    assert_says(&error, &["1 of 3 files", "rank00000-1.safetensors"]);
}

#[test]
fn a_stripe_that_is_not_there_is_not_made() {
    let disks = Disks::new(1);
    fs::remove_dir(disks.stripe(0)).unwrap();
    let save = || State::new(1, &SIZES).save(&disks.runtime(), &disks.dir()).unwrap_err();
    let error = save();
    assert!(matches!(error, Error::Invalid { .. }));
    assert_says(&error, &["disk0", "is not there", "mount its disk"]);
    assert!(!disks.stripe(0).exists() && !disks.run().exists());
    fs::write(disks.stripe(0), "").unwrap();
    assert_says(&save(), &["disk0", "no directory"]);
}

#[test]
fn directories_that_are_one_are_refused() {
    let disks = Disks::new(1);
    let refused = |stripe: Vec<PathBuf>| {
        let runtime = Runtime::new(Config { stripe, ..small_config() }).unwrap();
        let error = State::new(1, &SIZES).save(&runtime, &disks.dir()).unwrap_err();
        assert_says(&error, &["lies already", "other disks"]);
    };
    fs::create_dir(disks.run()).unwrap();
    refused(vec![disks.run()]);
    let link = disks.root.path().join("link");
    std::os::unix::fs::symlink(disks.run(), &link).unwrap();
    refused(vec![disks.stripe(0), link]);
    assert_eq!(names_in(&disks.stripe(0)), Vec::<String>::new());
}

#[test]
fn save_over_a_striped_checkpoint_replaces_all_stripes() {
    let disks = Disks::new(2);
    disks.save(1);
    let report = disks.save(2);
    assert_eq!(report.generation, 1);
    disks.assert_holds(2);
    assert_no_litter_in(&disks.config(), &disks.dir());
    // One that needs a single file leaves no companion behind.
    State::new(3, &[5000]).save(&disks.runtime(), &disks.dir()).unwrap();
    State::new(3, &[5000]).assert_at(&Runtime::new(small_config()).unwrap(), &disks.dir());
    assert!(!disks.companion(0).exists() && !disks.companion(1).exists());
}

#[test]
fn failed_striped_save_leaves_only_the_old_checkpoint() {
    let disks = Disks::new(2);
    let save = || {
        let saved = store::save(&disks.runtime(), &failing(), &disks.dir(), &Arc::default());
        assert_says(&saved.unwrap_err(), &["the source is gone"]);
    };
    save();
    disks.assert_empty();
    disks.save(1);
    save();
    disks.assert_holds(1);
    assert_no_litter_in(&disks.config(), &disks.dir());
}

#[test]
fn same_named_checkpoints_share_no_stripe_directory() {
    let disks = Disks::new(1);
    disks.save(1);
    let other = disks.root.path().join("other/step-1");
    let state = State::new(2, &SIZES);
    let error = state.save(&disks.runtime(), &other).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
    assert_says(&error, &["disk0/step-1", "belongs to the checkpoint", "run/step-1"]);
    assert!(!other.exists());
    // Nor does clearing up after the one touch the other's files.
    state.save(&Runtime::new(small_config()).unwrap(), &other).unwrap();
    store::prune(&other, &disks.config()).unwrap();
    store::remove_checkpoint(&other, Disposal::Remove, &disks.config()).unwrap();
    disks.assert_holds(1);
    assert_no_litter_in(&disks.config(), &disks.dir());
}

#[test]
fn directory_without_a_marker_is_left_alone() {
    let disks = Disks::new(1);
    fs::create_dir(disks.companion(0)).unwrap();
    fs::write(disks.companion(0).join("rank00000-0.safetensors"), "theirs").unwrap();
    let error = State::new(1, &SIZES).save(&disks.runtime(), &disks.dir()).unwrap_err();
    assert_says(&error, &["disk0/step-1", "nobody's stripe directory"]);
    store::prune(disks.root.path(), &disks.config()).unwrap();
    assert_eq!(names_in(&disks.companion(0)), ["rank00000-0.safetensors"]);
    assert!(!disks.dir().exists());
}

#[test]
fn stripe_directory_is_not_a_checkpoint_or_a_target() {
    let disks = Disks::new(1);
    disks.save(1);
    assert!(store::list(&disks.stripe(0), &disks.config()).unwrap().is_empty());
    for error in [
        OpenOptions::of(&disks.config()).open(disks.companion(0)).unwrap_err(),
        OpenOptions::of(&Config::default()).foreign(true).open(disks.companion(0)).unwrap_err(),
    ] {
        assert_says(&error, &["holds shards of", "run/step-1", "give that path"]);
    }
    let runtime = Runtime::new(small_config()).unwrap();
    let error = State::new(2, &SIZES).save(&runtime, &disks.companion(0)).unwrap_err();
    assert_says(&error, &["holds shards of the checkpoint", "save to another path"]);
    assert_no_litter_in(&disks.config(), &disks.dir());
}

#[test]
fn moved_striped_checkpoint_loads_and_is_protected() {
    let disks = Disks::new(1);
    disks.save(1);
    let moved = disks.root.path().join("moved/step-1");
    fs::create_dir(moved.parent().unwrap()).unwrap();
    fs::rename(disks.dir(), &moved).unwrap();
    State::new(1, &SIZES).assert_at(&disks.runtime(), &moved);
    let error = State::new(2, &SIZES).save(&disks.runtime(), &moved).unwrap_err();
    assert_says(&error, &["which is not there", "if you moved it to", "companion.json"]);
    State::new(1, &SIZES).assert_at(&disks.runtime(), &moved);
}

#[test]
fn copy_without_stripes_does_not_read_the_originals() {
    let disks = Disks::new(1);
    disks.save(1);
    let copy = disks.root.path().join("copy/step-1");
    fs::create_dir_all(&copy).unwrap();
    for name in names_in(&disks.dir()) {
        fs::copy(disks.dir().join(&name), copy.join(&name)).unwrap();
    }
    let error = OpenOptions::of(&disks.config()).open(&copy).unwrap_err();
    assert_says(&error, &["rank00000-1.safetensors", "belongs to", "run/step-1"]);
}

#[test]
fn ranks_write_to_all_stripes_and_commit() {
    let disks = Disks::new(2);
    let state = State::new(1, &[5000, 9000, 20_001, 300, 7000, 8000, 1000]);
    for _ in 0..2 {
        state.save_by_ranks(3, &disks.runtime(), &disks.dir());
        state.assert_at(&disks.runtime(), &disks.dir());
        assert_no_litter_in(&disks.config(), &disks.dir());
    }
}

/// A rank of one tensor.
fn write_one(disks: &Disks, rank: u32) -> ringstow::Result<ringstow::Receipt> {
    let bytes = noise(u64::from(rank), 9000);
    let mut state = StateDict::new();
    state.bytes(format!("of.{rank}"), Dtype::U8, &[9000], &bytes)?;
    Store::new(disks.config())
        .unwrap()
        .write_rank(&state, rank, disks.dir())
        .map(|(receipt, _)| receipt)
}

#[test]
fn ranks_with_one_tensor_each_use_all_disks() {
    let disks = Disks::new(2);
    let session = Session::begin(disks.dir(), 3, &disks.config()).unwrap();
    let receipts = (0..3).map(|rank| write_one(&disks, rank).unwrap()).collect();
    session.commit(receipts, no_values()).unwrap();
    assert_no_litter_in(&disks.config(), &disks.dir());
    let loaded = load_all(&disks.runtime(), &disks.dir()).unwrap();
    assert_eq!(loaded.tensor("of.2").unwrap().data(), noise(2, 9000));
}

#[test]
fn stripes_unknown_to_the_coordinator_are_an_error() {
    let disks = Disks::new(1);
    let session = Session::begin(disks.dir(), 1, &Config::default()).unwrap();
    let error = write_one(&disks, 0).unwrap_err();
    assert_says(&error, &["coordinator", "disk0/step-1", "Config.stripe"]);
    drop(session);
    disks.assert_empty();
}

#[test]
fn ranks_that_never_commit_leave_nothing_in_any_place() {
    let disks = Disks::new(2);
    let session = Session::begin(disks.dir(), 3, &disks.config()).unwrap();
    let receipts: Vec<_> = (0..2).map(|rank| write_one(&disks, rank).unwrap()).collect();
    let tree = no_values();
    assert_says(&session.commit(receipts, tree).unwrap_err(), &["receipts came from 2"]);
    disks.assert_empty();
}

#[test]
fn rank_share_has_its_own_stripe_directories() {
    let disks = Disks::new(1);
    let state = State::new(1, &SIZES);
    for step in ["step-1", "step-2"] {
        let dir = disks.run().join(step).join("rank00000");
        state.save(&disks.runtime(), &dir).unwrap();
        state.assert_at(&disks.runtime(), &dir);
    }
    assert_eq!(names_in(&disks.stripe(0)), ["step-1.rank00000", "step-2.rank00000"]);
    let first = disks.root.path().join("run/step-1");
    store::remove_checkpoint(&first, Disposal::Recycle, &disks.config()).unwrap();
    assert!(!first.exists(), "the whole of one rank goes, and its companion");
    assert_eq!(names_in(&disks.stripe(0)), ["step-2.rank00000"]);
}

#[test]
fn a_link_to_a_checkpoint_finds_its_companions() {
    let disks = Disks::new(1);
    disks.save(1);
    let link: &Path = &disks.root.path().join("newest");
    std::os::unix::fs::symlink(disks.dir(), link).unwrap();
    State::new(1, &SIZES).assert_at(&disks.runtime(), link);
}
