//! What the model allows and what it does not, on files that are changed by hand.

use crate::{Journal, Mode, Recorder};
use fastrand::Rng;
use ringstow::internals::sys::seam::Call;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A disk, and a directory to write its contents to.
struct Disk {
    root: tempfile::TempDir,
    copy: tempfile::TempDir,
}

/// What is on a disk: each path, and what its file holds.
type Content = BTreeSet<(String, Option<Vec<u8>>)>;

impl Disk {
    fn new() -> Self {
        let new = || tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        Self { root: new(), copy: new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn recorder(&self) -> Recorder {
        Recorder::new(&[self.root.path().into()])
    }

    /// All contents that the disk may have at the end.
    fn contents(&self, journal: &Journal, mode: Mode) -> BTreeSet<Content> {
        let states = journal.states(journal.end(), mode, 200, &mut Rng::with_seed(1));
        let written = states.iter().map(|state| {
            state.write_to(&[self.copy.path().into()]).unwrap();
            let mut content = Content::new();
            read(self.copy.path(), "", &mut content);
            content
        });
        written.collect()
    }
}

fn read(dir: &Path, above: &str, all: &mut Content) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{above}{}", path.file_name().unwrap().to_str().unwrap());
        all.insert((name.clone(), path.is_file().then(|| fs::read(&path).unwrap())));
        if path.is_dir() {
            read(&path, &format!("{name}/"), all);
        }
    }
}

fn sync(recorder: &Recorder, path: &Path) {
    recorder.before(Call::Sync, path);
    recorder.before(Call::Synced, path);
}

fn content(files: &[(&str, &[u8])]) -> Content {
    files.iter().map(|(name, bytes)| (name.to_string(), Some(bytes.to_vec()))).collect()
}

#[test]
fn a_sync_after_one_that_failed_counts_from_its_own_call() {
    let disk = Disk::new();
    let recorder = disk.recorder();
    recorder.before(Call::Sync, disk.root.path());
    fs::write(disk.path("a"), "").unwrap();
    sync(&recorder, disk.root.path());
    let found = disk.contents(&recorder.journal(), Mode::Unordered);
    assert_eq!(found, BTreeSet::from([content(&[("a", b"")])]));
}

#[test]
fn a_new_file_is_certain_once_it_and_its_directory_were_synced() {
    let (old, new) = (content(&[]), content(&[("a", b"hello")]));
    let (empty, zeros) = (content(&[("a", b"")]), content(&[("a", &[0; 5])]));
    for (file, dir, mode, allowed) in [
        (false, false, Mode::Unordered, vec![&old, &new, &empty, &zeros]),
        (true, false, Mode::Unordered, vec![&old, &new]),
        // A journal has the name, too.
        (true, false, Mode::Journal, vec![&new]),
        (false, true, Mode::Unordered, vec![&new, &empty, &zeros]),
        (true, true, Mode::Unordered, vec![&new]),
    ] {
        let disk = Disk::new();
        let recorder = disk.recorder();
        fs::write(disk.path("a"), "hello").unwrap();
        if file {
            sync(&recorder, &disk.path("a"));
        }
        if dir {
            sync(&recorder, disk.root.path());
        }
        let found = disk.contents(&recorder.journal(), mode);
        assert_eq!(found, allowed.into_iter().cloned().collect(), "{file} {dir} {mode:?}");
    }
}

#[test]
fn a_rename_happens_whole_or_not_at_all() {
    let disk = Disk::new();
    fs::write(disk.path("a"), "1").unwrap();
    fs::write(disk.path("b"), "2").unwrap();
    let recorder = disk.recorder();
    fs::rename(disk.path("a"), disk.path("b")).unwrap();
    let found = disk.contents(&recorder.journal(), Mode::Unordered);
    let allowed = [content(&[("a", b"1"), ("b", b"2")]), content(&[("b", b"1")])];
    assert_eq!(found, allowed.into());
}

#[test]
fn changes_of_names_are_in_order_only_with_a_journal() {
    let disk = Disk::new();
    let recorder = disk.recorder();
    for name in ["a", "b"] {
        fs::write(disk.path(name), "").unwrap();
        recorder.moment();
    }
    let journal = recorder.journal();
    let (none, first) = (content(&[]), content(&[("a", b"")]));
    let (second, both) = (content(&[("b", b"")]), content(&[("a", b""), ("b", b"")]));
    let ordered = BTreeSet::from([none, first, both]);
    assert_eq!(disk.contents(&journal, Mode::Journal), ordered);
    let found = disk.contents(&journal, Mode::Unordered);
    assert!(found.contains(&second) && found.is_superset(&ordered) && found.len() == 4);
}

#[test]
fn blocks_and_length_of_a_file_are_lost_apart() {
    let disk = Disk::new();
    fs::write(disk.path("a"), [1; 1024]).unwrap();
    let recorder = disk.recorder();
    fs::write(disk.path("a"), [2; 1536]).unwrap();
    let journal = recorder.journal();
    for mode in [Mode::Unordered, Mode::Journal] {
        let found: BTreeSet<Vec<u8>> = disk
            .contents(&journal, mode)
            .into_iter()
            .map(|content| content.into_iter().next().unwrap().1.unwrap())
            .collect();
        let blocks = |first: u8, second: u8| [[first; 512], [second; 512]].concat();
        for (first, second) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
            let short = blocks(first, second);
            assert!(found.contains(&short));
            for third in [[0; 512], [2; 512]] {
                assert!(found.contains(&[&*short, &third].concat()));
            }
        }
        assert_eq!(found.len(), 12);
    }
}

#[test]
fn a_sync_holds_for_what_was_there_when_it_began_once_it_has_ended() {
    let disk = Disk::new();
    let recorder = disk.recorder();
    fs::write(disk.path("a"), "").unwrap();
    recorder.before(Call::Sync, disk.root.path());
    let both = [content(&[]), content(&[("a", b"")])];
    assert_eq!(disk.contents(&recorder.journal(), Mode::Unordered), both.into());
    fs::write(disk.path("b"), "").unwrap();
    recorder.before(Call::Synced, disk.root.path());
    let with_a = [content(&[("a", b"")]), content(&[("a", b""), ("b", b"")])];
    assert_eq!(disk.contents(&recorder.journal(), Mode::Unordered), with_a.clone().into());
    let synced = recorder.journal();
    assert_eq!(synced.syncs().len(), 1);
    let without = synced.without(|_| true);
    assert!(disk.contents(&without, Mode::Unordered).contains(&content(&[])));
}

#[test]
fn what_is_in_a_lost_directory_is_lost() {
    let disk = Disk::new();
    let recorder = disk.recorder();
    fs::create_dir(disk.path("d")).unwrap();
    fs::write(disk.path("d/a"), "").unwrap();
    sync(&recorder, &disk.path("d"));
    let found = disk.contents(&recorder.journal(), Mode::Unordered);
    let there = Content::from([("d".into(), None), ("d/a".into(), Some(Vec::new()))]);
    assert_eq!(found, [content(&[]), there].into());
}

#[test]
fn two_disks_have_a_journal_each() {
    let (one, other) = (Disk::new(), Disk::new());
    let recorder = Recorder::new(&[one.root.path().into(), other.root.path().into()]);
    fs::write(one.path("a"), "").unwrap();
    sync(&recorder, other.root.path());
    let journal = recorder.journal();
    let states = journal.states(journal.end(), Mode::Journal, 10, &mut Rng::with_seed(1));
    assert_eq!(states.len(), 2);
}
