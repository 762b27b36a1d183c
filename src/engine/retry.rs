//! What to do after a transfer that came back short, interrupted or refused for now. Pure: takes
//! results, returns steps, and never does I/O.

use crate::limits::ALIGN;
use std::io;

/// Interruptions in a row after which a transfer fails. Far beyond what a working kernel does; it only
/// keeps a broken one from blocking a save forever.
const INTERRUPTIONS_MAX: u32 = 1000;

/// Continued transfers in a row that may end where the one before did. A direct read at the end of a file
/// whose length is not a multiple of [`ALIGN`] does that, so a file that is too short is detected after
/// this many reads.
const STALLED_MAX: u32 = 16;

/// How far one request has come.
#[derive(Debug)]
pub(super) struct Progress {
    write: bool,
    direct: bool,
    /// Bytes after which the request is complete.
    needed: usize,
    /// Bytes moved so far, from the start.
    moved: usize,
    /// Where the transfer now in flight began, in bytes from the start.
    from: usize,
    /// Interruptions (EINTR, EAGAIN) since a transfer last moved anything.
    interruptions: u32,
    /// Short transfers since one last got further.
    stalled: u32,
}

/// What comes next.
#[derive(Debug)]
pub(super) enum Step {
    /// All that is needed has been moved.
    Done,
    /// Transfer again, without this many bytes from the start.
    Continue {
        /// Bytes to leave out; a multiple of [`ALIGN`] for a direct file.
        skip: usize,
        /// The system was short of something: let other threads run first.
        pause: bool,
    },
    /// Retrying does not help.
    Fail(io::Error),
}

impl Progress {
    /// A transfer that is complete after `needed` bytes.
    pub(super) fn new(write: bool, direct: bool, needed: usize) -> Self {
        Self { write, direct, needed, moved: 0, from: 0, interruptions: 0, stalled: 0 }
    }

    /// A sync, which moves nothing.
    pub(super) fn of_sync() -> Self {
        Self::new(true, false, 0)
    }

    /// Takes in how the transfer in flight ended.
    pub(super) fn next(&mut self, result: io::Result<usize>) -> Step {
        match result {
            Ok(bytes) => self.advance(bytes),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {
                    self.interruptions += 1;
                    if self.interruptions >= INTERRUPTIONS_MAX {
                        return Step::Fail(error);
                    }
                    Step::Continue { skip: self.from, pause: true }
                }
                _ => Step::Fail(error),
            },
        }
    }

    fn advance(&mut self, bytes: usize) -> Step {
        debug_assert!(!self.direct || self.from.is_multiple_of(ALIGN));
        let reached = self.from + bytes;
        if reached.max(self.moved) >= self.needed {
            return Step::Done;
        }
        if bytes == 0 {
            return Step::Fail(self.ended());
        }
        if reached > self.moved {
            self.moved = reached;
            self.stalled = 0;
        } else {
            self.stalled += 1;
            if self.stalled >= STALLED_MAX {
                return Step::Fail(self.ended());
            }
        }
        self.interruptions = 0;
        // A direct transfer starts at a multiple of ALIGN only: the bytes before the point reached
        // are moved once more, which is harmless.
        self.from = if self.direct { self.moved / ALIGN * ALIGN } else { self.moved };
        Step::Continue { skip: self.from, pause: false }
    }

    /// The error when no more bytes can be moved.
    fn ended(&self) -> io::Error {
        let (moved, needed) = (self.moved, self.needed);
        if self.write {
            let text = format!("the system took {moved} of {needed} bytes and no more");
            io::Error::new(io::ErrorKind::WriteZero, text)
        } else {
            let text = format!("the file ended after {moved} of {needed} bytes");
            io::Error::new(io::ErrorKind::UnexpectedEof, text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(step: Step) -> usize {
        match step {
            Step::Continue { skip, .. } => skip,
            other => panic!("{other:?}"),
        }
    }

    fn kind(step: Step) -> io::ErrorKind {
        match step {
            Step::Fail(error) => error.kind(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn buffered_transfer_continues_where_it_stopped() {
        let mut progress = Progress::new(true, false, 10_000);
        assert_eq!(skip(progress.next(Ok(1))), 1);
        assert_eq!(skip(progress.next(Ok(5000))), 5001);
        assert!(matches!(progress.next(Ok(4999)), Step::Done));
    }

    #[test]
    fn direct_transfer_continues_from_the_last_aligned_byte() {
        let mut progress = Progress::new(true, true, 16384);
        assert_eq!(skip(progress.next(Ok(512))), 0);
        assert_eq!(skip(progress.next(Ok(4608))), 4096);
        assert_eq!(skip(progress.next(Ok(8191))), 8192);
        assert!(matches!(progress.next(Ok(8192)), Step::Done));
    }

    #[test]
    fn short_read_with_the_needed_bytes_is_complete() {
        let mut progress = Progress::new(false, true, 5000);
        assert!(matches!(progress.next(Ok(5000)), Step::Done));
    }

    #[test]
    fn end_of_a_direct_file_is_detected() {
        let mut progress = Progress::new(false, true, 6000);
        let mut step = progress.next(Ok(5000));
        while let Step::Continue { skip, .. } = step {
            assert_eq!(skip, 4096);
            step = progress.next(Ok(5000 - 4096));
        }
        assert_eq!(kind(step), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn zero_bytes_mean_end_of_file_or_full_device() {
        assert_eq!(kind(Progress::new(false, false, 1).next(Ok(0))), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(Progress::new(true, false, 1).next(Ok(0))), io::ErrorKind::WriteZero);
    }

    #[test]
    fn interruptions_are_retried_but_not_forever() {
        let mut progress = Progress::new(true, false, 10);
        for _ in 0..INTERRUPTIONS_MAX - 1 {
            assert_eq!(skip(progress.next(Err(io::ErrorKind::Interrupted.into()))), 0);
        }
        assert_eq!(skip(progress.next(Ok(4))), 4);
        for _ in 0..INTERRUPTIONS_MAX - 1 {
            assert_eq!(skip(progress.next(Err(io::ErrorKind::WouldBlock.into()))), 4);
        }
        let last = progress.next(Err(io::ErrorKind::WouldBlock.into()));
        assert_eq!(kind(last), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn other_errors_pass_through_unchanged() {
        let error = io::Error::from_raw_os_error(nix::libc::EIO);
        match Progress::of_sync().next(Err(error)) {
            Step::Fail(error) => assert_eq!(error.raw_os_error(), Some(nix::libc::EIO)),
            other => panic!("{other:?}"),
        }
        assert!(matches!(Progress::of_sync().next(Ok(0)), Step::Done));
    }
}
