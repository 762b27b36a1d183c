//! What holds however large a state is, told by counts and not by the clock: what is allocated grows
//! as the state does, a tensor larger than memory goes through the pool, a cancelled save ends.

#[path = "../common/nowhere.rs"]
mod nowhere;

use crate::common::{State, is_alone, names_in, rig, scratch, small_config};
use nowhere::{Endless, Sparse, boxes, items, layout, mixed, runtime, state, vast};
use ringstow::internals::format::receipt;
use ringstow::internals::store;
use ringstow::{Checkpoint, Config, Error, Job, LoadOptions, Manifest, Receipt, Runtime, Source};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Times as many allocations for ten times as many tensors, at most. Linear is ten; what doubles as it
/// grows does so a few times more.
const GROWTH_MAX: f64 = 12.0;

/// What `work` allocates on this thread for 1,000 and for 10,000 of them.
#[track_caller]
fn assert_linear(what: &str, mut work: impl FnMut(usize)) {
    work(10); // what is made once and kept
    let mut counts = [1_000, 10_000].map(|n| allocation_counter::measure(|| work(n)).count_total);
    counts[0] = counts[0].max(10); // a handful is none
    let [few, many] = counts;
    let growth = many as f64 / few as f64;
    assert!(growth <= GROWTH_MAX, "{what}: {few} allocations, for ten times as many {many}");
}

fn manifest(count: usize) -> Manifest {
    let items = items(count, mixed);
    nowhere::manifest(&items, &layout(&items))
}

/// What as many ranks wrote, a tensor each.
fn receipts(ranks: usize) -> Vec<Receipt> {
    let one = manifest(1);
    let receipt = |rank| {
        let (files, mut tensors) = (one.files.clone(), one.tensors.clone());
        tensors[0].name = nowhere::name(rank as usize);
        let (session, write) = ("a".into(), "b".into());
        let (block_bytes, apart) = (one.block_bytes, Vec::new());
        Receipt { rank, session, write, block_bytes, files, tensors, apart }
    };
    (0..ranks as u32).map(receipt).collect()
}

fn one_filler() -> Runtime {
    runtime(Config { fillers: 1, ..small_config() })
}

fn save(runtime: &Runtime, count: usize, dir: &Path) {
    store::save(runtime, &state(count, |_| 64), dir, &Arc::default()).unwrap();
}

fn load(runtime: &Runtime, dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
    // What is read from nowhere is not what was written.
    let options = LoadOptions { verify: false, ..LoadOptions::default() };
    checkpoint.load_names(names, options.on(runtime, &Arc::default())).unwrap();
}

#[test]
fn planning_allocates_in_proportion_to_the_tensors() {
    assert_linear("a layout", |n| drop(layout(&items(n, mixed))));
    assert_linear("a layout of boxes of one tensor", |n| drop(layout(&boxes(n))));
    assert_linear("a manifest", |n| {
        let text = manifest(n).encode().unwrap();
        Manifest::decode(text, Path::new("manifest.json")).unwrap();
    });
    assert_linear("receipts", |n| drop(receipt::merge(&receipts(n)).unwrap()));
}

#[test]
fn saves_and_loads_allocate_in_proportion_to_tensors() {
    let (root, runtime) = (scratch(), one_filler());
    let dir = root.path().join("to");
    assert_linear("a save", |n| save(&runtime, n, &dir));
    assert_linear("a save and a load", |n| {
        save(&runtime, n, &dir);
        load(&runtime, &dir);
    });
}

/// Heap that one more of them takes at the peak of `work`, on this thread.
fn heap_bytes_each(mut work: impl FnMut(usize)) -> u64 {
    let mut bytes_max = |n| allocation_counter::measure(|| work(n)).bytes_max;
    let [few, many] = [10_000, 20_000].map(&mut bytes_max);
    (many - few) / 10_000
}

#[test]
fn save_holds_little_memory_for_each_tensor() {
    // Beyond the state, which is the caller's. The plan takes 82; header and manifest are 400 of text.
    const SAVE_BYTES_MAX: u64 = 100;
    // The text of the earlier manifest, read for its list of files, is 193.
    const SAVE_OVER_BYTES_MAX: u64 = 230;
    let (root, runtime) = (scratch(), runtime(Config { fillers: 1, ..Config::default() }));
    let states = [10_000, 20_000].map(|n| (n, state(n, |_| 64)));
    let save = |count: usize, dir: &str| {
        let (_, state) = states.iter().find(|(n, _)| *n == count).expect("one of the two");
        let dir = root.path().join(format!("{dir}-{count}"));
        store::save(&runtime, state, &dir, &Arc::default()).unwrap();
    };
    let new = heap_bytes_each(|n| save(n, "to"));
    let over = heap_bytes_each(|n| save(n, "to"));
    assert!(new <= SAVE_BYTES_MAX, "{new} bytes a tensor at the peak of a save");
    assert!(over <= SAVE_OVER_BYTES_MAX, "{over} bytes a tensor at the peak of a save over it");
}

#[test]
fn an_open_checkpoint_holds_little_of_a_tensor() {
    // 414 with the text that it is read from, 142 once it is read.
    const OPEN_BYTES_MAX: u64 = 480;
    const KEPT_BYTES_MAX: i64 = 170;
    let texts = [10_000, 20_000].map(|n| (n, manifest(n).encode().unwrap()));
    let read = |count: usize| {
        let (_, text) = texts.iter().find(|(n, _)| *n == count).expect("one of the two");
        Manifest::decode(text.clone(), Path::new("manifest.json")).unwrap()
    };
    let peak = heap_bytes_each(|n| drop(read(n)));
    let mut kept = None;
    let kept_bytes =
        allocation_counter::measure(|| kept = Some(read(10_000))).bytes_current / 10_000;
    assert!(peak <= OPEN_BYTES_MAX, "{peak} bytes a tensor at the peak of opening");
    assert!(kept_bytes <= KEPT_BYTES_MAX, "{kept_bytes} bytes a tensor kept");
}

#[test]
fn a_block_takes_a_handful_of_allocations() {
    const EACH_MAX: u64 = 10;
    let (root, runtime) = (scratch(), one_filler());
    let dir = root.path().join("to");
    let count = |blocks: u64| {
        let state = vast(Box::new(Sparse(blocks * 4096)));
        let save = || drop(store::save(&runtime, &state, &dir, &Arc::default()).unwrap());
        save();
        allocation_counter::measure(save).count_total
    };
    let (few, many) = (count(100), count(1_100));
    assert!(many <= few + 1_000 * EACH_MAX, "100 blocks: {few} allocations, 1,100 blocks: {many}");
}

/// A place for a tensor of 64 GB, and how large it may be there.
fn place() -> (Result<Endless, tempfile::TempDir>, u64) {
    match Endless::new() {
        Ok(endless) => (Ok(endless), 64_000_000_000),
        Err(why) => {
            rig::missing(&format!("1 GB in place of 64, as only root can mount a ramfs: {why}"));
            (Err(scratch()), 1_000_000_000)
        }
    }
}

fn path_of(place: &Result<Endless, tempfile::TempDir>) -> &Path {
    match place {
        Ok(endless) => endless.path(),
        Err(scratch) => scratch.path(),
    }
}

/// A pool of 16 MiB.
fn small_pool() -> Runtime {
    runtime(Config { pool_bytes: 16 << 20, fillers: 2, ..Config::default() })
}

/// Runs a test on a thread of its own, since a mount namespace is a thread's.
fn apart(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        if let Err(panic) = scope.spawn(test).join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// A line of `/proc/self/status`, in bytes.
#[cfg(target_os = "linux")]
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() << 10
}

#[cfg(target_os = "linux")]
#[test]
fn tensor_larger_than_memory_fits_a_16_mib_pool() {
    if !is_alone("scale::tensor_larger_than_memory_fits_a_16_mib_pool") {
        return;
    }
    /// The pool, and what is kept of each block.
    const GROWTH_BYTES_MAX: u64 = 128 << 20;
    apart(|| {
        let (place, bytes) = place();
        let dir = path_of(&place).join("vast");
        // Makes VmHWM start anew.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = status("VmRSS");
        let state = vast(Box::new(Sparse(bytes)));
        let report = store::save(&small_pool(), &state, &dir, &Arc::default()).unwrap();
        assert_eq!((report.tensor_bytes, report.pool_bytes), (bytes, 16 << 20));
        let grown = status("VmHWM").saturating_sub(before);
        assert!(grown <= GROWTH_BYTES_MAX, "{grown} bytes more at the peak");
        assert_eq!(Checkpoint::open(&dir).unwrap().tensors()[0].nbytes(), bytes);
    });
}

/// Cancels the save that reads it, at its `at`th piece.
struct Cancelling {
    bytes: u64,
    at: usize,
    read: Arc<AtomicUsize>,
    job: Arc<Job>,
}

impl Source for Cancelling {
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, _: usize, _: &mut [u8]) -> ringstow::Result<()> {
        if self.read.fetch_add(1, Relaxed) + 1 == self.at {
            self.job.cancel();
        }
        Ok(())
    }
}

#[test]
fn cancelled_huge_save_ends_and_keeps_the_old() {
    /// Pieces that are read of a block, of which each filler finishes one.
    const PIECES: usize = 16;
    apart(|| {
        let (place, bytes) = place();
        let (dir, runtime) = (path_of(&place).join("vast"), small_pool());
        save(&runtime, 3, &dir);
        let names = names_in(&dir);
        for dir in [dir.clone(), path_of(&place).join("new")] {
            let (job, read) = (Arc::<Job>::default(), Arc::<AtomicUsize>::default());
            let source = Cancelling { bytes, at: 1_000, read: read.clone(), job: job.clone() };
            let error = store::save(&runtime, &vast(Box::new(source)), &dir, &job);
            assert!(matches!(error, Err(Error::Cancelled { .. })), "{error:?}");
            let pieces = read.load(Relaxed);
            assert!((1_000..=1_000 + 2 * PIECES).contains(&pieces), "{pieces} pieces were read");
        }
        assert_eq!(names_in(&dir), names);
        assert_eq!(Checkpoint::open(&dir).unwrap().tensors().len(), 3);
        assert!(!path_of(&place).join("new").exists());
    });
}

/// Ends the threads that spin, also when the test fails.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn a_save_while_every_core_is_busy_is_whole() {
    let (root, runtime) = (scratch(), crate::common::runtime());
    let (dir, wanted) = (root.path().join("busy"), State::new(1, &[1, 4096, 1_000_003, 65_536]));
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ended = Ended(&ended);
        for _ in 0..2 * cores {
            scope.spawn(|| {
                while !ended.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        wanted.save(&runtime, &dir).unwrap();
    });
    wanted.assert_at(&runtime, &dir);
    let check = store::verify(&runtime, &dir, &Arc::default()).unwrap();
    assert!(check.damage.is_empty(), "{:?}", check.damage);
}
