//! The files of `src/` in which threads meet by hand, under [shuttle](https://docs.rs/shuttle), which runs a test in many
//! orders of its threads' steps, and finds orders in which one waits for ever. `build.rs` copies the files.
#![cfg(test)]
#![allow(dead_code)] // a part of each is enough

mod free_slots {
    include!(concat!(env!("OUT_DIR"), "/free_slots.rs"));

    mod tests {
        use super::*;
        use shuttle::sync::Arc;
        use shuttle::thread;

        #[test]
        fn slot_has_one_holder_and_every_waiter_gets_one() {
            crate::check(|| {
                let slots = Arc::new(FreeSlots::new(2));
                let held = Arc::new([Mutex::new(false), Mutex::new(false)]);
                let user = |_| {
                    let (slots, held) = (slots.clone(), held.clone());
                    thread::spawn(move || {
                        let Slot { number, is_new: _ } = slots.wait(Which::Own).unwrap();
                        let is_held = |now| {
                            std::mem::replace(&mut *held[number as usize].lock().unwrap(), now)
                        };
                        assert!(!is_held(true));
                        thread::yield_now();
                        assert!(is_held(false));
                        slots.put(number);
                    })
                };
                let users: Vec<_> = (0..4).map(user).collect();
                users.into_iter().for_each(|user| user.join().unwrap());
                assert!(slots.used() <= 2);
            });
        }

        #[test]
        fn every_waiter_gets_a_slot_that_it_may_have() {
            crate::check(|| {
                let slots = Arc::new(FreeSlots::new(1));
                let own = slots.take(Which::Own).unwrap();
                let user = |which| {
                    let slots = slots.clone();
                    thread::spawn(move || {
                        let slot = slots.wait(which).unwrap();
                        assert!(which == Which::Any || slot.number == 0);
                        slots.put(slot.number);
                    })
                };
                let users = [Which::Own, Which::Any, Which::Own, Which::Any].map(user);
                let other = slots.clone();
                let grows = thread::spawn(move || other.add(1..3));
                slots.put(own.number);
                grows.join().unwrap();
                users.into_iter().for_each(|user| user.join().unwrap());
                assert!(slots.remove(&(1..3)), "all of them came back");
            });
        }

        #[test]
        fn nobody_waits_for_a_buffer_that_was_given_up() {
            crate::check(|| {
                let slots = Arc::new(FreeSlots::new(2));
                let (lost, back) =
                    (slots.wait(Which::Own).unwrap(), slots.wait(Which::Own).unwrap());
                let user = |_| {
                    let slots = slots.clone();
                    thread::spawn(move || match slots.wait(Which::Own) {
                        Ok(slot) => slots.put(slot.number),
                        Err(error) => assert!(error.to_string().contains("broke")),
                    })
                };
                let users: Vec<_> = (0..3).map(user).collect();
                let other = slots.clone();
                let engine = thread::spawn(move || {
                    let _ = lost;
                    other.give_up();
                });
                slots.put(back.number);
                engine.join().unwrap();
                users.into_iter().for_each(|user| user.join().unwrap());
                assert!(slots.is_broken());
            });
        }
    }
}

mod wake {
    include!(concat!(env!("OUT_DIR"), "/wake.rs"));

    mod tests {
        use super::*;
        use shuttle::sync::mpsc::channel;
        use shuttle::sync::{Arc, Condvar, Mutex};
        use shuttle::thread;

        /// An eventfd: a wakeup is kept until somebody waits for it.
        #[derive(Default)]
        struct Eventfd {
            count: Mutex<usize>,
            changed: Condvar,
        }

        #[test]
        fn no_command_is_left_while_the_thread_sleeps() {
            crate::check(|| {
                const SENDERS: usize = 2;
                const EACH: usize = 2;
                let pending = Arc::new(WakePending::default());
                let eventfd = Arc::new(Eventfd::default());
                let (commands, received) = channel();
                for sender in 0..SENDERS {
                    let (commands, pending) = (commands.clone(), pending.clone());
                    let eventfd = eventfd.clone();
                    thread::spawn(move || {
                        for number in 0..EACH {
                            commands.send((sender, number)).unwrap();
                            if pending.claim() {
                                *eventfd.count.lock().unwrap() += 1;
                                eventfd.changed.notify_one();
                            }
                        }
                    });
                }
                // Shuttle fails the test if this waits for ever.
                let mut taken = Vec::new();
                loop {
                    pending.acknowledge();
                    while let Ok(command) = received.try_recv() {
                        taken.push(command);
                    }
                    if taken.len() == SENDERS * EACH {
                        break;
                    }
                    let count = eventfd.count.lock().unwrap();
                    *eventfd.changed.wait_while(count, |count| *count == 0).unwrap() = 0;
                }
                taken.sort_unstable();
                taken.dedup();
                assert_eq!(taken.len(), SENDERS * EACH);
            });
        }
    }
}

mod in_flight {
    include!(concat!(env!("OUT_DIR"), "/in_flight.rs"));

    mod tests {
        use super::*;
        use shuttle::sync::Arc;
        use shuttle::sync::atomic::{AtomicUsize, Ordering};
        use shuttle::thread;

        #[test]
        fn settle_returns_after_every_transfer_and_with_a_failure() {
            crate::check(|| {
                let transfers = Arc::new(InFlight::new());
                let ended = Arc::new(AtomicUsize::new(0));
                for number in 0..3 {
                    transfers.begin();
                    let (transfers, ended) = (transfers.clone(), ended.clone());
                    thread::spawn(move || {
                        if number > 0 {
                            transfers.fail(number);
                        }
                        ended.fetch_add(1, Ordering::SeqCst);
                        transfers.end();
                    });
                }
                let waits = {
                    let transfers = transfers.clone();
                    thread::spawn(move || transfers.settle())
                };
                let here = transfers.settle();
                assert_eq!(ended.load(Ordering::SeqCst), 3);
                let there = waits.join().unwrap();
                assert!(here.is_some() != there.is_some(), "one of two takes the failure");
            });
        }
    }
}

/// Runs a test in orders chosen at random, and in orders that change few threads.
fn check(test: impl Fn() + Send + Sync + Copy + 'static) {
    const ORDERS: usize = 2000;
    shuttle::check_random(test, ORDERS);
    shuttle::check_pct(test, ORDERS, 3);
}
