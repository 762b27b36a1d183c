//! Files and sectors that the system refuses to read.

use crate::common::{
    SIZES, State, assert_says, engine, errno, load_all, saved, small_config, store, verify,
};
#[cfg(debug_assertions)] // for the tests with the seam
use crate::common::{runtime, scratch, shard_of};
use crate::damage::{assert_salvages, begin_of, in_files, weight};
use fake_engines::{Twist, Twisted};
use nix::libc::EIO;
#[cfg(debug_assertions)]
use nix::libc::{EACCES, EMFILE};
use ringstow::internals::engine::{Action, Completion, Engine};
use ringstow::{Config, Error, LoadOptions, OpenOptions, Promotion, Runtime};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A sector that cannot be read.
struct BadSector(u64);

impl Twist for BadSector {
    fn wait(&mut self, inner: &mut dyn Engine, done: &mut Vec<Completion>) -> io::Result<()> {
        inner.wait(done)?;
        for completion in done {
            if let Action::Read(transfer) = &completion.op.action
                && (transfer.offset..transfer.offset + transfer.len as u64).contains(&self.0)
            {
                completion.result = Err(io::Error::from_raw_os_error(EIO));
            }
        }
        Ok(())
    }
}

/// A runtime that reads 16 KiB at once, of a disk with a bad sector.
fn with_bad_sector(at: u64) -> Runtime {
    let config = Config { block_bytes: 16_384, pool_bytes: 65_536, ..small_config() };
    let build = move || Ok(Twisted::engine(engine("portable")?, BadSector(at)));
    Runtime::with_engine(config, Arc::new(build)).unwrap()
}

#[test]
fn bad_sector_loses_its_checksum_chunk_alone() {
    let state = State::new(1, &SIZES);
    for number in [1, 2, 3] {
        let (_root, dir) = saved();
        let (_, begin) = begin_of(&dir, &small_config(), &weight(number));
        let sector = begin as u64 / 4096 * 4096;
        let runtime = with_bad_sector(sector);
        let report = verify(&runtime, &dir).unwrap();
        let [damage] = &report.damage[..] else { panic!("{:?}", report.damage) };
        assert_eq!((damage.offset, damage.bytes), (sector, 4096));
        assert!(damage.got.contains("Input/output error"), "{damage:?}");
        assert!(damage.tensors.contains(&weight(number)));
        let lost: Vec<&str> = damage.tensors.iter().map(|name| &**name).collect();
        assert_salvages(&dir, &state, &runtime, &lost);
        // Without Skip, the error names the tensor too.
        let error = load_all(&runtime, &dir).unwrap_err();
        assert_eq!(errno(&error), Some(EIO));
        assert_says(&error, &["it holds tensor", &weight(number)]);
    }
}

#[test]
fn bad_sector_is_read_from_a_copy() {
    let (root, dir) = saved();
    let copy = root.path().join("tier").join("copy");
    store().promote(&dir, &copy, Promotion::default()).unwrap();
    let (_, begin) = begin_of(&dir, &small_config(), &weight(2));
    let runtime = with_bad_sector(begin as u64 / 4096 * 4096);
    let opened = OpenOptions::of(&small_config()).copies(&[copy]).open(&dir).unwrap();
    let options = LoadOptions { runtime: Some(&runtime), ..LoadOptions::default() };
    let names = opened.tensors().iter().map(|tensor| tensor.name.clone());
    let loaded = opened.load_names(names, options).unwrap();
    let whole = load_all(&Runtime::new(small_config()).unwrap(), &dir).unwrap();
    for (name, view) in whole.tensors() {
        assert_eq!(loaded.tensor(name).unwrap().data(), view.data(), "{name}");
    }
    let used = loaded.report.moved.fallbacks.iter().find(|step| step.got.contains("copy")).unwrap();
    assert!(used.reason.contains("Input/output error"), "{used:?}");
}

#[test]
fn bad_first_sector_does_not_end_verify() {
    let (_root, dir) = saved();
    let runtime = with_bad_sector(0);
    let report = verify(&runtime, &dir).unwrap();
    assert_eq!(report.damage.len(), 1);
    assert_eq!((report.damage[0].offset, report.damage[0].tensors.len()), (0, 0));
}

/// `verify` reports this file as damaged, and nothing else; the tensors that are not in it load. Returns what is wrong.
#[track_caller]
fn assert_lost(path: &Path, dir: &Path, state: &State, runtime: &Runtime) -> String {
    let report = verify(runtime, dir).unwrap();
    let [damage] = &report.damage[..] else { panic!("{:?}", report.damage) };
    assert_eq!((&*damage.file, damage.offset), (path, 0));
    assert_eq!(report.tensors, state.tensors.len());
    let lost: Vec<&str> = damage.tensors.iter().map(|name| &**name).collect();
    assert!(lost.contains(&&*weight(2)) && lost.len() < state.tensors.len(), "{lost:?}");
    assert_salvages(dir, state, runtime, &lost);
    // Without Skip, what is in it is refused, and all else loads.
    let opened = OpenOptions::new().damaged(true).open(dir).unwrap();
    assert!(opened.load([weight(2)]).is_err());
    let intact = state.tensors.iter().find(|(name, _)| !lost.contains(&&**name)).unwrap();
    assert!(opened.load([&intact.0]).unwrap().tensor(&intact.0).unwrap().data() == intact.1);
    damage.got.clone()
}

#[cfg(debug_assertions)]
#[test]
fn file_that_cannot_be_opened_loses_its_tensors_alone() {
    use ringstow::internals::sys::seam::{Call, fail_call};
    let (_root, dir, state, runtime) = in_files(None);
    let (path, _) = begin_of(&dir, &small_config(), &weight(2));
    for (call, number) in
        [(Call::Open, EIO), (Call::Open, EACCES), (Call::Look, EIO), (Call::Look, EACCES)]
    {
        let _failing = fail_call(call, &path, number);
        let got = assert_lost(&path, &dir, &state, &runtime);
        assert!(got.contains(&format!("os error {number}")), "{got}");
        let error = load_all(&runtime, &dir).unwrap_err();
        assert_eq!(errno(&error), Some(number));
    }
    // Too many open files say nothing about this one.
    let _busy = fail_call(Call::Open, &path, EMFILE);
    let error = verify(&runtime, &dir).unwrap_err();
    assert_eq!(errno(&error), Some(EMFILE));
}

#[test]
fn link_and_anything_but_a_file_loses_its_tensors_alone() {
    type Put = fn(&Path);
    let all: [(&str, Put); 3] = [
        ("a symbolic link", |path| {
            let elsewhere = path.with_file_name("elsewhere");
            fs::rename(path, &elsewhere).unwrap();
            std::os::unix::fs::symlink(elsewhere, path).unwrap();
        }),
        ("a directory", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
        ("a FIFO", |path| {
            fs::remove_file(path).unwrap();
            nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    ];
    for (what, put) in all {
        let (_root, dir, state, runtime) = in_files(None);
        let (path, _) = begin_of(&dir, &small_config(), &weight(2));
        put(&path);
        assert_eq!(assert_lost(&path, &dir, &state, &runtime), what);
        let error = load_all(&runtime, &dir).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{error}");
        assert_says(&error, &["not a regular file", what]);
    }
}

#[cfg(debug_assertions)] // the seam exists in these builds only
#[test]
fn many_files_without_permission_are_found_in_few_passes() {
    use ringstow::internals::sys::seam::{Call, fail_if, on_thread};
    const FILES: usize = 40;
    let root = scratch();
    let dir = root.path().join("ckpt");
    let runtime = Runtime::new(Config { shard_bytes: 5000, ..small_config() }).unwrap();
    State::new(1, &[4096; FILES]).save(&runtime, &dir).unwrap();
    let number = |on: &Path| -> Option<usize> {
        on.file_stem()?.to_str()?.strip_prefix("rank00000-")?.parse().ok()
    };
    let denied = on_thread(fail_if(EACCES, move |call, on| {
        call == Call::Open && number(on).is_some_and(|number| number >= FILES / 2)
    }));
    let report = verify(&runtime, &dir).unwrap();
    assert_eq!(report.damage.len(), FILES / 2);
    let opens = denied.take_paths(Call::Open).into_iter().filter_map(|on| number(&on)).count();
    assert!(opens <= 3 * FILES, "{opens} opens");
}

/// Another process may read the file: an older step would silently lose progress.
#[cfg(debug_assertions)]
#[test]
fn latest_verified_does_not_pass_over_a_step_without_permission() {
    use ringstow::internals::sys::seam::{Call, fail_call};
    let root = scratch();
    for step in 1..3 {
        let dir = root.path().join(format!("step-{step}"));
        State::new(step, &SIZES).save(&runtime(), &dir).unwrap();
    }
    let shard = shard_of(&root.path().join("step-2"));
    let _denied = fail_call(Call::Open, &shard, EACCES);
    let error = crate::steps::latest_verified(root.path()).unwrap_err();
    assert_says(&error, &["step-2", "owner and mode"]);
}
