//! What is damaged is shown completely: each place, and the tensors that cannot be loaded for it. The rest loads.

mod refused;

use crate::common::{
    SIZES, State, assert_says, flip, load_error, names_in, runtime, saved, scratch, shard_of,
    small_config, verify,
};
use ringstow::{
    Checkpoint, Config, Damage, DamagedTensor, Error, LoadOptions, Loaded, OnCorrupt, OpenOptions,
    Runtime, Target,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn begin_of(dir: &Path, config: &Config, name: &str) -> (PathBuf, usize) {
    let checkpoint = OpenOptions::of(config).open(dir).unwrap();
    let chunk = &checkpoint.tensor(name).unwrap().chunks[0];
    let path = checkpoint.shard_paths().nth(chunk.file as usize).unwrap().to_path_buf();
    (path, chunk.begin as usize)
}

fn weight(number: usize) -> String {
    format!("layer.{number}.weight")
}

fn skip() -> LoadOptions<'static> {
    LoadOptions { on_corrupt: OnCorrupt::Skip, ..LoadOptions::default() }
}

/// Loads all that is intact.
fn salvage(dir: &Path, runtime: &Runtime) -> Loaded {
    let checkpoint = OpenOptions::of(runtime.config()).damaged(true).open(dir).unwrap();
    let names: Vec<&str> = checkpoint.tensors().iter().map(|tensor| &*tensor.name).collect();
    checkpoint.load_names(names, skip().on(runtime, &Arc::default())).unwrap()
}

fn names(damaged: &[DamagedTensor]) -> Vec<&str> {
    damaged.iter().map(|tensor| &*tensor.name).collect()
}

/// All tensors but these are as they were saved, and the report names these.
#[track_caller]
fn assert_salvages(dir: &Path, state: &State, runtime: &Runtime, lost: &[&str]) {
    let loaded = salvage(dir, runtime);
    assert_eq!(names(&loaded.report.damaged), lost);
    for (name, data) in &state.tensors {
        match loaded.tensor(name) {
            Some(tensor) => assert!(tensor.data() == data, "{name} differs"),
            None => assert!(lost.contains(&name.as_str()), "{name} is lost"),
        }
    }
    assert_eq!(loaded.tensors().count(), state.tensors.len() - lost.len());
}

#[test]
fn report_of_a_load_that_skips_counts_both_passes() {
    let (_root, dir) = saved();
    let runtime = runtime();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let names: Vec<&str> = checkpoint.tensors().iter().map(|tensor| &*tensor.name).collect();
    let bytes: Vec<usize> =
        checkpoint.tensors().iter().map(|tensor| tensor.nbytes() as usize).collect();
    let read_bytes = |options: LoadOptions<'_>| {
        let job = Arc::default();
        let loaded = checkpoint.load_names(&names, options.on(&runtime, &job)).unwrap();
        let mut memory: Vec<Vec<u8>> = bytes.iter().map(|&bytes| vec![0; bytes]).collect();
        let memory = memory.iter_mut().map(|to| Target::new(&mut to[..]));
        let targets: Vec<(&str, Target)> = names.iter().copied().zip(memory).collect();
        let filled = checkpoint.load_into(&targets, options.on(&runtime, &job)).unwrap();
        [loaded.report, filled].map(|report| {
            assert!(report.seconds.total >= report.seconds.prepare + report.seconds.read);
            report.read_bytes
        })
    };
    let once = read_bytes(LoadOptions::default());
    assert_eq!(read_bytes(skip()), once.map(|bytes| 2 * bytes));
}

#[test]
fn verify_names_file_range_and_tensors_of_each_damage() {
    let (_root, dir) = saved();
    let flipped = [(1, 0), (3, 9000)].map(|(number, at)| {
        let (path, begin) = begin_of(&dir, &small_config(), &weight(number));
        flip(&path, begin + at);
        (begin + at) / 4096 * 4096
    });
    let report = ringstow::verify(&dir).unwrap();
    assert_eq!(report.damage.len(), 2);
    for (damage, number) in report.damage.iter().zip([1, 3]) {
        assert_eq!(damage.file, shard_of(&dir));
        assert!(flipped.contains(&(damage.offset as usize)), "{damage:?}");
        assert_eq!(damage.bytes, 4096);
        assert!(damage.tensors.contains(&weight(number)), "{damage:?}");
    }
    assert!(!report.damaged_tensors().contains(&&*weight(2)));
    let error = load_error(&dir);
    assert_says(&error, &["crc32 of checksum chunk", "rank00000-0.safetensors", "in tensor"]);
    let Error::Corrupt { tensors, .. } = error else { panic!("{error}") };
    assert!(!tensors.is_empty());
}

#[test]
fn look_for_lost_tensors_takes_no_time_for_each_other_one() {
    let root = scratch();
    let dir = root.path().join("ckpt");
    State::new(1, &[1; 500]).save(&runtime(), &dir).unwrap();
    fs::write(shard_of(&dir), "cut").unwrap();
    let opened = OpenOptions::new().damaged(true).open(&dir).unwrap();
    // An error would list the names of all.
    let looked = allocation_counter::measure(|| {
        assert!(opened.tensors().iter().all(|tensor| opened.is_lost(tensor)));
    });
    assert_eq!(looked.count_total, 0);
}

#[test]
fn header_alone_hits_no_tensor() {
    let (_root, dir) = saved();
    flip(&shard_of(&dir), 20);
    let report = ringstow::verify(&dir).unwrap();
    assert_eq!(report.damage.len(), 1);
    assert!(report.damaged_tensors().is_empty());
    assert_salvages(&dir, &State::new(1, &SIZES), &runtime(), &[]);
}

#[test]
fn intact_tensors_of_a_flipped_file_load() {
    let (_root, dir) = saved();
    let (path, begin) = begin_of(&dir, &small_config(), &weight(2));
    flip(&path, begin + 5000);
    let runtime = runtime();
    assert_salvages(&dir, &State::new(1, &SIZES), &runtime, &[&weight(2)]);

    // The targets of the others are filled, that of the damaged one stays.
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let (mut lost, mut good) = (vec![7; 12_288], vec![7; 20_001]);
    let targets = [(weight(2), Target::new(&mut lost)), (weight(3), Target::new(&mut good))];
    let report = checkpoint.load_into(&targets, skip().on(&runtime, &Arc::default())).unwrap();
    drop(targets);
    assert_eq!(names(&report.damaged), [weight(2)]);
    assert_eq!((report.damaged[0].file.clone(), report.tensors), (path, 1));
    assert!(lost.iter().all(|&byte| byte == 7));
    assert!(good == State::new(1, &SIZES).tensors[3].1);
}

#[test]
fn intact_tensors_of_a_cut_file_load() {
    let state = State::new(1, &SIZES);
    for keep in [0, 4096, 4097, 20_000] {
        let (_root, dir) = saved();
        let bytes = fs::metadata(shard_of(&dir)).unwrap().len();
        let file = fs::OpenOptions::new().write(true).open(shard_of(&dir)).unwrap();
        file.set_len(keep).unwrap();
        let end = |name: &str| {
            let checkpoint = OpenOptions::new().damaged(true).open(&dir).unwrap();
            let tensor = checkpoint.tensor(name).unwrap();
            (tensor.chunks[0].begin + tensor.nbytes()).next_multiple_of(4096).min(bytes)
        };
        let lost: Vec<&str> = state
            .tensors
            .iter()
            .filter(|(name, data)| !data.is_empty() && end(name) > keep)
            .map(|(name, _)| &**name)
            .collect();
        let report = ringstow::verify(&dir).unwrap();
        let [Damage { offset, bytes: lost_bytes, tensors, .. }] = &report.damage[..] else {
            panic!("{:?}", report.damage)
        };
        assert_eq!((*offset, offset + lost_bytes), (keep / 4096 * 4096, bytes));
        assert_eq!(tensors.len(), lost.len());
        assert_salvages(&dir, &state, &runtime(), &lost);
        assert!(matches!(Checkpoint::open(&dir), Err(Error::Corrupt { .. })));
    }
}

#[test]
fn file_that_grew_is_damage_and_loses_no_tensor() {
    let (_root, dir) = saved();
    let bytes = fs::metadata(shard_of(&dir)).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(shard_of(&dir)).unwrap();
    file.set_len(bytes + 5000).unwrap();
    let report = ringstow::verify(&dir).unwrap();
    assert_eq!((report.damage.len(), report.damaged_tensors().len()), (1, 0));
    assert_salvages(&dir, &State::new(1, &SIZES), &runtime(), &[]);
}

/// A checkpoint in several files, of one process or of ranks.
fn in_files(ranks: Option<u32>) -> (tempfile::TempDir, PathBuf, State, Runtime) {
    let (root, sizes) = (scratch(), [5000, 12_288, 20_001, 30_000, 40_000]);
    let runtime = Runtime::new(Config { shard_bytes: 40_960, ..small_config() }).unwrap();
    let (dir, state) = (root.path().join("ckpt"), State::new(1, &sizes));
    match ranks {
        Some(ranks) => state.save_by_ranks(ranks, &runtime, &dir),
        None => drop(state.save(&runtime, &dir).unwrap()),
    }
    assert!(names_in(&dir).len() > 3, "{:?}", names_in(&dir));
    (root, dir, state, runtime)
}

#[test]
fn many_missing_files_are_damage_whichever_they_are_until_most_are_missing() {
    const FILES: usize = 2200;
    let root = scratch();
    let (dir, config) = (root.path().join("ckpt"), Config { shard_bytes: 1, ..small_config() });
    let runtime = Runtime::new(config).unwrap();
    State::new(1, &[1; FILES]).save(&runtime, &dir).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let shards: Vec<PathBuf> = checkpoint.shard_paths().map(Path::to_path_buf).collect();
    assert_eq!(shards.len(), FILES);
    shards[..1050].iter().for_each(|shard| fs::remove_file(shard).unwrap());
    assert_eq!(salvage(&dir, &runtime).tensors().count(), FILES - 1050);
    shards[1050..1300].iter().for_each(|shard| fs::remove_file(shard).unwrap());
    let refused = OpenOptions::of(runtime.config()).damaged(true).open(&dir).map(drop).unwrap_err();
    assert!(matches!(refused, Error::MissingFiles { .. }), "{refused}");
}

#[test]
fn missing_file_loses_its_tensors_alone() {
    for ranks in [None, Some(3)] {
        let (_root, dir, state, runtime) = in_files(ranks);
        let (path, _) = begin_of(&dir, &small_config(), &weight(2));
        let (other, begin) = begin_of(&dir, &small_config(), &weight(3));
        assert_ne!(path, other);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let number = checkpoint.shard_paths().position(|shard| shard == path).unwrap() as u32;
        let lost: Vec<&str> = checkpoint
            .tensors()
            .iter()
            .filter(|tensor| tensor.chunks.iter().any(|chunk| chunk.file == number))
            .map(|tensor| &*tensor.name)
            .collect();
        fs::remove_file(&path).unwrap();
        flip(&other, begin + 4096);

        let report = verify(&runtime, &dir).unwrap();
        assert_eq!(report.damage.len(), 2, "{:?}", report.damage);
        let missing = report.damage.iter().find(|damage| damage.file == path).unwrap();
        assert_eq!((missing.offset, &*missing.got), (0, "no such file"));
        assert_eq!(missing.tensors, lost);
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(report.problem.unwrap().contains(name));
        let all: Vec<&str> = state
            .tensors
            .iter()
            .map(|(name, _)| &**name)
            .filter(|name| lost.contains(name) || *name == weight(3))
            .collect();
        let mut found = names(&salvage(&dir, &runtime).report.damaged)
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>();
        found.sort();
        assert_eq!(found, all);

        // Without Skip, what is in the missing file is refused, and all else loads.
        let opened = OpenOptions::new().damaged(true).open(&dir).unwrap();
        let error = opened.load([weight(2)]).unwrap_err();
        assert!(matches!(error, Error::MissingFiles { .. }), "{error}");
        assert!(matches!(opened.load_part(&weight(2), &[]), Err(Error::MissingFiles { .. })));
        let intact = state.tensors.iter().find(|(name, _)| !all.contains(&&**name)).unwrap();
        let loaded = opened.load([&intact.0]).unwrap();
        assert!(loaded.tensor(&intact.0).unwrap().data() == intact.1);
        assert!(matches!(Checkpoint::open(&dir), Err(Error::MissingFiles { .. })));
    }
}

#[test]
fn failed_save_over_a_damaged_manifest_keeps_shards_that_were_never_renamed() {
    let (_root, dir) = saved();
    // A kill right after the commit.
    let part = dir.join("rank00000-0.safetensors.part");
    fs::rename(shard_of(&dir), &part).unwrap();
    flip(&dir.join("manifest.json"), 30);
    let before = fs::read(&part).unwrap();
    let job = Arc::<ringstow::Job>::default();
    job.cancel();
    State::new(2, &SIZES).save_as(&runtime(), &dir, &job).unwrap_err();
    assert!(fs::read(&part).unwrap() == before);
    let report = State::new(2, &SIZES).save(&runtime(), &dir).unwrap();
    assert_eq!(report.generation, 1);
    State::new(2, &SIZES).assert_at(&runtime(), &dir);
}

#[test]
fn skip_needs_checksums() {
    let (_root, dir) = saved();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let unchecked = LoadOptions { verify: false, ..skip() };
    let error = checkpoint.load_names([weight(1)], unchecked).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert_says(&error, &["verify = true"]);
}

#[test]
fn damaged_manifest_stays_an_error() {
    let (_root, dir) = saved();
    flip(&dir.join("manifest.json"), 30);
    assert!(matches!(OpenOptions::new().damaged(true).open(&dir), Err(Error::Corrupt { .. })));
    assert!(matches!(ringstow::verify(&dir), Err(Error::Corrupt { .. })));
}
