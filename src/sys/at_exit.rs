//! Threads that the process waits for before it ends, since nobody else does.
#![allow(unsafe_code)]

use super::fork::{GENERATIONS, PerProcess};
use nix::libc;
use std::os::unix::thread::JoinHandleExt;
use std::sync::{Mutex, OnceLock};
use std::thread::JoinHandle;

/// Each with its process: a forked child has none of its parent's.
static THREADS: PerProcess<Vec<(u32, JoinHandle<()>)>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// Has the end of `main`, and [`std::process::exit`], wait for a thread. Returns the thread if the system does not take that
/// on: then the caller waits.
pub fn wait_for(thread: JoinHandle<()>) -> Option<JoinHandle<()>> {
    static IS_ASKED: OnceLock<bool> = OnceLock::new();
    // SAFETY: a C function, with a handler that is there until the process ends.
    let is_asked = *IS_ASKED.get_or_init(|| unsafe { libc::atexit(join_all) } == 0);
    match THREADS.lock().filter(|_| is_asked) {
        None => Some(thread),
        Some(mut threads) => {
            threads.retain(|(_, thread)| !thread.is_finished());
            threads.push((std::process::id(), thread));
            None
        }
    }
}

extern "C" fn join_all() {
    // One that ends may have left another.
    while let Some((process, thread)) = THREADS.lock().and_then(|mut threads| threads.pop()) {
        // SAFETY: has no conditions. `std::thread::current` may be gone by now.
        let own = unsafe { libc::pthread_self() };
        if process == std::process::id() && thread.as_pthread_t() != own {
            let _ = thread.join();
        }
    }
}
