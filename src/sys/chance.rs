//! The time and random numbers: what no two runs have in common. A test fixes both for a thread, so that a run can be
//! repeated (builds with debug assertions only).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970-01-01 UTC.
pub(crate) fn now_unix_ms() -> u64 {
    #[cfg(any(debug_assertions, test))]
    if let Some(now) = fixed::now_unix_ms() {
        return now;
    }
    unix_ms(SystemTime::now())
}

/// A time in milliseconds since 1970-01-01 UTC.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// A number that is different at every call, in every process, on every host.
///
/// [`RandomState`] has random keys in each thread, but a forked child has its parent's. So the process number and the
/// time are hashed too.
pub(crate) fn random() -> u64 {
    #[cfg(any(debug_assertions, test))]
    if let Some(number) = fixed::random() {
        return number;
    }
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    hasher.write_u128(now.as_nanos());
    hasher.finish()
}

/// Sixteen hex digits, different at every call.
pub(crate) fn unique() -> String {
    format!("{:016x}", random())
}

/// A step from one generation to the next, for a file system on which another host may see the same files and save
/// at the same time: both would choose the same number with one step of 1. Large enough that two steps are hardly ever
/// equal, and small enough that a directory never runs out of numbers.
pub(crate) fn random_step() -> u64 {
    const STEP_MAX: u64 = 1 << 32;
    1 + random() % STEP_MAX
}

#[cfg(any(debug_assertions, test))]
pub use fixed::{Chance, fix};

#[cfg(any(debug_assertions, test))]
mod fixed {
    use std::cell::RefCell;

    /// What a test has in place of the time and of random numbers.
    pub trait Chance {
        /// Milliseconds since 1970-01-01 UTC.
        fn now_unix_ms(&mut self) -> u64;

        /// The next random number; no two are equal.
        fn random(&mut self) -> u64;
    }

    thread_local! {
        static FIXED: RefCell<Option<Box<dyn Chance>>> = const { RefCell::new(None) };
    }

    /// Takes both from `chance` on this thread from now on.
    pub fn fix(chance: impl Chance + 'static) {
        FIXED.set(Some(Box::new(chance)));
    }

    pub(super) fn now_unix_ms() -> Option<u64> {
        FIXED.with_borrow_mut(|fixed| fixed.as_mut().map(|fixed| fixed.now_unix_ms()))
    }

    pub(super) fn random() -> Option<u64> {
        FIXED.with_borrow_mut(|fixed| fixed.as_mut().map(|fixed| fixed.random()))
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::chance::*;
    use std::collections::HashSet;

    #[test]
    fn random_numbers_differ_unless_they_are_fixed_for_the_thread() {
        struct Sevens;
        impl Chance for Sevens {
            fn now_unix_ms(&mut self) -> u64 {
                77
            }

            fn random(&mut self) -> u64 {
                7
            }
        }
        assert_ne!(random(), random());
        assert!(now_unix_ms() > 77);
        let fixed = std::thread::spawn(|| {
            fix(Sevens);
            (random(), random(), now_unix_ms())
        });
        assert_eq!(fixed.join().unwrap(), (7, 7, 77));
        assert_ne!(random(), random());
    }

    #[test]
    fn unique_texts_differ_and_fit_file_names() {
        let all: HashSet<String> = (0..1000).map(|_| unique()).collect();
        assert_eq!(all.len(), 1000);
        let name =
            |write| crate::format::names::uncommitted_write("rank00000-0.safetensors", write);
        assert!(all.iter().all(|write| crate::format::names::split_write(&name(write)).is_some()));
    }
}
