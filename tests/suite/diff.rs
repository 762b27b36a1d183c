//! How two checkpoints differ, whatever their layouts: by checksums where these decide, and by bytes elsewhere.

use crate::common::{SIZES, State, flip, runtime, scratch, shard_of, small_config, store};
use ringstow::internals::store::diff;
use ringstow::{Checkpoint, Config, DiffReport, Dtype, Error, Runtime, StateDict};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn weight(number: usize) -> String {
    format!("layer.{number}.weight")
}

#[track_caller]
fn compare(a: &Path, b: &Path, values: bool) -> DiffReport {
    diff(&runtime(), (a, b), values, &Arc::default()).unwrap()
}

fn differing(report: &DiffReport) -> Vec<&str> {
    report.differing.iter().map(|tensor| &*tensor.name).collect()
}

/// Two directories, and a state to save there.
fn scene() -> (tempfile::TempDir, PathBuf, PathBuf, State) {
    let root = scratch();
    let (a, b) = (root.path().join("a"), root.path().join("b"));
    (root, a, b, State::new(1, &SIZES))
}

#[test]
fn equal_layouts_are_compared_without_reading() {
    let (_root, a, b, state) = scene();
    state.save(&runtime(), &a).unwrap();
    state.save(&runtime(), &b).unwrap();
    let report = compare(&a, &b, false);
    assert!(report.is_equal(), "{report:?}");
    assert_eq!((report.read_bytes, report.equal_tensors), (0, SIZES.len()));
    // Not even the files need to be intact: that is what verify finds.
    flip(&shard_of(&b), 9000);
    assert!(compare(&a, &b, false).is_equal());
}

#[test]
fn changed_elements_are_found_in_each_tensor() {
    for (changed, &bytes) in SIZES.iter().enumerate().skip(1) {
        let (_root, a, b, mut state) = scene();
        state.save(&runtime(), &a).unwrap();
        let data = &mut state.tensors[changed].1;
        let middle = data.len() / 2;
        data[middle] = data[middle].wrapping_add(2);
        data[0] ^= 1;
        state.save(&runtime(), &b).unwrap();
        let report = compare(&a, &b, false);
        assert_eq!(differing(&report), [weight(changed)]);
        assert!(!report.is_equal());
        assert_eq!(report.equal_tensors, SIZES.len() - 1);
        assert!(report.differing[0].elements.is_none());
        let report = compare(&a, &b, true);
        let elements = report.differing[0].elements.as_ref().unwrap();
        assert_eq!((elements.differing, elements.elements), (2, bytes as u64));
        assert!(elements.max_abs.unwrap() >= 1.0);
    }
}

#[test]
fn chunk_that_holds_only_the_tensor_decides_without_reading() {
    let (_root, a, b, mut state) = scene();
    state.save(&runtime(), &a).unwrap();
    state.tensors[2].1[6000] ^= 1;
    state.save(&runtime(), &b).unwrap();
    let report = compare(&a, &b, false);
    assert_eq!((differing(&report), report.read_bytes), (vec![&*weight(2)], 0));
}

#[test]
fn layouts_and_ranks_make_no_difference() {
    let (root, a, b, state) = scene();
    state.save(&runtime(), &a).unwrap();
    let disk = root.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let layouts = [
        Config { shard_bytes: 16_384, ..small_config() },
        Config { block_bytes: 8192, pool_bytes: 65_536, ..small_config() },
        Config { stripe: vec![disk], ..small_config() },
    ];
    for config in layouts {
        let runtime = Runtime::new(config).unwrap();
        State::new(1, &SIZES).save(&runtime, &b).unwrap();
        for values in [false, true] {
            let report = diff(&runtime, (&a, &b), values, &Arc::default()).unwrap();
            assert!(report.is_equal(), "{report:?}");
        }
        let mut other = State::new(1, &SIZES);
        other.tensors[3].1[20_000] ^= 8;
        other.save(&runtime, &b).unwrap();
        let report = diff(&runtime, (&a, &b), true, &Arc::default()).unwrap();
        assert_eq!(differing(&report), [weight(3)]);
        std::fs::remove_dir_all(&b).unwrap();
    }
    let ranks = root.path().join("ranks");
    state.save_by_ranks(3, &runtime(), &ranks);
    let report = compare(&a, &ranks, false);
    assert!(differing(&report).is_empty(), "{report:?}");
    assert!(report.only_in_a.is_empty() && report.only_in_b.is_empty());
}

#[test]
fn names_types_shapes_and_values_are_compared() {
    let (_root, a, b, _) = scene();
    let bytes = [7u8; 24];
    let mut one = StateDict::new();
    one.bytes("gone", Dtype::U8, &[24], &bytes).unwrap();
    one.bytes("shape", Dtype::U8, &[4, 6], &bytes).unwrap();
    one.bytes("dtype", Dtype::F32, &[6], &bytes).unwrap();
    one.value("lr", 0.1).value("same", "text").value("old", 1i64);
    let mut other = StateDict::new();
    other.bytes("new", Dtype::U8, &[24], &bytes).unwrap();
    other.bytes("shape", Dtype::U8, &[6, 4], &bytes).unwrap();
    other.bytes("dtype", Dtype::I32, &[6], &bytes).unwrap();
    other.value("lr", 0.2).value("same", "text");
    let store = store();
    store.save(&one, &a).unwrap();
    store.save(&other, &b).unwrap();
    let report = compare(&a, &b, true);
    assert_eq!(
        (&*report.only_in_a, &*report.only_in_b),
        (&["gone".into()][..], &["new".into()][..])
    );
    let changed: Vec<&str> = report.changed.iter().map(|change| &*change.name).collect();
    assert_eq!(changed, ["shape", "dtype"]);
    assert_eq!((&*report.changed[1].dtype_a, &*report.changed[1].dtype_b), ("F32", "I32"));
    assert_eq!(report.changed[0].shape_b, [6, 4]);
    let values: Vec<_> =
        report.values.iter().map(|v| (&*v.name, v.a.as_deref(), v.b.as_deref())).collect();
    assert_eq!(values, [("lr", Some("0.1"), Some("0.2")), ("old", Some("1"), None)]);
    assert!(report.differing.is_empty());
    assert!(ringstow::Store::found().unwrap().diff(&a, &a, false).unwrap().is_equal());
}

#[test]
fn export_is_compared_tensor_by_tensor() {
    let (_root, a, b, mut state) = scene();
    state.save(&runtime(), &a).unwrap();
    let export = |state: &State| {
        let _ = std::fs::remove_dir_all(&b);
        let store = store();
        store.export(&state.model().unwrap(), &b).unwrap();
    };
    export(&state);
    let report = compare(&a, &b, false);
    assert!(report.is_equal() && !report.values_compared);
    assert!(compare(&a, &a, false).values_compared);
    state.tensors[1].1[0] ^= 1;
    export(&state);
    assert_eq!(differing(&compare(&a, &b, false)), [weight(1)]);
    assert_eq!(differing(&compare(&b, &a, true)), [weight(1)]);
}

#[test]
fn tensor_of_many_pieces_is_compared_to_its_last_element() {
    let root = tempfile::tempdir().unwrap();
    let (a, b) = (root.path().join("a"), root.path().join("b"));
    // More than the bytes that are in memory at once; blocks of unlike sizes, so that checksums do not decide.
    let mut data = vec![1u8; 130 << 20];
    let save = |data: &[u8], path: &Path, config: Config| {
        let mut state = StateDict::new();
        state.bytes("w", Dtype::F32, &[5, 13 << 19], data).unwrap();
        ringstow::Store::new(config).unwrap().save(&state, path).unwrap();
    };
    save(&data, &a, Config::default());
    let other = || Config { block_bytes: 1 << 19, pool_bytes: 8 << 20, ..Config::default() };
    save(&data, &b, other());
    let store = ringstow::Store::new(Config::default()).unwrap();
    let report = store.diff(&a, &b, true).unwrap();
    assert!(report.is_equal(), "{report:?}");
    assert_eq!(report.read_bytes, 2 * data.len() as u64);
    *data.last_mut().unwrap() = 2;
    save(&data, &b, other());
    let report = store.diff(&a, &b, true).unwrap();
    let elements = report.differing[0].elements.as_ref().unwrap();
    assert_eq!((elements.differing, elements.elements), (1, 65 << 19));
}

#[test]
fn what_is_no_checkpoint_is_an_error_and_so_is_damage_that_is_read() {
    let (root, a, b, state) = scene();
    state.save(&runtime(), &a).unwrap();
    assert!(
        ringstow::Store::found().unwrap().diff(&a, root.path().join("nowhere"), false).is_err()
    );
    let other = Runtime::new(Config { shard_bytes: 16_384, ..small_config() }).unwrap();
    state.save(&other, &b).unwrap();
    let begin = Checkpoint::open(&a).unwrap().tensor(&weight(3)).unwrap().chunks[0].begin;
    flip(&shard_of(&a), begin as usize);
    let error = diff(&runtime(), (&a, &b), false, &Arc::default()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}

/// A directory of another program's with one tensor of zeros, as a file with holes.
fn zeros(dir: &Path, bytes: u64) {
    use std::io::Write;
    std::fs::create_dir(dir).unwrap();
    let mut file = std::fs::File::create(dir.join("model.safetensors")).unwrap();
    let header =
        format!(r#"{{"t":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
}

#[test]
fn progress_is_that_of_all_loads_together() {
    const BYTES: u64 = 150 << 20; // read in three pieces
    let (_root, a, b, _) = scene();
    zeros(&a, BYTES);
    zeros(&b, BYTES);
    let job = Arc::default();
    assert!(diff(&runtime(), (&a, &b), false, &job).unwrap().is_equal());
    let progress = job.progress();
    // Pages at the edges of pieces are read twice.
    let expected = 2 * BYTES..2 * BYTES + (1 << 20);
    assert!(expected.contains(&progress.total), "{progress:?}");
    assert!(expected.contains(&progress.written), "{progress:?}");
}

#[cfg(debug_assertions)] // the seam exists in these builds only
#[test]
fn trace_of_all_loads_together_is_written_once() {
    use ringstow::internals::sys::seam::{Call, watch};
    let (root, a, b, mut state) = scene();
    state.save(&runtime(), &a).unwrap();
    state.tensors[1].1[0] ^= 1;
    state.save(&runtime(), &b).unwrap();
    let trace = root.path().join("trace.json");
    let job = Arc::new(ringstow::Job::tracing(&trace));
    let watch = watch();
    let report = diff(&runtime(), (&a, &b), true, &job).unwrap();
    assert!(report.read_bytes > 0, "{report:?}");
    assert_eq!(watch.take_paths(Call::Create), [trace]);
}

/// Each look at the manifest finds another one, and its shard is missing.
#[cfg(debug_assertions)]
#[test]
fn checkpoint_that_is_always_replaced_is_not_tried_for_ever() {
    use ringstow::internals::sys::seam::{Call, Outcome, on_thread};
    let (_root, a, b, _) = scene();
    let manifests = [1, 2].map(|step| {
        let saved = if step == 1 { &a } else { &b };
        State::new(step, &SIZES).save(&runtime(), saved).unwrap();
        std::fs::read(saved.join("manifest.json")).unwrap()
    });
    std::fs::remove_file(shard_of(&a)).unwrap();
    let mut looks = 0;
    let _watch = on_thread(move |_, call, on| {
        if call == Call::Open && on.ends_with("a/manifest.json") {
            looks += 1;
            std::fs::write(on, &manifests[looks % 2]).unwrap();
        }
        Outcome::Pass
    });
    let error = diff(&runtime(), (&a, &b), false, &Arc::default()).unwrap_err();
    assert!(matches!(error, Error::Replaced { .. }), "{error}");
}
