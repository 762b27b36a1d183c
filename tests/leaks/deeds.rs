//! What a round does. Each deed checks what it did, and leaves the world as its fields say.

use crate::common::{State, scratch, small_config};
use fastrand::Rng;
use ringstow::{Config, Error, RetainOptions, SaveHandle, Store, Wanted};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

const SIZES: [usize; 4] = [0, 4097, 12_288, 20_001];
/// Steps that may be there at once.
const PLACES: u64 = 4;

pub struct World {
    root: tempfile::TempDir,
    random: Rng,
    /// Plain; over recycled files and with another pool; striped.
    stores: [Store; 3],
    /// Which state is committed at which path.
    committed: BTreeMap<PathBuf, i64>,
    /// How often each deed was done.
    pub done: BTreeMap<&'static str, u64>,
    /// How many of them failed, as some must.
    pub failed: u64,
}

type Deed = fn(&mut World, i64);

const DEEDS: [(&str, Deed); 13] = [
    ("save", World::save),
    ("save in the background", World::save_in_background),
    ("save whose handle is dropped", World::drop_handle),
    ("save that is cancelled", World::cancel),
    ("save with a failing call", World::save_with_a_failing_call),
    ("save to a refused path", World::save_to_refused_path),
    ("save of ranks", World::save_by_ranks),
    ("save of ranks that is given up", World::give_up_ranks),
    ("load", World::load),
    ("load that is cancelled", World::cancel_load),
    ("load with a failing call", World::load_with_a_failing_call),
    ("damage", World::damage),
    ("clean-up", World::clean_up),
];

impl World {
    pub fn new(seed: u64) -> Self {
        let root = scratch();
        let stripe = vec![root.path().join("disk")];
        fs::create_dir(&stripe[0]).unwrap();
        let recycling = Config { recycle: true, pool_bytes: 16 * 4096, files: 2, ..small_config() };
        let configs = [small_config(), recycling, Config { stripe, files: 2, ..small_config() }];
        Self {
            root,
            random: Rng::with_seed(seed),
            stores: configs.map(|config| Store::new(config).unwrap()),
            committed: BTreeMap::new(),
            done: BTreeMap::new(),
            failed: 0,
        }
    }

    pub fn round(&mut self, round: u64) {
        let (name, deed) = DEEDS[self.random.usize(..DEEDS.len())];
        deed(self, round as i64 + 1);
        *self.done.entry(name).or_default() += 1;
    }

    /// One of the stores, and a path that this one alone saves to.
    fn any(&mut self) -> (Store, PathBuf) {
        let kind = self.random.usize(..self.stores.len());
        let step = self.random.u64(..PLACES);
        let path = self.root.path().join(format!("run-{kind}/step-{step}"));
        (self.stores[kind].clone(), path)
    }

    /// What is at the path is the state that was committed there last, or nothing.
    #[track_caller]
    fn check(&self, store: &Store, path: &PathBuf) {
        match (self.committed.get(path), store.load(path)) {
            (Some(step), Ok(loaded)) => {
                assert_eq!(loaded.value("step").unwrap().as_int(), Some(*step), "{path:?}");
                assert_eq!(State::new(*step, &SIZES).difference(&loaded), None, "{path:?}");
            }
            (None, Err(_)) => {}
            (step, loaded) => panic!("{path:?}: {step:?} expected, {:?}", loaded.map(drop)),
        }
    }

    /// Notes how a save ended.
    #[track_caller]
    fn settle<T>(&mut self, store: &Store, path: PathBuf, step: i64, done: ringstow::Result<T>) {
        if matches!(done, Ok(_) | Err(Error::NotDurable { .. })) {
            self.committed.insert(path.clone(), step);
        }
        self.failed += u64::from(done.is_err());
        self.check(store, &path);
    }

    fn save(&mut self, step: i64) {
        let (store, path) = self.any();
        let state = State::new(step, &SIZES);
        let done = store.save(&state.to_save().unwrap(), &path);
        assert!(done.is_ok(), "{done:?}");
        self.settle(&store, path, step, done);
    }

    fn start(&mut self, step: i64) -> (Store, PathBuf, SaveHandle) {
        let (store, path) = self.any();
        let handle = store.save_async(State::new(step, &SIZES).into_save(), &path).unwrap();
        (store, path, handle)
    }

    fn save_in_background(&mut self, step: i64) {
        let (store, path, handle) = self.start(step);
        let done = handle.result();
        assert!(done.is_ok(), "{done:?}");
        self.settle(&store, path, step, done);
    }

    fn drop_handle(&mut self, step: i64) {
        let (store, path, handle) = self.start(step);
        let job = handle.job().clone();
        drop(handle); // the save goes on
        job.wait_ended(None);
        self.settle(&store, path, step, Ok(()));
    }

    fn cancel(&mut self, step: i64) {
        let (store, path, handle) = self.start(step);
        handle.cancel();
        let done = handle.result();
        assert!(matches!(done, Ok(_) | Err(Error::Cancelled { .. })), "{done:?}");
        self.settle(&store, path, step, done);
    }

    fn save_with_a_failing_call(&mut self, step: i64) {
        let (store, path) = self.any();
        let state = State::new(step, &SIZES);
        let failing = self.fail_a_call();
        let done = store.save(&state.to_save().unwrap(), &path);
        drop(failing);
        self.settle(&store, path, step, done);
    }

    fn save_to_refused_path(&mut self, step: i64) {
        let (store, path) = self.any();
        let file = self.root.path().join("file");
        fs::write(&file, "no directory").unwrap();
        let done = store.save(&State::new(step, &SIZES).to_save().unwrap(), file.join("step-1"));
        assert!(done.is_err());
        self.settle(&store, path, step, done);
    }

    fn save_by_ranks(&mut self, step: i64) {
        let (store, path) = self.any();
        let state = State::new(step, &SIZES);
        let session = store.begin(&path, 2).unwrap();
        let share = |rank| state.share((rank, 2)).unwrap();
        let receipts = (0..2).map(|rank| store.write_rank(&share(rank), rank, &path).unwrap().0);
        let done = session.commit(receipts.collect(), state.tree());
        assert!(done.is_ok(), "{done:?}");
        self.settle(&store, path, step, done);
    }

    fn give_up_ranks(&mut self, step: i64) {
        let (store, path) = self.any();
        let state = State::new(step, &SIZES);
        let session = store.begin(&path, 2).unwrap();
        let written = store.write_rank(&state.share((0, 2)).unwrap(), 0, &path);
        assert!(written.is_ok());
        drop(session);
        self.failed += 1;
        self.check(&store, &path);
    }

    fn load(&mut self, _: i64) {
        let (store, path) = self.any();
        self.check(&store, &path);
        if self.committed.contains_key(&path) {
            assert!(store.verify(&path).unwrap().damage.is_empty());
        }
    }

    fn cancel_load(&mut self, _: i64) {
        let (store, path) = self.any();
        let Ok(handle) = store.load_async(&path) else { return };
        handle.cancel();
        let done = handle.result();
        self.failed += u64::from(done.is_err());
    }

    fn load_with_a_failing_call(&mut self, _: i64) {
        let (store, path) = self.any();
        let failing = self.fail_a_call();
        let done = store.load(&path);
        drop(failing);
        self.failed += u64::from(done.is_err());
        self.check(&store, &path);
    }

    /// A flipped bit is found, and the next save replaces the checkpoint.
    fn damage(&mut self, step: i64) {
        let (store, path) = self.any();
        let Ok(checkpoint) = store.open(&path) else { return };
        // A shard of a striped checkpoint may be elsewhere; one whose commit could not be synced keeps its `.part`.
        let shard = checkpoint.manifest().files.iter().find_map(|file| {
            let names = [file.name.clone(), format!("{}.part", file.name)];
            names.into_iter().map(|name| path.join(name)).find(|path| path.exists())
        });
        let Some(shard) = shard else { return };
        let mut file = OpenOptions::new().read(true).write(true).open(&shard).unwrap();
        let (mut byte, at) = ([0], SeekFrom::End(-1));
        file.seek(at).unwrap();
        file.read_exact(&mut byte).unwrap();
        file.seek(at).unwrap();
        file.write_all(&[byte[0] ^ 1]).unwrap();
        drop(file);
        assert!(store.load(&path).is_err(), "a flipped bit in {shard:?}");
        self.failed += 1;
        let state = State::new(step, &SIZES);
        let done = store.save(&state.to_save().unwrap(), &path);
        self.settle(&store, path, step, done);
    }

    /// Keeps the newest two of one run.
    fn clean_up(&mut self, _: i64) {
        let (store, path) = self.any();
        let run = path.parent().unwrap();
        if !run.exists() {
            return;
        }
        store.prune(run).unwrap();
        let retained = store.retain(run, &RetainOptions::new(2)).unwrap();
        self.committed.retain(|path, _| !retained.removed.contains(path));
        // What was saved last stays beside them, even if others have higher numbers.
        let left = self.committed.keys().filter(|path| path.starts_with(run)).count();
        assert_eq!(left, retained.kept.len() + retained.left.len(), "{retained:?}");
        assert!(retained.kept.len() <= 2, "{retained:?}");
        let newest = store.latest(run, &Wanted::default()).unwrap();
        assert_eq!(newest.as_ref(), self.committed.keys().rfind(|path| path.starts_with(run)));
    }

    /// One of the next calls fails.
    #[cfg(debug_assertions)]
    fn fail_a_call(&mut self) -> impl Drop + use<> {
        use ringstow::internals::sys::seam::{Outcome, in_process, nth};
        let errno = self.random.choice([5, 28, 116]).unwrap(); // EIO, ENOSPC, ESTALE
        in_process(nth(self.random.u64(1..120), Outcome::Fail(errno)))
    }

    /// The seam exists in builds with debug assertions only.
    #[cfg(not(debug_assertions))]
    fn fail_a_call(&mut self) -> impl Sized {}
}
