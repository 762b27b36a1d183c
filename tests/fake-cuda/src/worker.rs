//! The thread of a stream: executes its operations one after another.

use crate::abi::Handle;
use crate::driver::{Guard, driver};
use crate::stream::{Copy2d, Place, Work};
use std::cell::Cell;
use std::thread;

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is a stream's: then a host function is running, and may not call the
/// driver.
pub fn is_worker() -> bool {
    IS_WORKER.get()
}

/// The thread of a stream.
pub fn serve(stream: Handle) {
    IS_WORKER.set(true);
    let mut state = driver().lock();
    loop {
        state = driver().wait_until(state, |state| state.is_ready(stream));
        let found = state.running(stream);
        let Some(operation) = found.queue.pop_front() else {
            state.streams.remove(&stream);
            driver().notify();
            return;
        };
        found.running = Some(operation.work);
        state = execute(state, stream);
        let found = state.running(stream);
        found.running = None;
        found.completed += 1;
        driver().notify();
    }
}

/// Does what `running` says. Gives the lock away while it waits, copies or calls back.
fn execute(mut state: Guard, stream: Handle) -> Guard {
    let context = state.streams[&stream].context;
    if let Some(bytes) = state.running(stream).running.and_then(|work| work.bytes()) {
        state = delay(state, bytes);
        if let Some(code) = state.control.take_failure("execute") {
            state.contexts.lose(context, code);
        }
    }
    let seq = state.streams[&stream].completed + 1;
    let is_lost = state.contexts.lost(context).is_some();
    // Looked at only now: it may have been abandoned during the delay.
    match state.running(stream).running.unwrap_or(Work::Wait) {
        Work::Record(event) => state.stamp(event, Place { stream, seq }),
        Work::Free(address) => state.free_now(address),
        Work::Copy(copy) if !is_lost => return copy_rows(state, stream, copy),
        Work::Fill { to, value, len } if !is_lost => {
            // SAFETY: inside of an allocation when it was submitted; the alias stays mapped.
            unsafe { state.memory.reach(to).write_bytes(value, len) }
        }
        Work::Call { function, argument } if !is_lost => {
            drop(state);
            // SAFETY: the program gave both to be called once, on any thread.
            unsafe { function(argument) };
            return driver().lock();
        }
        Work::Wait | Work::Copy(_) | Work::Fill { .. } | Work::Call { .. } => {}
    }
    state
}

fn delay(state: Guard, bytes: usize) -> Guard {
    let delay = state.control.delay(bytes);
    if delay.is_zero() {
        return state;
    }
    drop(state);
    thread::sleep(delay);
    driver().lock()
}

fn copy_rows(mut state: Guard, stream: Handle, copy: Copy2d) -> Guard {
    let (from, to) = (state.memory.reach(copy.from), state.memory.reach(copy.to));
    state.running(stream).is_copying = true;
    drop(state);
    for row in 0..copy.height {
        // SAFETY: both ranges were checked when the copy was submitted; device memory stays mapped,
        // host memory is the program's to keep until the copy is done.
        unsafe {
            let from = from.add(row * copy.from_pitch);
            to.add(row * copy.to_pitch).copy_from(from, copy.width);
        }
    }
    let mut state = driver().lock();
    state.running(stream).is_copying = false;
    driver().notify();
    state
}
