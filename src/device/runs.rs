//! Copies runs of bytes that lie evenly apart.

use std::ptr;

/// Copies `count` runs of `len` bytes. `from` and `to` are the addresses of the first run and the bytes from one run to
/// the next.
///
/// # Safety
/// Every run is readable at its source. At its destination it is writable, and used by nobody else.
pub(super) unsafe fn copy_runs(
    from: (*const u8, isize),
    to: (*mut u8, isize),
    len: usize,
    count: usize,
) {
    // SAFETY: the same contract; the arms fix an element's size for the compiler.
    unsafe {
        match len {
            1 => copy_runs_of::<1>(from, to, count),
            2 => copy_runs_of::<2>(from, to, count),
            4 => copy_runs_of::<4>(from, to, count),
            8 => copy_runs_of::<8>(from, to, count),
            16 => copy_runs_of::<16>(from, to, count),
            len => (0..count as isize).for_each(|i| {
                let (from, to) =
                    (from.0.wrapping_offset(i * from.1), to.0.wrapping_offset(i * to.1));
                ptr::copy_nonoverlapping(from, to, len);
            }),
        }
    }
}

/// [`copy_runs`] for runs of `N` bytes.
///
/// # Safety
/// As for [`copy_runs`].
unsafe fn copy_runs_of<const N: usize>(
    (from, from_step): (*const u8, isize),
    (to, to_step): (*mut u8, isize),
    count: usize,
) {
    for i in 0..count as isize {
        // SAFETY: run `i` is readable, and its place is writable. Bytewise, so of any alignment.
        unsafe {
            let run = from.wrapping_offset(i * from_step).cast::<[u8; N]>().read();
            to.wrapping_offset(i * to_step).cast::<[u8; N]>().write(run);
        }
    }
}
