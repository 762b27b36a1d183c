//! An allocator that counts what each thread has allocated, and a bound that a test can put on it.
//!
//! The crate allocation-counter does not know `realloc`: it counts the old and the new memory of a list that grows, which
//! the system does not have at the same time (it moves pages).
#![allow(unsafe_code)] // an allocator is

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// What an input may take besides four times its size.
pub const CONSTANT: usize = 1 << 20;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: isize) {
    // A thread that ends has no counter any more, and allocates all the same.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(now.get())));
    });
}

// SAFETY: all calls go to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes as isize - layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(old, layout, bytes) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that this thread had allocated at one time during a call, beyond those before it.
pub fn most_during<T>(call: impl FnOnce() -> T) -> (usize, T) {
    let before = NOW.get();
    MOST.set(before);
    let result = call();
    ((MOST.get() - before) as usize, result)
}

/// Runs a call that reads `bytes` bytes, and checks that it takes at most four times as many and `constant`.
#[track_caller]
pub fn bounded<T>(bytes: usize, constant: usize, call: impl FnOnce() -> T) -> T {
    let (most, result) = most_during(call);
    assert!(
        most <= 4 * bytes + constant,
        "{most} bytes of memory for {bytes} bytes, which is more than 4 times and {constant}"
    );
    result
}
