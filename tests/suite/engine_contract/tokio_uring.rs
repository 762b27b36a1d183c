//! What only the tokio-uring engine has: a registry that may keep less than it was given.
#![cfg(all(target_os = "linux", feature = "tokio-uring"))]

use crate::engine_contract::setup::*;
use ringstow::Switch;
use ringstow::internals::{
    engine::{Action, Engine, Op, Transfer, tokio_uring::TokioUring},
    limits::ALIGN,
    pool::Pool,
};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// tokio-uring's own limit (`UIO_MAXIOV`).
const REGISTERED_MAX: usize = 1024;

#[test]
fn buffers_dropped_by_tokio_uring_still_transfer() {
    let Some(setup) = Setup::tokio_uring_fixed_direct() else { return };
    let pool = Pool::new(REGISTERED_MAX + 1, ALIGN).unwrap();
    let mut engine = TokioUring::new(DEPTH, Some(&pool), Switch::Auto).unwrap();
    let fallbacks = engine.fallbacks();
    assert_eq!(fallbacks.len(), 1);
    // Under a small memory lock limit it is that which is told of.
    if engine.registered() == REGISTERED_MAX {
        assert!(fallbacks[0].reason.contains("1024 buffers at most"), "{fallbacks:?}");
        assert!(fallbacks[0].remedy.contains("block_bytes"), "{fallbacks:?}");
    }
    assert!(TokioUring::new(DEPTH, Some(&pool), Switch::On).is_err());

    let file = engine.attach(setup.create("file")).unwrap();
    for slot in 0..pool.count() {
        let mut buffer = pool.lease().unwrap();
        buffer.fill(slot as u8);
        let write = Action::Write(Transfer::of(buffer, ALIGN, (slot * ALIGN) as u64));
        assert_eq!(run_one(&mut engine, file, write).result.unwrap(), ALIGN);
    }
    let written = std::fs::read(setup.path("file")).unwrap();
    assert!(written.chunks(ALIGN).enumerate().all(|(slot, block)| block == [slot as u8; ALIGN]));
}

#[test]
fn a_part_of_a_registered_buffer_is_moved() {
    let Some(setup) = Setup::tokio_uring_fixed_direct() else { return };
    let mut engine = setup.engine();
    let file = engine.attach(setup.create("file")).unwrap();
    let part = Transfer { offset: 0, buffer: setup.filled(0), start: ALIGN, len: ALIGN };
    assert_eq!(run_one(&mut *engine, file, Action::Write(part)).result.unwrap(), ALIGN);
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), pattern(0)[ALIGN..2 * ALIGN]);
    let nothing = Transfer::of(setup.pool.lease().unwrap(), 0, 0);
    assert_eq!(run_one(&mut *engine, file, Action::Write(nothing)).result.unwrap(), 0);
}

#[test]
fn dropping_the_engine_waits_for_the_kernel() {
    let Some(setup) = Setup::tokio_uring_fixed_direct() else { return };
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut engine = setup.engine();
    let pipe = engine.attach(Arc::new(File::from(OwnedFd::from(reader)))).unwrap();
    let file = engine.attach(setup.create("file")).unwrap();
    // Nothing is there to be read yet. Once the write behind it has completed, the kernel has both.
    engine.submit(Op {
        token: 7,
        file: pipe,
        action: Action::Read(whole(setup.pool.lease().unwrap(), 0)),
    });
    run_one(&mut *engine, file, Action::Write(whole(setup.filled(0), 0))).result.unwrap();
    let late = std::thread::spawn(move || writer.write_all(b"at last").unwrap());
    drop(engine);
    let buffers: Vec<_> = (0..BUFFERS).map(|_| setup.pool.lease().unwrap()).collect();
    assert_eq!(buffers.iter().filter(|buffer| buffer.starts_with(b"at last")).count(), 1);
    late.join().unwrap();
}

#[test]
fn panic_on_the_thread_returns_every_buffer() {
    let Some(setup) = Setup::tokio_uring_fixed_direct() else { return };
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut engine = setup.engine();
        let file = engine.attach(setup.create("file")).unwrap();
        engine.submit(Op { token: 0, file, action: Action::Write(whole(setup.filled(0), 0)) });
        panic!("while an operation is in progress");
    }));
    assert!(panicked.is_err());
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), pattern(0));
    setup.assert_no_buffer_is_lost();
}
