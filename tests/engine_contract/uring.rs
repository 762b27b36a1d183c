//! What only the io_uring engine has: registered buffers.
#![cfg(all(target_os = "linux", feature = "uring"))]

use crate::setup::*;
use ringstow::internals::config::Switch;
use ringstow::internals::engine::uring::Uring;
use ringstow::internals::engine::{Action, Engine};
use ringstow::internals::pool::Pool;

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
