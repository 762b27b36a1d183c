//! The queue over a failing disk.

use crate::common::fault_seeds;
use crate::engine_contract::queue::write_blocks;
use crate::engine_contract::setup::*;
use fake_engines::{Faults, Faulty, Short};
use ringstow::internals::engine::Action;
use ringstow::internals::engine::queue::Queue;
use std::io;

const BLOCKS: usize = 12;

fn queue_with(setup: &Setup, faults: Faults) -> Queue {
    setup.queue_over(|engine| Box::new(Faulty::new(engine, faults)))
}

pub fn short_interrupted_and_reordered_transfers_give_the_same_file(setup: &Setup) {
    let expected: Vec<u8> = (0..BLOCKS).flat_map(pattern).collect();
    for seed in fault_seeds() {
        let queue = queue_with(setup, Faults::survivable(seed));
        let file = queue.attach(setup.create("file")).unwrap();
        let outcomes = write_blocks(setup, &queue, &file, BLOCKS);
        assert_eq!(outcomes.iter().map(Result::unwrap).count(), BLOCKS, "seed {seed}");
        sync(&queue, &file).unwrap();
        assert_eq!(std::fs::read(setup.path("file")).unwrap(), expected, "seed {seed}");

        let back = queue.attach(setup.open("file")).unwrap();
        for block in 0..BLOCKS {
            let read = whole(setup.pool.lease().unwrap(), block);
            let outcome = queue.start_one(&back, Action::Read(read), BLOCK).wait();
            outcome.result.unwrap();
            assert_eq!(outcome.buffer.unwrap()[..], pattern(block), "seed {seed}, block {block}");
        }
    }
    setup.assert_no_buffer_is_lost();
}

pub fn what_is_interrupted_for_ever_fails_in_the_end(setup: &Setup) {
    let queue = queue_with(setup, Faults { interrupt_percent: 100, ..Faults::default() });
    let file = queue.attach(setup.create("file")).unwrap();
    let kind = sync(&queue, &file).unwrap_err().kind();
    assert!(matches!(kind, io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock), "{kind}");
}

pub fn a_broken_engine_answers_every_request(setup: &Setup) {
    let faults = Faults { break_after: Some(3), ..Faults::default() };
    let queue = queue_with(setup, faults);
    let file = queue.attach(setup.create("file")).unwrap();
    let results: Vec<_> = write_blocks(setup, &queue, &file, BLOCKS).iter().collect();
    assert_eq!(results.len(), BLOCKS);
    assert!(results.iter().any(Result::is_err));
    assert!(sync(&queue, &file).is_err());
    drop((queue, file));
    setup.assert_no_buffer_is_lost();
}

pub fn what_the_system_is_short_for_waits_for_a_completion(setup: &Setup) {
    let (engine, supply) = Short::new();
    let queue = setup.queue_over(|_| Box::new(engine));
    let file = queue.attach(setup.create("file")).unwrap();
    let answers = [(); 3].map(|()| queue.start_one(&file, Action::Sync, 0));
    // Each wakes the thread and is answered by it: it would ask again for what was refused.
    (0..100).for_each(|_| drop(queue.attach(setup.open("file")).unwrap()));
    assert_eq!(supply.refused(), 2);
    supply.come();
    answers.into_iter().for_each(|answer| answer.wait().result.unwrap());
    assert_eq!(supply.refused(), 2);
}
