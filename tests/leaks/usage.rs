//! What a process takes of the system.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Resident memory that the allocator may hold back between rounds: its arenas keep what was freed, and the kernel
/// counts pages late. A round's states have 40 KiB and a pool 32 KiB, so that a leak of either shows within 1,000 rounds.
const RESIDENT_SLACK_KB: u64 = 6 << 10;
/// Arenas of new threads come and go.
const MAPPINGS_SLACK: u64 = 24;

/// Threads that end, and files that they close, may be late by this much.
const SETTLES_WITHIN: Duration = Duration::from_secs(20);

/// Each test counts what the whole process has: one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Clone, PartialEq)]
pub struct Usage {
    descriptors: Vec<String>,
    threads: u64,
    children: usize,
    locked_kb: u64,
    mappings: u64,
    resident_kb: u64,
}

impl Usage {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let field = |name: &str| -> u64 {
            let line = status.lines().find(|line| line.starts_with(name));
            let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
            number.unwrap_or_else(|| panic!("/proc/self/status has no {name}"))
        };
        let mappings = fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64;
        let children: usize = fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok())
            .map(|list| list.split_whitespace().count())
            .sum();
        Self {
            descriptors: descriptors(),
            threads: field("Threads:"),
            children,
            locked_kb: field("VmLck:") + field("VmPin:"),
            mappings,
            resident_kb: field("VmRSS:"),
        }
    }

    /// Once threads that are about to end have ended: two looks agree.
    pub fn settled() -> Self {
        let mut last = Self::now();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = Self::now();
            if (now.threads, &now.descriptors) == (last.threads, &last.descriptors) {
                return now;
            }
            last = now;
        }
    }

    /// What there is more of than before.
    fn more_than(&self, before: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let mut compare = |what: &str, now: u64, then: u64, slack: u64| {
            if now > then + slack {
                found.push(format!("{what}: {then}, now {now}"));
            }
        };
        let [now, then] = [self, before].map(|usage| usage.descriptors.len() as u64);
        compare("descriptors", now, then, 0);
        compare("threads", self.threads, before.threads, 0);
        compare("children", self.children as u64, before.children as u64, 0);
        compare("KiB locked", self.locked_kb, before.locked_kb, 0);
        compare("mappings", self.mappings, before.mappings, MAPPINGS_SLACK);
        compare("KiB resident", self.resident_kb, before.resident_kb, RESIDENT_SLACK_KB);
        if now > then {
            found.push(format!("open: {:?}", self.descriptors));
        }
        found
    }
}

/// What each descriptor refers to; the kind alone of what has no name.
fn descriptors() -> Vec<String> {
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let mut names: Vec<String> = open
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .map(|to| to.display().to_string())
        .filter(|name| !name.ends_with("/fd")) // this listing's own
        .collect();
    names.sort();
    names
}

/// Waits until there is no more of anything than before; panics if that does not come.
#[track_caller]
pub fn assert_flat(before: &Usage, what: &str) {
    let until = Instant::now() + SETTLES_WITHIN;
    loop {
        let found = Usage::settled().more_than(before);
        if found.is_empty() {
            return;
        }
        assert!(Instant::now() < until, "after {what}: {}", found.join("; "));
    }
}

#[test]
fn a_leak_of_each_kind_is_found() {
    let _alone = alone();
    let before = Usage::now();
    let _open = fs::File::open("/proc/self/status").unwrap();
    let kept = vec![1u8; 64 << 20];
    let found = Usage::now().more_than(&before).join("; ");
    assert!(found.contains("descriptors") && found.contains("resident"), "{found} {}", kept.len());
    let more =
        Usage { threads: before.threads + 1, children: 1, locked_kb: 1 << 30, ..before.clone() };
    assert_eq!(more.more_than(&before).len(), 3);
}
