//! The priorities of a save's threads.
#![allow(unsafe_code)] // only the system call reads an I/O priority
#![cfg(target_os = "linux")]

use crate::common::*;
use nix::libc;
use ringstow::{Config, EngineChoice, Error, IoPriority, SaveHandle, Store};
use std::fs;
use std::path::Path;

/// Class 3 of `ioprio_set(2)`.
const IDLE: i64 = 3 << 13;

fn config() -> Config {
    Config { nice: 3, io_priority: IoPriority::Idle, fillers: 3, ..small_config() }
}

/// A save in the background that has filled all its blocks, and may write the second one in ten seconds. One filler alone
/// could not fill them: it takes no more than its share of the pool.
fn held_save(config: Config, path: &Path) -> SaveHandle {
    let config = Config { write_rate: 400, pool_bytes: 12 * 4096, ..config };
    let handle = Store::new(config).unwrap().save_async(State::new(1, &SIZES).into_save(), path);
    let handle = handle.unwrap();
    assert!(handle.wait_staged(None));
    handle
}

/// The name, niceness and I/O priority of each thread of this process.
fn threads() -> Vec<(String, i64, i64)> {
    let ids = fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path());
    let of = |dir: std::path::PathBuf| {
        let stat = fs::read_to_string(dir.join("stat")).ok()?; // it may have ended
        let (id_and_name, fields) = stat.rsplit_once(')')?;
        let (id, name) = id_and_name.split_once(" (")?;
        let nice = fields.split_whitespace().nth(16)?.parse().ok()?;
        let (who_process, id): (libc::c_int, libc::c_int) = (1, id.parse().ok()?);
        // SAFETY: the call takes two numbers, and reads a thread's priority.
        let io = unsafe { libc::syscall(libc::SYS_ioprio_get, who_process, id) };
        Some((name.to_owned(), nice, io))
    };
    ids.filter_map(of).collect()
}

/// Whether a thread of this name is ringstow's, or one that io_uring starts for it.
fn is_ours(name: &str) -> bool {
    name.starts_with("ringstow") || name.starts_with("iou-wrk")
}

#[test]
fn threads_of_ringstow_get_the_priorities_and_the_callers_keep_theirs() {
    if !is_alone("priority::threads_of_ringstow_get_the_priorities_and_the_callers_keep_theirs") {
        return;
    }
    let root = scratch();
    let own = threads();
    for engine in [EngineChoice::Portable, EngineChoice::Auto] {
        let handle = held_save(Config { engine, ..config() }, &root.path().join("a"));
        let all = threads();
        let (ours, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(name, ..)| is_ours(name));
        assert!(ours.iter().any(|(name, ..)| name == "ringstow-io"), "{ours:?}");
        // The thread of the save, which the other fillers have their name from.
        assert!(ours.iter().filter(|(name, ..)| name == "ringstow-save").count() >= 2, "{ours:?}");
        let base = own[0].1;
        assert!(ours.iter().all(|(_, nice, io)| (*nice, *io) == (base + 3, IDLE)), "{ours:?}");
        assert!(others.iter().all(|(_, nice, io)| *nice == base && *io != IDLE), "{others:?}");
        handle.cancel();
        assert!(matches!(handle.result(), Err(Error::Cancelled { .. })));
    }
    // The caller's thread takes part in a save that it waits for.
    let store = Store::new(config()).unwrap();
    store.save(&State::new(1, &SIZES).to_save().unwrap(), root.path().join("b")).unwrap();
    assert!(
        threads()
            .iter()
            .filter(|(name, ..)| !is_ours(name))
            .all(|thread| { own.iter().any(|(_, nice, io)| (*nice, *io) == (thread.1, thread.2)) })
    );

    // Other priorities have other threads.
    let state = State::new(1, &SIZES);
    for config in [config(), small_config()] {
        let store = Store::new(Config { engine: EngineChoice::Portable, ..config }).unwrap();
        store.save(&state.to_save().unwrap(), root.path().join("a")).unwrap();
    }
    let io: Vec<i64> =
        threads().into_iter().filter(|t| t.0 == "ringstow-io").map(|t| t.1).collect();
    let base = own[0].1;
    assert!(io.contains(&base) && io.contains(&(base + 3)), "{io:?}");
}
