//! The queue when a call fails for good.

use crate::engine_contract::queue::write_blocks;
use crate::engine_contract::setup::*;
use nix::libc::{EIO, ENOSPC};
use ringstow::internals::engine::Action;
use ringstow::internals::sys::seam::{Call, fail_nth};
use std::io;

const BLOCKS: usize = 12;

pub fn errors_surface_unchanged(setup: &Setup) {
    let dir = setup.path("");
    for (call, errno) in [(Call::WriteBlock, EIO), (Call::WriteBlock, ENOSPC), (Call::Sync, EIO)] {
        let queue = setup.queue();
        let _failing = fail_nth(if call == Call::Sync { 1 } else { 6 }, call, &dir, errno);
        let file = queue.attach(setup.create("file")).unwrap();
        let mut results: Vec<_> = write_blocks(setup, &queue, &file, BLOCKS).iter().collect();
        results.push(sync(&queue, &file));
        let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0].raw_os_error(), Some(errno));
    }
    std::fs::write(setup.path("file"), pattern(0)).unwrap();
    let queue = setup.queue();
    let _failing = fail_nth(1, Call::ReadBlock, &dir, EIO);
    let file = queue.attach(setup.open("file")).unwrap();
    let read = Action::Read(whole(setup.pool.lease().unwrap(), 0));
    let outcome = queue.start_one(&file, read, BLOCK).wait();
    assert_eq!(outcome.result.unwrap_err().raw_os_error(), Some(EIO));
    assert!(outcome.buffer.is_some());
}

pub fn a_sync_that_fails_among_others_is_its_own_files(setup: &Setup) {
    let queue = setup.queue();
    let _failing = fail_nth(2, Call::Sync, &setup.path(""), EIO);
    let names = ["a", "b", "c"];
    let files = names.map(|name| queue.attach(setup.create(name)).unwrap());
    let syncing = files.each_ref().map(|file| queue.start_one(file, Action::Sync, 0));
    let results = syncing.map(|sync| sync.wait().result);
    let errnos = results.iter().map(|r| r.as_ref().err().and_then(io::Error::raw_os_error));
    assert_eq!(errnos.collect::<Vec<_>>(), [None, Some(EIO), None]);
}
