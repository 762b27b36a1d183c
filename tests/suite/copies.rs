//! A checkpoint that has copies: what is missing or damaged in one is read from another.

use crate::common::{flip, held, shards_in};
use ringstow::internals::store::claim;
use ringstow::{Checkpoint, Config, Error, LoadOptions, Loaded, StateDict, Store};
use std::fs;
use std::path::{Path, PathBuf};

const BYTES: usize = 3 << 20;

/// Two tiers, and a step in each.
struct Tiers {
    dir: tempfile::TempDir,
    store: Store,
}

impl Tiers {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tiers = vec![dir.path().join("shared")];
        let config = Config { shard_bytes: 4 << 20, files: 1, tiers, ..Config::default() };
        let tiers = Self { dir, store: Store::new(config).unwrap() };
        tiers.save(1);
        tiers.store.promote(tiers.here(), tiers.there(), ringstow::Promotion::default()).unwrap();
        tiers
    }

    fn save(&self, seed: u8) {
        let mut state = StateDict::new();
        for (number, name) in ["a", "b", "c"].into_iter().enumerate() {
            held::add(&mut state, name, bytes_of(seed + number as u8));
        }
        let config = Config { tiers: Vec::new(), ..self.store.config().clone() };
        Store::new(config).unwrap().save(&state, self.here()).unwrap();
    }

    fn here(&self) -> PathBuf {
        self.dir.path().join("run/step-1")
    }

    fn there(&self) -> PathBuf {
        self.dir.path().join("shared/step-1")
    }

    fn load(&self) -> Result<Loaded, Error> {
        self.store.load(self.here())
    }
}

fn bytes_of(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at / 4096) as u8 ^ seed).collect()
}

fn check(loaded: &Loaded) {
    for (number, name) in ["a", "b", "c"].into_iter().enumerate() {
        assert_eq!(loaded.tensor(name).unwrap().data(), bytes_of(1 + number as u8), "{name}");
    }
}

#[test]
fn each_damaged_chunk_is_read_from_the_copy_that_has_it() {
    let tiers = Tiers::new();
    let (here, there) = (shards_in(&tiers.here()), shards_in(&tiers.there()));
    assert!(here.len() > 1 && here.len() == there.len());
    flip(&here[0], 100 << 10);
    flip(&there[0], 2500 << 10);
    flip(&there[1], 100 << 10);
    let loaded = tiers.load().unwrap();
    check(&loaded);
    let used = &loaded.report.moved.fallbacks;
    let [used] = used.iter().filter(|step| step.got.contains("copy")).collect::<Vec<_>>()[..]
    else {
        panic!("one file, once: {used:?}")
    };
    assert_eq!(used.wanted, here[0].display().to_string());
    assert!(used.got.ends_with(&there[0].display().to_string()), "{}", used.got);
    assert!(used.reason.contains("crc32"), "{}", used.reason);
    assert_eq!(loaded.report.path, tiers.here());
}

#[test]
fn missing_and_cut_files_are_read_from_the_copy() {
    let tiers = Tiers::new();
    let here = shards_in(&tiers.here());
    fs::remove_file(&here[0]).unwrap();
    fs::File::options().write(true).open(&here[1]).unwrap().set_len(1 << 20).unwrap();
    assert!(Checkpoint::open(tiers.here()).is_err(), "without tiers");
    check(&tiers.load().unwrap());
    let opened = tiers.store.open(tiers.here()).unwrap();
    check(&opened.load_names(["a", "b", "c"], LoadOptions::default()).unwrap());
}

#[test]
fn what_is_removed_after_the_open_is_read_from_the_copy() {
    let remove: [fn(&Path); 3] = [
        |here| fs::remove_file(&shards_in(here)[0]).unwrap(),
        |here| drop(ringstow::remove(here, ringstow::Disposal::Remove).unwrap()),
        |here| {
            ringstow::remove(here, ringstow::Disposal::Remove).unwrap();
            fs::create_dir(here).unwrap(); // another program's, or a save that begins
        },
    ];
    for remove in remove {
        let tiers = Tiers::new();
        let opened = tiers.store.open(tiers.here()).unwrap();
        let alone = Checkpoint::open(tiers.here()).unwrap();
        remove(&tiers.here());
        let load = |opened: &Checkpoint| opened.load_names(["a", "b", "c"], LoadOptions::default());
        let loaded = load(&opened).unwrap();
        check(&loaded);
        let used = &loaded.report.moved.fallbacks;
        assert!(used.iter().any(|step| step.reason.contains("was removed")), "{used:?}");
        let error = load(&alone).unwrap_err();
        assert_eq!(
            matches!(error, Error::MissingFiles { .. }),
            tiers.here().join("manifest.json").exists(),
            "{error}"
        );
    }
}

/// The copy was made by hand, so that another save there has the same names.
#[test]
fn copy_that_another_save_has_replaced_is_never_read() {
    let tiers = Tiers::new();
    let copy = |to: &Path| {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(tiers.here()).unwrap() {
            let from = entry.unwrap().path();
            fs::copy(&from, to.join(from.file_name().unwrap())).unwrap();
        }
    };
    fs::remove_dir_all(tiers.there()).unwrap();
    copy(&tiers.there());
    let opened = tiers.store.open(tiers.here()).unwrap();
    fs::remove_dir_all(tiers.here()).unwrap();
    let load = |verify| {
        opened.load_names(["a", "b", "c"], LoadOptions { verify, ..LoadOptions::default() })
    };
    check(&load(false).unwrap());
    fs::remove_dir_all(tiers.there()).unwrap();
    tiers.save(7);
    copy(&tiers.there());
    fs::remove_dir_all(tiers.here()).unwrap();
    for verify in [false, true] {
        let error = load(verify).unwrap_err();
        assert!(matches!(error, Error::Replaced { .. }), "{error:?}");
    }
}

#[test]
fn copy_of_the_same_run_is_loaded_if_the_checkpoint_cannot_be_opened() {
    let tiers = Tiers::new();
    let [run, shared] = ["run", "shared"].map(|name| tiers.dir.path().join(name));
    let name = claim(&run, None).unwrap();
    claim(&shared, Some(&name)).unwrap();
    flip(&tiers.here().join("manifest.json"), 40);
    assert_eq!(tiers.load().unwrap().report.path, tiers.there());
    fs::remove_dir_all(tiers.here()).unwrap();
    let loaded = tiers.load().unwrap();
    check(&loaded);
    assert_eq!(loaded.report.path, tiers.there());
}

#[test]
fn checkpoint_of_another_run_is_never_loaded_instead() {
    let tiers = Tiers::new();
    let new = tiers.dir.path().join("new/step-1");
    assert!(tiers.store.load(&new).is_err(), "a directory of which nothing is known");
    claim(&tiers.dir.path().join("shared"), None).unwrap();
    fs::create_dir_all(&new).unwrap();
    assert!(tiers.store.load(&new).is_err());
    claim(new.parent().unwrap(), None).unwrap();
    assert!(tiers.store.load(&new).is_err(), "another run");
}

#[test]
fn cut_file_is_read_as_far_as_it_goes() {
    let tiers = Tiers::new();
    let (here, there) = (shards_in(&tiers.here()), shards_in(&tiers.there()));
    let bytes = fs::metadata(&here[0]).unwrap().len();
    fs::File::options().write(true).open(&here[0]).unwrap().set_len(bytes - 1).unwrap();
    flip(&there[0], 100 << 10);
    check(&tiers.load().unwrap());
}

#[test]
fn slimmed_checkpoint_is_read_from_a_copy_that_is_not() {
    let tiers = Tiers::new();
    let mut state = StateDict::new();
    for (number, name) in ["a", "b", "c"].into_iter().enumerate() {
        held::add(&mut state, name, bytes_of(1 + number as u8));
    }
    state.droppable("a");
    let alone = Store::new(Config::default()).unwrap();
    let (here, there) = (tiers.dir.path().join("run/s"), tiers.dir.path().join("shared/s"));
    alone.save(&state, &here).unwrap();
    alone.promote(&here, &there, ringstow::Promotion::default()).unwrap();
    alone.slim(&here, &["a".into()]).unwrap();
    flip(&shards_in(&here)[0], 100 << 10);
    let loaded = tiers.store.load(&here).unwrap();
    assert_eq!(loaded.tensor("c").unwrap().data(), bytes_of(3));
    assert!(loaded.tensor("a").is_none());
}

#[test]
fn only_chunks_that_no_copy_has_are_damaged() {
    let tiers = Tiers::new();
    let (here, there) = (shards_in(&tiers.here()), shards_in(&tiers.there()));
    flip(&here[0], 100 << 10);
    flip(&there[0], 100 << 10);
    flip(&here[0], 2500 << 10);
    let opened = tiers.store.open(tiers.here()).unwrap();
    let damaged = opened.damaged(["a", "b", "c"], LoadOptions::default()).unwrap();
    assert_eq!(damaged.iter().map(|one| one.offset).collect::<Vec<_>>(), [0]);
}

#[test]
fn what_no_copy_has_is_an_error_of_the_checkpoint_itself() {
    let tiers = Tiers::new();
    let (here, there) = (shards_in(&tiers.here()), shards_in(&tiers.there()));
    flip(&here[0], 100 << 10);
    flip(&there[0], 200 << 10); // the same checksum chunk
    match tiers.load() {
        Err(Error::Corrupt { path, tensors, .. }) => {
            assert_eq!(path, here[0]);
            assert_eq!(tensors.to_vec(), ["a"]);
        }
        other => panic!("{other:?}"),
    }
    fs::remove_dir_all(tiers.there()).unwrap();
    assert!(matches!(tiers.load(), Err(Error::Corrupt { .. })));
    fs::remove_dir_all(tiers.here()).unwrap();
    assert!(matches!(tiers.load(), Err(Error::Io { path, .. }) if path == tiers.here()));
}

#[test]
fn nothing_is_read_from_another_checkpoint_of_the_same_name() {
    let tiers = Tiers::new();
    tiers.save(9); // the copy is older
    flip(&shards_in(&tiers.here())[0], 100 << 10);
    assert!(matches!(tiers.load(), Err(Error::Corrupt { .. })));
}

#[test]
fn whole_checkpoint_needs_no_copy() {
    let tiers = Tiers::new();
    fs::write(tiers.there().join("manifest.json"), "not looked at").unwrap();
    let loaded = tiers.load().unwrap();
    check(&loaded);
    assert!(!loaded.report.moved.fallbacks.iter().any(|step| step.got.contains("copy")));
}
