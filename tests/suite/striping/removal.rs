//! What is removed, or left by a kill, goes from all disks or from none.

use super::*;
use crate::common::{retain_as_planned, shards_in};
use ringstow::internals::store::{prune, prune_plan};

#[test]
fn killed_saves_litter_is_cleared_from_all_stripes() {
    let disks = Disks::new(2);
    disks.save(1);
    let (own, companion) = (disks.dir(), disks.companion(0));
    // Got past its commit, but not to its last renames.
    let shard = companion.join("rank00000-1.safetensors");
    fs::rename(&shard, companion.join("rank00000-1.safetensors.part")).unwrap();
    // And a later one had begun to write.
    for left in [&own, &companion] {
        fs::write(left.join("rank00000-1.g1.safetensors.part"), "half").unwrap();
    }
    disks.assert_holds(1);
    let swept = disks.prune();
    assert_eq!(swept.renamed, [shard]);
    assert_eq!(swept.removed.len(), 2);
    assert_no_litter_in(&disks.config(), &disks.dir());
    disks.assert_holds(1);
}

#[test]
fn killed_first_save_is_cleared_with_its_stripes() {
    let disks = Disks::new(2);
    disks.save(1);
    for (dir, shard) in [(disks.dir(), 0), (disks.companion(0), 1), (disks.companion(1), 2)] {
        let name = format!("rank00000-{shard}.safetensors");
        fs::rename(dir.join(&name), dir.join(format!("{name}.part"))).unwrap();
    }
    fs::remove_file(disks.dir().join("manifest.json")).unwrap();
    // From the side of the other disk, it is the checkpoint's to clear up.
    let swept = prune(&disks.stripe(0), &disks.config()).unwrap();
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1));
    assert!(swept.left[0].reason.contains("run/step-1"), "{swept:?}");
    disks.prune();
    disks.assert_empty();
}

#[test]
fn shards_of_a_checkpoint_that_is_gone_are_named_and_stay() {
    let disks = Disks::new(2);
    disks.save(1);
    let moved = disks.root.path().join("archive/step-1");
    fs::create_dir(moved.parent().unwrap()).unwrap();
    fs::rename(disks.dir(), &moved).unwrap();
    let swept = disks.prune();
    let left: Vec<_> = swept.left.iter().map(|left| left.path.clone()).collect();
    assert_eq!(left, [disks.companion(0), disks.companion(1)]);
    let reason = &swept.left[0].reason;
    assert!(reason.contains("run/step-1, which is gone") && !swept.left[0].failed, "{reason}");
    assert_eq!(swept.removed, [] as [PathBuf; 0]);
    State::new(1, &SIZES).assert_at(&disks.runtime(), &moved);
}

/// A cancelled session removed the marker, a rank wrote on, and both were killed.
#[test]
fn uncommitted_shards_without_a_marker_stop_no_save_and_are_cleared() {
    let part = "rank00001-0.safetensors.00c0ffee00c0ffee.part";
    let marker = "companion.json.00c0ffee00c0ffee.part";
    let disks = Disks::new(1);
    let litter = || {
        fs::create_dir_all(disks.companion(0)).unwrap();
        fs::write(disks.companion(0).join(part), "half").unwrap();
        fs::write(disks.companion(0).join(marker), "half").unwrap();
    };
    litter();
    fs::create_dir_all(disks.run()).unwrap();
    let swept = disks.prune();
    let dir = disks.companion(0);
    assert_eq!(swept.removed, [dir.join(marker), dir.join(part), dir]);
    litter();
    disks.save(1);
    disks.assert_holds(1);
    assert_no_litter_in(&disks.config(), &disks.dir());
}

/// A save that is killed between its commit and its renames leaves such names, too.
#[test]
fn committed_shards_that_lost_their_marker_are_nobodys_to_remove() {
    let disks = Disks::new(1);
    disks.save(1);
    let shard = disks.companion(0).join("rank00000-1.safetensors");
    fs::rename(&shard, shard.with_extension("safetensors.part")).unwrap();
    fs::remove_file(disks.companion(0).join("companion.json")).unwrap();
    let swept = disks.prune();
    assert_eq!(swept.removed, [] as [PathBuf; 0]);
    let other = disks.root.path().join("other/step-1");
    let error = State::new(2, &SIZES).save(&disks.runtime(), &other).unwrap_err();
    assert_says(&error, &["disk0/step-1", "nobody's stripe directory"]);
    disks.assert_holds(1);
}

#[test]
fn deleting_a_checkpoint_frees_all_its_disks() {
    let disks = Disks::new(2);
    disks.save(1);
    disks.remove(Disposal::Remove).unwrap();
    disks.assert_empty();
}

#[test]
fn checkpoint_with_unnamed_stripes_is_not_removed() {
    let disks = Disks::new(2);
    disks.save(1);
    let here_only = Config { stripe: vec![disks.stripe(0)], ..small_config() };
    for config in [small_config(), here_only] {
        let error = store::remove_checkpoint(&disks.dir(), Disposal::Remove, &config).unwrap_err();
        assert!(matches!(error, Error::MissingFiles { .. }), "{error}");
        assert_says(
            &error,
            &["of 3 files", "rank00000-2.safetensors", "not found", "disk1", "set `stripe`"],
        );
        disks.assert_holds(1);
    }
    // Nor one of which files are lost.
    fs::remove_dir_all(disks.companion(1)).unwrap();
    let error = disks.remove(Disposal::Remove).unwrap_err();
    assert_says(&error, &["disk1/step-1 is not there", "remove the directory yourself"]);
}

#[test]
fn striped_shares_stay_while_one_shares_files_are_missing() {
    let disks = Disks::new(1);
    let state = State::new(1, &[500, 500]);
    (0..2).for_each(|rank| state.save_alone((rank, 2), "a", &disks.runtime(), &disks.dir()));
    let manifests =
        || ["rank00000", "rank00001"].map(|r| disks.dir().join(r).join(names::MANIFEST));
    let error =
        store::remove_checkpoint(&disks.dir(), Disposal::Remove, &small_config()).unwrap_err();
    assert_says(&error, &["1 of 2 files", "not found", "set `stripe`"]);
    assert!(manifests().iter().all(|manifest| manifest.exists()));
    // Nor does a clean-up finish a removal that was killed.
    fs::rename(&manifests()[0], manifests()[0].with_extension("json.retired")).unwrap();
    let run = disks.run();
    for swept in [prune_plan(&run, &small_config()), prune(&run, &small_config())] {
        assert!(swept.unwrap().left[0].reason.contains("set `stripe`"));
    }
    assert!(manifests()[1].exists());
    // Also when no part is committed any more.
    fs::rename(&manifests()[1], manifests()[1].with_extension("json.retired")).unwrap();
    let swept = prune(&run, &small_config()).unwrap();
    assert!(swept.left[0].reason.contains("may still be in"), "{swept:?}");
    disks.prune();
    disks.assert_empty();
}

#[test]
fn killed_removal_is_finished_once_all_stripes_are_named() {
    let disks = Disks::new(2);
    disks.save(1);
    let (run, manifest) = (disks.run(), disks.dir().join(names::MANIFEST));
    fs::rename(&manifest, disks.dir().join(names::REMOVAL_MARK)).unwrap();
    let here_only = Config { stripe: vec![disks.stripe(0)], ..small_config() };
    let others = Disks::new(2);
    for config in [small_config(), here_only, others.config()] {
        let swept = prune_as_planned(&run, &config);
        assert!(swept.removed.is_empty(), "{swept:?}");
        let error = store::remove_checkpoint(&disks.dir(), Disposal::Remove, &config).unwrap_err();
        let retained = store::retain(&run, &RetainOptions::new(1), &config).unwrap();
        for said in [&swept.left[0].reason, &retained.left[0].reason, &error.to_string()] {
            let words = ["its removal was killed", "may still be in", "disk1", "set `stripe`"];
            assert!(words.iter().all(|words| said.contains(words)), "{said}");
        }
        assert_eq!(names_in(&disks.companion(1)).len(), 2);
    }
    // Before it was killed, it may have got so far.
    fs::remove_dir_all(disks.companion(0)).unwrap();
    disks.prune();
    disks.assert_empty();
}

#[test]
fn killed_removal_is_finished_on_remounted_stripes() {
    let disks = Disks::new(1);
    disks.save(1);
    fs::rename(disks.dir().join(names::MANIFEST), disks.dir().join(names::REMOVAL_MARK)).unwrap();
    let moved = disks.root.path().join("moved");
    fs::rename(disks.stripe(0), &moved).unwrap();
    let run = disks.run();
    let swept = disks.prune();
    assert!(swept.left[0].reason.contains("is not there: mount its disk"), "{swept:?}");
    prune(&run, &Config { stripe: vec![moved.clone()], ..small_config() }).unwrap();
    assert!(!disks.dir().exists());
    assert_eq!(names_in(&moved), Vec::<String>::new());
}

#[test]
fn retain_leaves_checkpoints_with_missing_stripes() {
    let disks = Disks::new(1);
    let run = disks.root.path().join("moved");
    disks.save(1);
    fs::create_dir(&run).unwrap();
    fs::rename(disks.dir(), run.join("step-1")).unwrap();
    State::new(2, &SIZES).save(&disks.runtime(), &run.join("step-2")).unwrap();
    // It loads, but the marker of its stripe directory names another checkpoint.
    State::new(1, &SIZES).assert_at(&disks.runtime(), &run.join("step-1"));
    let done = retain_as_planned(&run, &RetainOptions::new(1), &disks.config());
    assert_eq!((done.kept.len(), done.removed.len(), done.left.len()), (1, 0, 1));
    for words in ["rank00000-1.safetensors", "if you moved that to", "companion.json"] {
        assert!(done.left[0].reason.contains(words), "{done:?}");
    }
    State::new(1, &SIZES).assert_at(&disks.runtime(), &run.join("step-1"));
}

#[test]
fn retain_clears_killed_saves_from_all_stripes() {
    let disks = Disks::new(1);
    let dir = disks.dir();
    let run = dir.parent().unwrap();
    disks.save(1);
    fs::remove_file(dir.join(names::MANIFEST)).unwrap();
    for (dir, shard) in [(&dir, 0), (&disks.companion(0), 1)] {
        let shard = dir.join(format!("rank00000-{shard}.safetensors"));
        fs::rename(&shard, shard.with_extension("safetensors.part")).unwrap();
    }
    State::new(2, &SIZES).save(&disks.runtime(), &run.join("step-2")).unwrap();
    let done = store::retain(run, &RetainOptions::new(1), &disks.config()).unwrap();
    assert_eq!((done.cleared, done.left), (vec![dir.clone()], vec![]));
    assert_eq!(names_in(run), ["step-2"]);
    assert_eq!(names_in(&disks.stripe(0)), ["step-2"]);
}

#[test]
fn removed_checkpoint_is_recycled_on_each_stripe() {
    let disks = Disks::new(2);
    disks.save(1);
    assert!(!shards_in(&disks.companion(0)).is_empty());
    let removed = disks.remove(Disposal::Recycle).unwrap();
    assert_eq!(removed.recycled, 3);
    assert!(!disks.dir().exists() && !disks.companion(0).exists());
    let again = disks.dir().with_file_name("step-2");
    let (state, runtime) = (State::new(2, &SIZES), disks.runtime());
    let report = state.save(&runtime, &again).unwrap();
    assert_eq!(report.recycled_bytes, report.file_bytes);
    state.assert_at(&runtime, &again);
    for root in [again.parent().unwrap(), &disks.stripe(0), &disks.stripe(1)] {
        assert!(names_in(&root.join(".ringstow-spares")).is_empty());
    }
}

#[test]
fn killed_shares_are_cleared_from_all_stripes() {
    let disks = Disks::new(1);
    for rank in ["rank00000", "rank00001"] {
        let dir = disks.dir().join(rank);
        State::new(1, &SIZES).save(&disks.runtime(), &dir).unwrap();
        fs::remove_file(dir.join("manifest.json")).unwrap();
        for (dir, shard) in [(dir, 0), (disks.stripe(0).join(format!("step-1.{rank}")), 1)] {
            let shard = dir.join(format!("rank00000-{shard}.safetensors"));
            fs::rename(&shard, shard.with_extension("safetensors.part")).unwrap();
        }
    }
    let swept = disks.prune();
    assert_eq!(swept.removed.last(), Some(&disks.dir()));
    disks.assert_empty();
}

#[test]
fn stripe_directory_without_a_finished_marker_is_cleared_unless_a_save_is_claiming_it() {
    let disks = Disks::new(2);
    fs::create_dir(disks.dir().parent().unwrap()).unwrap();
    for disk in [0, 1] {
        fs::create_dir(disks.companion(disk)).unwrap();
        fs::write(disks.companion(disk).join("companion.json.part"), "half").unwrap();
    }
    let claiming = fs::File::open(disks.companion(1)).unwrap();
    claiming.lock().unwrap();
    let removed = [disks.companion(0).join("companion.json.part"), disks.companion(0)];
    assert_eq!(disks.prune().removed, removed);
    assert!(!disks.companion(0).exists() && disks.companion(1).exists());
    drop(claiming);
    // A file that is not ringstow's keeps all.
    let theirs = disks.companion(1).join("notes.txt");
    fs::write(&theirs, "mine").unwrap();
    assert!(disks.prune().removed.is_empty());
    fs::remove_file(theirs).unwrap();
    disks.prune();
    disks.assert_empty();
}
