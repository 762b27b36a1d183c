//! What the `Engine` trait promises.

use crate::engine_contract::setup::*;
use ringstow::internals::engine::{Action, FileId, Op, Transfer};
use ringstow::internals::sys::{file, space};
use std::io;
use std::sync::Arc;

pub fn what_is_written_is_read(setup: &Setup) {
    let mut engine = setup.engine();
    let out = engine.attach(setup.create("file")).unwrap();
    let written = run_one(&mut *engine, out, Action::Write(whole(setup.filled(0), 0)));
    assert_eq!(written.result.unwrap(), BLOCK);
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), pattern(0));

    let back = engine.attach(setup.open("file")).unwrap();
    let read = run_one(&mut *engine, back, Action::Read(whole(setup.pool.lease().unwrap(), 0)));
    assert_eq!(read.result.unwrap(), BLOCK);
    assert_eq!(read.op.action.transfer().unwrap().buffer[..], pattern(0));
}

pub fn as_many_operations_as_the_depth_complete_at_once(setup: &Setup) {
    let mut engine = setup.engine();
    let out = engine.attach(setup.create("file")).unwrap();
    assert_eq!(engine.depth(), DEPTH);
    for round in 0..3 {
        let blocks = round * DEPTH..(round + 1) * DEPTH;
        let writes = blocks.map(|block| Action::Write(whole(setup.filled(block), block)));
        for completion in run(&mut *engine, out, writes.collect()) {
            assert_eq!(completion.result.unwrap(), BLOCK);
        }
    }
    let expected: Vec<u8> = (0..3 * DEPTH).flat_map(pattern).collect();
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), expected);
}

pub fn a_read_at_the_end_of_the_file_is_short(setup: &Setup) {
    std::fs::write(setup.path("file"), &pattern(0)[..BLOCK - 1000]).unwrap();
    let mut engine = setup.engine();
    let file = engine.attach(setup.open("file")).unwrap();
    let mut bytes_at = |block| {
        let read = Action::Read(whole(setup.pool.lease().unwrap(), block));
        run_one(&mut *engine, file, read).result.unwrap()
    };
    assert_eq!(bytes_at(0), BLOCK - 1000);
    assert_eq!(bytes_at(1), 0);
}

pub fn a_sync_completes(setup: &Setup) {
    let mut engine = setup.engine();
    let file = engine.attach(setup.create("file")).unwrap();
    run_one(&mut *engine, file, Action::Write(whole(setup.filled(0), 0))).result.unwrap();
    assert_eq!(run_one(&mut *engine, file, Action::Sync).result.unwrap(), 0);
}

pub fn writing_to_a_read_only_file_is_ebadf(setup: &Setup) {
    setup.create("file");
    let mut engine = setup.engine();
    let file = engine.attach(setup.open("file")).unwrap();
    let failed = run_one(&mut *engine, file, Action::Write(whole(setup.filled(0), 0)));
    assert_eq!(failed.result.unwrap_err().raw_os_error(), Some(nix::libc::EBADF));
    assert_eq!(failed.op.action.into_buffer().unwrap()[..], pattern(0));
}

pub fn an_unknown_file_fails_the_operation(setup: &Setup) {
    let mut engine = setup.engine();
    let failed = run_one(&mut *engine, FileId(7), Action::Sync);
    assert_eq!(failed.result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let file = engine.attach(setup.create("file")).unwrap();
    engine.detach(file);
    let failed = run_one(&mut *engine, file, Action::Write(whole(setup.filled(0), 0)));
    assert_eq!(failed.result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

pub fn bytes_outside_the_buffer_fail_the_operation(setup: &Setup) {
    let mut engine = setup.engine();
    let file = engine.attach(setup.create("file")).unwrap();
    for (start, len) in [(0, BLOCK + 1), (BLOCK, 1), (usize::MAX, 2), (1, usize::MAX)] {
        let transfer = Transfer { offset: 0, buffer: setup.pool.lease().unwrap(), start, len };
        let failed = run_one(&mut *engine, file, Action::Write(transfer));
        assert_eq!(failed.result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
    let negative = Transfer::of(setup.pool.lease().unwrap(), BLOCK, u64::MAX - 4095);
    let failed = run_one(&mut *engine, file, Action::Write(negative));
    assert_eq!(failed.result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

pub fn a_full_device_is_enospc(setup: &Setup) {
    let Some(tiny) = Tiny::mount() else { return };
    let file = match file::create(&tiny.path().join("file"), setup.direct) {
        Ok(file) => Arc::new(file),
        Err(error) => return eprintln!("skipped: tmpfs takes no direct I/O here: {error}"),
    };
    let error = space::preallocate(&file, 2 << 20).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);

    let mut engine = setup.engine();
    let id = engine.attach(file).unwrap();
    let errors: Vec<_> = (0..(2 << 20) / BLOCK)
        .map(|block| run_one(&mut *engine, id, Action::Write(whole(setup.filled(0), block))))
        .filter_map(|completion| completion.result.err())
        .collect();
    assert!(!errors.is_empty());
    assert!(errors.iter().all(|error| error.kind() == io::ErrorKind::StorageFull), "{errors:?}");
}

pub fn a_waker_ends_the_wait_from_any_thread(setup: &Setup) {
    let mut engine = setup.engine();
    let waker = engine.waker();
    let mut done = Vec::new();
    for _ in 0..3 {
        // Before the wait, or in the midst of it: both must end it.
        let thread = std::thread::spawn({
            let waker = waker.clone();
            move || waker()
        });
        engine.wait(&mut done).unwrap();
        thread.join().unwrap();
    }
    assert!(done.is_empty());
    drop(engine);
    waker();
}

pub fn dropping_the_engine_gives_back_every_buffer(setup: &Setup) {
    let mut engine = setup.engine();
    let file = engine.attach(setup.create("file")).unwrap();
    for block in 0..DEPTH {
        let action = Action::Write(whole(setup.filled(block), block));
        engine.submit(Op { token: 0, file, action });
    }
    drop(engine);
    setup.assert_no_buffer_is_lost();
}

pub fn file_numbers_are_used_again(setup: &Setup) {
    let mut engine = setup.engine();
    let first = engine.attach(setup.create("a")).unwrap();
    let second = engine.attach(setup.create("b")).unwrap();
    assert_ne!(first, second);
    engine.detach(first);
    assert_eq!(engine.attach(setup.create("c")).unwrap(), first);
    run_one(&mut *engine, first, Action::Write(whole(setup.filled(0), 0))).result.unwrap();
    assert_eq!(std::fs::read(setup.path("a")).unwrap(), b"");
    assert_eq!(std::fs::read(setup.path("c")).unwrap(), pattern(0));
}

pub fn more_files_than_a_table_holds_can_be_attached(setup: &Setup) {
    const FILES: usize = 300;
    let mut engine = setup.engine();
    let ids: Vec<_> = (0..FILES)
        .map(|number| engine.attach(setup.create(&number.to_string())).unwrap())
        .collect();
    for number in [0, FILES - 1] {
        let write = Action::Write(whole(setup.filled(number), 0));
        run_one(&mut *engine, ids[number], write).result.unwrap();
        assert_eq!(std::fs::read(setup.path(&number.to_string())).unwrap(), pattern(number));
    }
}

pub fn writes_to_nowhere_leave_the_file_and_reads_give_zeros(setup: &Setup) {
    let mut engine = setup.engine();
    let file = engine.attach(setup.create("file")).unwrap();
    let written = run_one(&mut *engine, file, Action::Write(whole(setup.filled(0), 0)));
    assert_eq!(written.result.unwrap(), BLOCK);
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), b"");
    let read = run_one(&mut *engine, file, Action::Read(whole(setup.filled(0), 0)));
    assert_eq!(read.result.unwrap(), BLOCK);
    assert_eq!(read.op.action.transfer().unwrap().buffer[..], [0; BLOCK]);
}
