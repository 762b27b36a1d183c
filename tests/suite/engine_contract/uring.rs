//! What only the io_uring engine has: registered buffers, and worker threads for files in memory.
#![cfg(all(target_os = "linux", feature = "uring"))]

use crate::engine_contract::setup::*;
use nix::sys::memfd::{MFdFlags, memfd_create};
use ringstow::Switch;
use ringstow::internals::{
    engine::{Action, Completion, Engine, Op, uring::Uring},
    pool::Pool,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

#[test]
fn pool_is_registered_or_a_fallback_says_why() {
    let Some(setup) = Setup::uring_fixed_buffered() else { return };
    let engine = setup.engine();
    match engine.fallbacks() {
        [] => assert_eq!(engine.registered(), BUFFERS),
        [fallback] => {
            assert!(engine.registered() < BUFFERS);
            assert!(fallback.reason.contains("RLIMIT_MEMLOCK") && !fallback.remedy.is_empty());
            assert!(Uring::new(DEPTH, Some(&setup.pool), Switch::On).is_err());
        }
        more => panic!("{more:?}"),
    }
    let unregistered = Uring::new(DEPTH, Some(&setup.pool), Switch::Off).unwrap();
    assert_eq!((unregistered.registered(), unregistered.fallbacks().len()), (0, 0));
}

#[test]
fn unregistered_buffer_still_transfers() {
    let Some(setup) = Setup::uring_fixed_direct() else { return };
    // Its slots have the same numbers as those registered, at other addresses.
    let other = Pool::new(1, BLOCK).unwrap();
    let mut buffer = other.lease().unwrap();
    buffer.copy_from_slice(&pattern(0));
    let mut engine = setup.engine();
    let file = engine.attach(setup.create("file")).unwrap();
    let written = run_one(&mut *engine, file, Action::Write(whole(buffer, 0)));
    assert_eq!(written.result.unwrap(), BLOCK);
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), pattern(0));
}

/// The kernel's worker threads for rings of this thread, which it keeps for five seconds.
fn workers() -> usize {
    let thread = std::fs::read_link("/proc/thread-self").unwrap();
    let own = format!("iou-wrk-{}", thread.file_name().unwrap().to_str().unwrap());
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name.trim() == own)).count()
}

#[test]
fn files_in_memory_are_read_by_the_kernels_worker_threads() {
    let Some(setup) = Setup::uring_fixed_direct() else { return };
    let memory = memfd_create("in memory", MFdFlags::MFD_CLOEXEC).unwrap();
    let memory = Arc::new(File::from(memory));
    for block in 0..DEPTH {
        memory.write_all_at(&pattern(block), (block * BLOCK) as u64).unwrap();
    }
    let mut engine = setup.engine();
    let file = engine.attach(memory).unwrap();
    for block in 0..DEPTH {
        let buffer = setup.pool.lease().unwrap();
        let action = Action::Read(whole(buffer, block));
        engine.submit(Op { token: block as u64, file, action });
    }
    let mut done = Vec::new();
    while done.len() < DEPTH {
        engine.wait(&mut done).unwrap();
    }
    assert!(workers() > 0, "the thread that submits copied all");
    for Completion { op, result } in done {
        assert_eq!(result.unwrap(), BLOCK);
        assert_eq!(op.action.into_buffer().unwrap()[..], pattern(op.token as usize));
    }
}
