//! Without a sync that is needed, some content of the disk breaks a promise: the rig can fail. Without any other, none
//! does, and the sync could go.

use crate::common::place::Way;
use crate::scenario::{Act, Recorded, Scenario};
use durable_image::SyncCall;
use fastrand::Rng;
use std::collections::HashSet;

impl Recorded {
    /// What is broken, and by which content of the disk, if these syncs are not made. `None`: nothing was found.
    fn broken_without(&self, left_out: impl Fn(&SyncCall) -> bool) -> Option<String> {
        let (mut seen, mut rng) = (HashSet::new(), Rng::with_seed(1));
        self.cases(&self.journal, &mut seen, &mut rng); // other tests check these
        let journal = self.journal.without(left_out);
        self.cases(&journal, &mut seen, &mut rng).iter().find_map(|case| {
            let broken = self.check(case, &mut rng).err()?;
            Some(format!("{broken}\n{}", self.tell(case)))
        })
    }

    /// Whether a sync is of this path, or of a file in this directory if it ends in `/`, and followed by this call.
    fn is(&self, sync: &SyncCall, path: &str, next: &str) -> bool {
        let of = sync.path.to_str().unwrap_or_default();
        let is_of = of == path || (path.ends_with('/') && of.starts_with(path));
        is_of && self.journal.call(sync.done + 1).starts_with(next)
    }
}

fn record(way: Way, before: &[Act], acts: &[Act]) -> Recorded {
    Scenario { way, before: before.into(), acts: acts.into() }.record()
}

/// Each of these syncs, by its path and the call that follows, is made, and something breaks without it.
#[track_caller]
fn assert_needed(recorded: &Recorded, syncs: &[(&str, &str)]) {
    for (path, next) in syncs {
        let is_meant = |sync: &SyncCall| recorded.is(sync, path, next);
        let all = recorded.journal.syncs().iter();
        let told: Vec<String> = all
            .clone()
            .map(|sync| format!("{:?} before {}", sync.path, recorded.journal.call(sync.done + 1)))
            .collect();
        assert!(all.clone().any(is_meant), "no sync of {path:?} before {next:?}: {told:#?}");
        let found = recorded.broken_without(is_meant);
        assert!(found.is_some(), "nothing breaks without the sync of {path:?} before {next:?}");
    }
}

#[test]
fn each_sync_of_a_new_save_is_needed() {
    let recorded = record(Way::Plain, &[], &[Act::Save("new/a", 1)]);
    let syncs = [
        ("", ""), // the name of a directory that it creates
        ("new", ""),
        ("new/a/rank00000-0.safetensors.part", ""), // data
        ("new/a/rank00000-1.safetensors.part", ""),
        ("new/a/manifest.json.part", ""),
        ("new/a", "Look new/a/rank00000-0.safetensors.part"), // before the manifest's rename
        ("new/a", "Look new/a/manifest.json"),                // after it
        ("new/a", "Look new/a"),                              // the shards' final names
    ];
    assert_needed(&recorded, &syncs);
    assert!(recorded.broken_without(|_| false).is_none(), "with all syncs, nothing breaks");
}

#[test]
fn the_sync_of_a_directory_that_a_killed_save_created_is_needed() {
    let recorded = record(Way::Plain, &[], &[Act::MakeDir("a"), Act::Save("a", 1)]);
    assert_needed(&recorded, &[("", "")]);
}

#[test]
fn each_sync_of_a_save_over_recycled_files_is_needed() {
    let recorded =
        record(Way::Recycled, &[Act::Save("a", 0), Act::Save("a", 1)], &[Act::Save("a", 2)]);
    let syncs = [
        (".ringstow-spares/", ""), // data: their names and lengths are those of old files
        ("a/manifest.json.part", ""),
        // The moves out of `.ringstow-spares` are durable by its sync, so the one of `a` before the rename is not needed.
        ("a", "Look a/manifest.json"), // before the earlier checkpoint's files go
    ];
    assert_needed(&recorded, &syncs);
}

#[test]
fn each_sync_of_a_save_over_two_disks_is_needed() {
    let recorded = record(Way::Striped, &[], &[Act::Save("a", 1)]);
    let syncs = [
        ("", ""),
        ("disk 2:", ""),
        ("disk 2:/a", ""),
        ("disk 2:/a/companion.json.part", ""),
        ("disk 2:/a/rank00000-1.safetensors.part", ""),
    ];
    assert_needed(&recorded, &syncs);
}

#[test]
fn each_sync_of_an_export_is_needed() {
    let recorded = record(Way::Plain, &[], &[Act::Export("model", 1)]);
    let syncs = [
        ("", ""),
        ("model/model-00001-of-00003.safetensors.part", ""),
        ("model/model.safetensors.index.json.part", ""),
        ("model", "Rename model/model-00001-of-00003.safetensors.part"), // before any file has its name
        ("model", "Rename model/model.safetensors.index.json.part"),     // before the index has its
    ];
    assert_needed(&recorded, &syncs);
}

#[test]
fn each_sync_of_a_removal_is_needed() {
    let before = [Act::Save("a", 1), Act::Mark("a")];
    let recorded = record(Way::Plain, &before, &[Act::Remove("a")]);
    let syncs = [
        ("a", "Rename a/manifest.json"),       // no mark without a checkpoint
        ("a", "Look a/manifest.json.retired"), // before the shards go
    ];
    assert_needed(&recorded, &syncs);
    let kept = [Act::Save("step-1", 1), Act::Save("step-2", 2)];
    let recorded = record(Way::Plain, &kept, &[Act::Retain]);
    assert_needed(&recorded, &[("step-1", "Look step-1/manifest.json.retired")]);
}

/// Shows every sync of every scenario that nothing breaks without.
#[test]
#[ignore = "takes minutes"]
fn syncs_that_nothing_needs() {
    for way in crate::WAYS {
        for scenario in crate::scenarios(way, &mut Rng::with_seed(1)) {
            let recorded = scenario.record();
            println!("{way:?} {:?}", scenario.acts);
            for sync in recorded.journal.syncs() {
                if recorded.broken_without(|other| other.at == sync.at).is_none() {
                    let next = recorded.journal.call(sync.done + 1);
                    println!("  {} before {next}", sync.path.display());
                }
            }
        }
    }
}
