//! The environment of the process, which another language may change meanwhile.
//!
//! Rust's lock around it keeps out Rust's own writers alone. `os.environ` of Python calls `setenv`, which may free what another
//! thread reads, and is called under Python's lock: so that one is held for each look.

use std::ffi::{OsStr, OsString};
use std::sync::OnceLock;

/// Calls what it is given, once, under a lock.
type Within = fn(&mut dyn FnMut());

static WITHIN: OnceLock<Within> = OnceLock::new();

/// Has each look of this process at its environment made within a function, which holds what writers hold.
pub fn look_within(within: Within) {
    let _ = WITHIN.set(within);
}

/// Runs what looks at the environment, such as another library.
pub fn look<T>(at: impl FnOnce() -> T) -> T {
    let Some(within) = WITHIN.get() else { return at() };
    let (mut at, mut seen) = (Some(at), None);
    within(&mut || seen = at.take().map(|at| at()));
    seen.expect("`within` calls it")
}

/// The value of a variable.
pub fn var_os(name: impl AsRef<OsStr>) -> Option<OsString> {
    look(|| std::env::var_os(name))
}

/// All variables.
pub fn vars_os() -> Vec<(OsString, OsString)> {
    look(|| std::env::vars_os().collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        static LOOKS: Cell<usize> = const { Cell::new(0) };
    }

    /// How many looks of this thread `run` makes.
    pub(crate) fn looks_in(run: impl FnOnce()) -> usize {
        look_within(|at| {
            LOOKS.set(LOOKS.get() + 1);
            at();
        });
        LOOKS.set(0);
        run();
        LOOKS.get()
    }

    #[test]
    fn each_look_is_made_within_what_keeps_writers_out() {
        let looks = looks_in(|| {
            assert_eq!(var_os("PATH"), std::env::var_os("PATH"));
            assert!(vars_os().iter().any(|(name, _)| name == "PATH"));
            assert_eq!(look(|| 7), 7);
        });
        assert_eq!(looks, 3);
    }
}
