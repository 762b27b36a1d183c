//! What the queue makes of an engine: requests carried to their end, each answered once.

use crate::engine_contract::setup::*;
use crossbeam_channel::{Receiver, Sender, unbounded};
use fake_engines::{Twist, Twisted};
use ringstow::internals::engine::io_mode::{Trial, trial};
use ringstow::internals::engine::queue::{
    Answer, Attached, Outcome, Queue, Reply, Request, is_cancelled,
};
use ringstow::internals::engine::{Action, Completion, Engine, FileId, Op, Transfer};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// A request that nothing aborts.
fn request(file: FileId, action: Action, needed: usize, reply: Reply) -> Request {
    Request { file, action, needed, is_bulk: false, abort: None, reply }
}

/// Submits writes of whole blocks as buffers come free; the outcomes arrive in the channel.
pub fn write_blocks(
    setup: &Setup,
    queue: &Queue,
    file: &Attached,
    count: usize,
) -> Receiver<io::Result<()>> {
    let (send, outcomes) = unbounded();
    for block in 0..count {
        let send = send.clone();
        // The buffer goes home here, and the next block can be filled.
        let reply = Reply::new(move |Outcome { result, buffer, .. }| {
            drop(buffer);
            let _ = send.send(result);
        });
        let action = Action::Write(whole(setup.filled(block), block));
        queue.submit(request(file.id(), action, BLOCK, reply));
    }
    outcomes
}

pub fn many_more_requests_than_the_depth_all_complete(setup: &Setup) {
    const BLOCKS: usize = 16 * DEPTH;
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    let outcomes = write_blocks(setup, &queue, &file, BLOCKS);
    assert_eq!(outcomes.iter().map(Result::unwrap).count(), BLOCKS);
    sync(&queue, &file).unwrap();
    let expected: Vec<u8> = (0..BLOCKS).flat_map(pattern).collect();
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), expected);
    setup.assert_no_buffer_is_lost();
}

pub fn a_file_shorter_than_needed_is_an_unexpected_end(setup: &Setup) {
    std::fs::write(setup.path("file"), &pattern(0)[..5000]).unwrap();
    let queue = setup.queue();
    let file = queue.attach(setup.open("file")).unwrap();
    let read = |needed| {
        let action = Action::Read(whole(setup.pool.lease().unwrap(), 0));
        queue.start_one(&file, action, needed).wait()
    };

    let outcome = read(5000);
    outcome.result.unwrap();
    assert_eq!(outcome.buffer.unwrap()[..5000], pattern(0)[..5000]);
    assert_eq!(read(5001).result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(read(BLOCK).result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(read(BLOCK + 1).result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

pub fn a_misaligned_direct_transfer_is_refused_on_any_file_system(setup: &Setup) {
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    for (offset, start, len) in [(512, 0, 4096), (0, 512, 4096), (0, 0, 4608)] {
        let transfer = Transfer { offset, buffer: setup.filled(0), start, len };
        let outcome = queue.start_one(&file, Action::Write(transfer), len).wait();
        assert!(outcome.buffer.is_some());
        match outcome.result {
            Err(error) => {
                assert!(setup.direct);
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
            Ok(()) => assert!(!setup.direct),
        }
    }
}

pub fn an_aborted_request_is_cancelled_without_io(setup: &Setup) {
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    let (send, outcomes) = unbounded();
    let reply = Reply::new(move |outcome| send.send(outcome).unwrap());
    let action = Action::Write(whole(setup.filled(0), 0));
    let abort = Some(Arc::new(AtomicBool::new(true)));
    queue.submit(Request { abort, ..request(file.id(), action, BLOCK, reply) });
    let Outcome { result, buffer, .. } = outcomes.recv().unwrap();
    let error = result.unwrap_err();
    assert!(is_cancelled(&error));
    assert_ne!(error.kind(), io::ErrorKind::Interrupted);
    assert!(buffer.is_some());
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), b"");
}

pub fn a_file_is_closed_after_the_requests_submitted_before(setup: &Setup) {
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    let id = file.id();
    let outcomes = write_blocks(setup, &queue, &file, BUFFERS);
    drop(file);
    assert_eq!(outcomes.iter().map(Result::unwrap).count(), BUFFERS);
    let other = queue.attach(setup.create("other")).unwrap();
    assert_eq!(other.id(), id);
    sync(&queue, &other).unwrap();
}

pub fn dropping_the_queue_finishes_what_was_submitted(setup: &Setup) {
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    let outcomes = write_blocks(setup, &queue, &file, BUFFERS);
    drop(queue);
    assert_eq!(outcomes.iter().map(Result::unwrap).count(), BUFFERS);
    let expected: Vec<u8> = (0..BUFFERS).flat_map(pattern).collect();
    assert_eq!(std::fs::read(setup.path("file")).unwrap(), expected);
    setup.assert_no_buffer_is_lost();
}

pub fn a_reply_may_submit_the_next_request(setup: &Setup) {
    let queue = Arc::new(setup.queue());
    let file = queue.attach(setup.create("file")).unwrap();
    let (id, again) = (file.id(), queue.clone());
    let (send, outcomes) = unbounded();
    let reply = Reply::new(move |outcome| {
        outcome.result.unwrap();
        let reply = Reply::new(move |outcome| send.send(outcome.result).unwrap());
        again.submit(request(id, Action::Sync, 0, reply));
    });
    let action = Action::Write(whole(setup.filled(0), 0));
    queue.submit(request(id, action, BLOCK, reply));
    outcomes.recv().unwrap().unwrap();
}

pub fn a_trial_tells_whether_a_file_takes_transfers(setup: &Setup) {
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    trial(&queue, &file, Trial::Write(0), setup.filled(0)).result.unwrap();
    let back = queue.attach(setup.open("file")).unwrap();
    let read = trial(&queue, &back, Trial::Read, setup.pool.lease().unwrap());
    read.result.unwrap();
    assert_eq!(read.buffer.unwrap()[..4096], pattern(0)[..4096]);
    assert!(trial(&queue, &back, Trial::Write(0), setup.filled(0)).result.is_err());
}

/// Syncs all files at the same time.
fn sync_all(queue: &Queue, files: &[Attached]) -> Vec<io::Result<()>> {
    let start = |file| queue.start_one(file, Action::Sync, 0);
    let syncing: Vec<Answer> = files.iter().map(start).collect();
    syncing.into_iter().map(|sync| sync.wait().result).collect()
}

pub fn more_files_than_the_depth_are_synced_at_the_same_time(setup: &Setup) {
    let queue = setup.queue();
    let attach = |i| queue.attach(setup.create(&format!("file {i}"))).unwrap();
    let files: Vec<Attached> = (0..3 * DEPTH).map(attach).collect();
    let results = sync_all(&queue, &files);
    assert_eq!(results.into_iter().map(Result::unwrap).count(), files.len());
}

/// Interrupts whatever it is given, after setting the request's abort.
struct Aborting {
    abort: Arc<AtomicBool>,
    taken: Vec<Op>,
    submitted: Arc<AtomicUsize>,
}

impl Twist for Aborting {
    fn submit(&mut self, _: &mut dyn Engine, op: Op) {
        self.submitted.fetch_add(1, Ordering::Relaxed);
        self.taken.push(op);
    }

    fn wait(&mut self, inner: &mut dyn Engine, done: &mut Vec<Completion>) -> io::Result<()> {
        if self.taken.is_empty() {
            return inner.wait(done);
        }
        self.abort.store(true, Ordering::Relaxed);
        done.extend(self.taken.drain(..).map(|op| {
            let result = Err(io::ErrorKind::Interrupted.into());
            Completion { op, result }
        }));
        Ok(())
    }
}

#[test]
fn an_abort_ends_a_request_before_its_next_attempt() {
    let setup = Setup::portable_buffered().unwrap();
    let abort = Arc::new(AtomicBool::new(false));
    let submitted = Arc::new(AtomicUsize::new(0));
    let aborting =
        Aborting { abort: abort.clone(), taken: Vec::new(), submitted: submitted.clone() };
    let queue = setup.queue_over(|inner| Twisted::engine(inner, aborting));
    let file = queue.attach(setup.create("file")).unwrap();
    let (send, outcomes) = unbounded();
    let reply = Reply::new(move |outcome| send.send(outcome).unwrap());
    let action = Action::Write(whole(setup.filled(0), 0));
    queue.submit(Request { abort: Some(abort), ..request(file.id(), action, BLOCK, reply) });
    assert!(is_cancelled(&outcomes.recv().unwrap().result.unwrap_err()));
    assert_eq!(submitted.load(Ordering::Relaxed), 1);
}

/// Keeps syncs to itself until it has been given `count` of them.
struct Gathering {
    count: usize,
    kept: Vec<Op>,
}

impl Twist for Gathering {
    fn submit(&mut self, inner: &mut dyn Engine, op: Op) {
        self.kept.push(op);
        if self.kept.len() == self.count {
            self.kept.drain(..).for_each(|op| inner.submit(op));
        }
    }
}

#[test]
fn no_file_waits_for_another_ones_sync() {
    let setup = Setup::portable_buffered().unwrap();
    let gathering = Gathering { count: 3, kept: Vec::new() };
    let queue = setup.queue_over(|inner| Twisted::engine(inner, gathering));
    let attach = |name: &&str| queue.attach(setup.create(name)).unwrap();
    let files: Vec<Attached> = ["a", "b", "c"].iter().map(attach).collect();
    let (send, synced) = unbounded();
    // Left behind if it waits for ever.
    std::thread::spawn(move || send.send(sync_all(&queue, &files).iter().all(Result::is_ok)));
    assert!(synced.recv_timeout(Duration::from_secs(60)).expect("one at a time, they never end"));
}

/// Says that it got a sync and waits with it, and tells in which order it gets the transfers, by their offsets.
struct Telling {
    waits: Sender<()>,
    go: Receiver<()>,
    tell: Sender<u64>,
}

impl Twist for Telling {
    fn submit(&mut self, inner: &mut dyn Engine, op: Op) {
        match op.action.transfer() {
            Some(transfer) => self.tell.send(transfer.offset).unwrap(),
            None => {
                self.waits.send(()).unwrap();
                self.go.recv().unwrap();
            }
        }
        inner.submit(op);
    }
}

#[test]
fn nobody_waits_for_all_that_a_background_save_has_copied() {
    let setup = Setup::portable_buffered().unwrap();
    let ((waits, waiting), (send_go, go), (tell, told)) = (unbounded(), unbounded(), unbounded());
    let queue = setup.queue_over(|inner| Twisted::engine(inner, Telling { waits, go, tell }));
    let file = queue.attach(setup.create("file")).unwrap();
    let submit = |action, needed, is_bulk| {
        let reply = Reply::new(|outcome: Outcome| outcome.result.unwrap());
        queue.submit(Request { is_bulk, ..request(file.id(), action, needed, reply) });
    };
    let write = |block, is_bulk| {
        submit(Action::Write(whole(setup.filled(block), block)), BLOCK, is_bulk);
    };
    submit(Action::Sync, 0, false);
    waiting.recv().unwrap();
    (0..8).for_each(|block| write(block, true));
    (8..10).for_each(|block| write(block, false));
    send_go.send(()).unwrap();
    let order: Vec<u64> = told.iter().take(10).map(|offset| offset / BLOCK as u64).collect();
    let place = |block| order.iter().position(|&at| at == block).unwrap();
    assert!(place(8) < 2 && place(9) < 4, "{order:?}");
    let bulk: Vec<u64> = order.iter().copied().filter(|&block| block < 8).collect();
    assert_eq!(bulk, (0..8).collect::<Vec<u64>>());
}

#[test]
fn a_queue_may_be_shared_by_threads() {
    fn shareable<T: Send + Sync>() {}
    shareable::<Queue>();
    shareable::<Attached>();
}

#[test]
fn engine_that_cannot_be_built_fails_start() {
    let refused = Queue::start("ringstow-io", || Err(io::ErrorKind::PermissionDenied.into()));
    assert_eq!(refused.err().unwrap().kind(), io::ErrorKind::PermissionDenied);
    assert!(Queue::start("ringstow-io", || panic!("while building")).is_err());
}

#[test]
fn a_dead_io_thread_answers_everything_with_an_error() {
    let setup = Setup::portable_buffered().unwrap();
    let queue = setup.queue();
    let file = queue.attach(setup.create("file")).unwrap();
    let (send, called) = unbounded();
    let reply = Reply::new(move |_| {
        let _ = send.send(());
        panic!("in a reply");
    });
    queue.submit(request(file.id(), Action::Sync, 0, reply));
    let outcomes = write_blocks(&setup, &queue, &file, BUFFERS);
    assert_eq!(outcomes.iter().count(), BUFFERS);
    // Writes may all end well before the sync does.
    called.recv().unwrap();
    assert!(sync(&queue, &file).is_err());
    assert!(queue.attach(setup.create("other")).is_err());
    drop((queue, file));
    setup.assert_no_buffer_is_lost();
}
