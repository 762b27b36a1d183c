//! Nodes that share no directory: each commits the same checkpoint with the files of its own ranks.

use crate::common::{names_in, no_values, noise, small_config, some_calls, store};
use ringstow::internals::{
    format::{Node, names, receipt::merge},
    store::{NodeSession, adopt, list, node_id, prune, verify},
};
use ringstow::{Checkpoint, Dtype, Error, Job, Left, Runtime, StateDict, Status};
use serde_json::value::RawValue;
use std::fs;
use std::path::{Path, PathBuf};

const ID: &str = "0123456789abcdef";

/// Two nodes, of one rank each.
struct Nodes {
    root: tempfile::TempDir,
}

impl Nodes {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    fn dir(&self, rank: u32) -> PathBuf {
        self.root.path().join(format!("node{rank}/run/step-1"))
    }

    fn dirs(&self) -> [PathBuf; 2] {
        [0, 1].map(|rank| self.dir(rank))
    }

    /// Has both ranks write, and both nodes prepare.
    fn prepared(&self, seed: u64) -> ringstow::Result<[NodeSession; 2]> {
        let dirs = self.dirs();
        let begin = |dir: &PathBuf| NodeSession::begin(dir, 2, ID, &small_config());
        let mut sessions = [begin(&dirs[0])?, begin(&dirs[1])?];
        let receipts = [0, 1].map(|rank| {
            let bytes = noise(seed + u64::from(rank), 20_000);
            let mut state = StateDict::new();
            state.bytes(format!("own.{rank}"), Dtype::U8, &[20_000], &bytes).unwrap();
            let store = store();
            store.write_rank(&state, rank, &dirs[rank as usize]).unwrap().0
        });
        let nodes = [0, 1].map(|rank| {
            let id = node_id(dirs[rank as usize].parent().unwrap()).unwrap();
            Node { id: id.id, host: id.host, ranks: vec![rank] }
        });
        let all = ["own.0".to_owned(), "own.1".to_owned()];
        let mut merged = merge(&receipts)?;
        let manifest = sessions[0].manifest(&mut merged, (tree(), &all), nodes.into())?;
        for (session, receipt) in sessions.iter_mut().zip(receipts) {
            session.prepare(&merge(&[receipt])?, manifest.clone())?;
        }
        Ok(sessions)
    }

    fn save(&self, seed: u64) -> ringstow::Result<()> {
        let mut sessions = self.prepared(seed)?;
        sessions.iter_mut().try_for_each(NodeSession::commit)?;
        sessions.into_iter().for_each(NodeSession::end);
        Ok(())
    }

    /// Whether each node has what its rank saved, and not the other's.
    fn assert_saved(&self, seed: u64) {
        for (rank, dir) in self.dirs().iter().enumerate() {
            let checkpoint = Checkpoint::open(dir).unwrap();
            let loaded =
                checkpoint.load_names([format!("own.{rank}")], Default::default()).unwrap();
            let tensor = loaded.tensor(&format!("own.{rank}")).unwrap();
            assert_eq!(tensor.data(), noise(seed + rank as u64, 20_000));
            let other = checkpoint.load_names([format!("own.{}", 1 - rank)], Default::default());
            let refused = other.unwrap_err().to_string();
            assert!(refused.contains("is on another node"), "{refused}");
        }
    }
}

fn tree() -> Box<RawValue> {
    no_values()
}

fn manifest_in(dir: &Path) -> Vec<u8> {
    fs::read(dir.join(names::MANIFEST)).unwrap()
}

#[test]
fn each_node_has_the_manifest_and_its_own_files() {
    let nodes = Nodes::new();
    nodes.save(1).unwrap();
    nodes.assert_saved(1);
    let [first, second] = nodes.dirs();
    assert_eq!(manifest_in(&first), manifest_in(&second));
    let runtime = Runtime::new(small_config()).unwrap();
    let report = verify(&runtime, &second, &Job::of(&small_config())).unwrap();
    assert!(report.damage.is_empty() && report.files > 0 && report.elsewhere > 0, "{report:?}");
    let found = list(second.parent().unwrap(), &small_config()).unwrap();
    assert_eq!((found.len(), found[0].status), (1, Status::Committed));
    // A second save replaces it, and no file of the first is left.
    nodes.save(2).unwrap();
    nodes.assert_saved(2);
    assert!(names_in(&first).iter().all(|name| !name.contains("rank00001")));
    assert_eq!(names_in(&first).len(), 1 + report.elsewhere);
}

#[test]
fn node_that_lacks_one_of_its_own_files_is_incomplete() {
    let nodes = Nodes::new();
    nodes.save(1).unwrap();
    let [first, second] = nodes.dirs();
    let own = names_in(&first).into_iter().find(|name| name.starts_with("rank")).unwrap();
    fs::remove_file(first.join(&own)).unwrap();
    assert!(matches!(Checkpoint::open(&first), Err(Error::MissingFiles { .. })));
    Checkpoint::open(&second).unwrap();
    // Elsewhere, nobody knows whose it is.
    let copy = nodes.root.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(second.join(names::MANIFEST), copy.join(names::MANIFEST)).unwrap();
    Checkpoint::open(&copy).unwrap();
}

#[test]
fn nothing_is_committed_if_one_node_gives_up_after_all_have_prepared() {
    let nodes = Nodes::new();
    nodes.save(1).unwrap();
    drop(nodes.prepared(2).unwrap());
    nodes.assert_saved(1);
    for dir in nodes.dirs() {
        assert!(names_in(&dir).iter().all(|name| !name.ends_with(".part")), "{dir:?}");
    }
}

#[test]
fn commit_of_one_node_alone_is_finished_on_the_other() {
    let nodes = Nodes::new();
    nodes.save(1).unwrap();
    let [mut one, mut other] = nodes.prepared(2).unwrap();
    one.commit().unwrap();
    other.keep();
    drop(other); // its rename failed
    // Until all have committed, the replaced checkpoint stays on each.
    assert!(names_in(&nodes.dir(0)).len() > 3, "{:?}", names_in(&nodes.dir(0)));
    drop(one);
    let [first, second] = nodes.dirs();
    let swept = prune(second.parent().unwrap(), &small_config()).unwrap();
    let is_left = |left: &Left| left.path == second && left.reason.contains("other nodes may have");
    assert!(swept.left.iter().any(is_left), "{swept:?}");
    adopt(&second, manifest_in(&first)).unwrap();
    assert_eq!(manifest_in(&second), manifest_in(&first));
    nodes.assert_saved(2);
    assert!(names_in(&second).iter().all(|name| !name.ends_with(".part")));
}

#[test]
fn what_is_no_manifest_of_nodes_is_not_adopted() {
    let nodes = Nodes::new();
    let dir = nodes.dir(0);
    let refused = adopt(&dir, b"{}".to_vec()).unwrap_err();
    assert!(matches!(refused, Error::Corrupt { .. } | Error::Format { .. }), "{refused}");
    assert!(!dir.exists());
}

#[test]
fn prepare_refuses_the_receipts_of_another_node() {
    let nodes = Nodes::new();
    let [first, second] = nodes.prepared(1).unwrap();
    drop(first);
    drop(second);
    fs::write(nodes.dir(0).parent().unwrap().join(names::NODE), r#"{"id":"x","host":"y"}"#)
        .unwrap();
    let dirs = nodes.dirs();
    assert!(Checkpoint::open(&dirs[0]).is_err());
    nodes.save(2).unwrap(); // the new id is that of both the session and the manifest
    assert_eq!(Checkpoint::open(&dirs[0]).unwrap().manifest().nodes[0].id, "x");
}

#[cfg(debug_assertions)] // the seam exists in these builds only
mod each_call {
    use super::*;
    use nix::libc::EIO;
    use ringstow::internals::sys::seam::{Outcome, nth, on_thread};

    /// Whichever call fails on one node, it has one checkpoint or the other, whole.
    #[test]
    fn failure_of_any_call_of_the_commit_leaves_one_checkpoint_or_the_other() {
        for n in some_calls() {
            let nodes = Nodes::new();
            nodes.save(1).unwrap();
            let [mut mine, mut other] = nodes.prepared(2).unwrap();
            let watch = on_thread(nth(n, Outcome::Fail(EIO)));
            let done = mine.commit();
            if done.is_ok() {
                mine.end();
            }
            let calls = watch.take().len() as u64;
            drop(watch);
            other.commit().unwrap();
            let checkpoint = Checkpoint::open(nodes.dir(0)).unwrap();
            let loaded = checkpoint.load_names(["own.0"], Default::default()).unwrap();
            let bytes = loaded.tensor("own.0").unwrap().data().to_vec();
            let is_new = bytes == noise(2, 20_000);
            assert!(is_new || bytes == noise(1, 20_000), "call {n}");
            assert!(is_new || done.is_err(), "call {n}: it said that it has committed");
            if calls < n {
                break;
            }
        }
    }
}
