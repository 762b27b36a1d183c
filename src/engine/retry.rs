//! What to do after a transfer that came back short, interrupted or refused for now. Pure: takes
//! results, returns steps, and never does I/O.

use crate::limits::{ALIGN, INTERRUPTIONS_MAX};
use std::io;
use std::time::Duration;

/// Continued transfers in a row that may end where the one before did. A direct read at the end of a file
/// whose length is not a multiple of [`ALIGN`] does that, so a file that is too short is detected after
/// this many reads.
const STALLED_MAX: u32 = 16;

/// How long to wait after EAGAIN or EBUSY: longer each time in a row.
pub(super) fn pause(times: u32) -> Duration {
    Duration::from_millis(1 << times.min(6))
}

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
        /// The system was short of something: first wait until an operation completes, or for so long if none is in flight.
        pause: Option<Duration>,
    },
    /// Retrying does not help.
    Fail(io::Error),
}

impl Progress {
    /// A transfer that is complete after `needed` bytes; a sync needs none.
    pub(super) fn new(write: bool, direct: bool, needed: usize) -> Self {
        Self { write, direct, needed, moved: 0, from: 0, interruptions: 0, stalled: 0 }
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
                    let is_short = error.kind() == io::ErrorKind::WouldBlock;
                    let pause = is_short.then(|| pause(self.interruptions - 1));
                    Step::Continue { skip: self.from, pause }
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
        Step::Continue { skip: self.from, pause: None }
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

    /// A [`Step`] to compare with.
    #[derive(Debug, PartialEq)]
    enum Next {
        Done,
        Skip(usize),
        Fail(io::ErrorKind),
    }

    fn next(progress: &mut Progress, result: io::Result<usize>) -> Next {
        match progress.next(result) {
            Step::Done => Next::Done,
            Step::Continue { skip, .. } => Next::Skip(skip),
            Step::Fail(error) => Next::Fail(error.kind()),
        }
    }

    #[test]
    fn transfer_continues_where_it_stopped() {
        use Next::{Done, Fail, Skip};
        use io::ErrorKind::{UnexpectedEof, WriteZero};
        const WRITE: bool = true;
        const DIRECT: bool = true;
        // Bytes needed; then bytes moved, and what comes next.
        type Case<'a> = (bool, bool, usize, &'a [(usize, Next)]);
        let cases: [Case; 6] = [
            (WRITE, !DIRECT, 10_000, &[(1, Skip(1)), (5000, Skip(5001)), (4999, Done)]),
            // From the last aligned byte.
            (WRITE, DIRECT, 16384, &[(512, Skip(0)), (4608, Skip(4096)), (12288, Done)]),
            (WRITE, DIRECT, 16384, &[(12287, Skip(8192)), (8192, Done)]),
            (!WRITE, DIRECT, 5000, &[(5000, Done)]), // short, with the needed bytes
            (!WRITE, !DIRECT, 1, &[(0, Fail(UnexpectedEof))]),
            (WRITE, !DIRECT, 1, &[(0, Fail(WriteZero))]), // a full device
        ];
        for (write, direct, needed, steps) in cases {
            let mut progress = Progress::new(write, direct, needed);
            for (moved, expected) in steps {
                assert_eq!(next(&mut progress, Ok(*moved)), *expected, "{needed} needed");
            }
        }
    }

    #[test]
    fn end_of_a_direct_file_is_detected() {
        let mut progress = Progress::new(false, true, 6000);
        let mut step = next(&mut progress, Ok(5000));
        while let Next::Skip(skip) = step {
            assert_eq!(skip, 4096);
            step = next(&mut progress, Ok(5000 - 4096));
        }
        assert_eq!(step, Next::Fail(io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn shortage_pauses_for_longer_each_time_and_an_interruption_not_at_all() {
        let mut progress = Progress::new(true, false, 10);
        let mut pause = |kind: io::ErrorKind| match progress.next(Err(kind.into())) {
            Step::Continue { pause, .. } => pause.map(|pause| pause.as_millis()),
            ended => panic!("{ended:?}"),
        };
        assert_eq!(pause(io::ErrorKind::Interrupted), None);
        let pauses: Vec<_> = (0..8).map(|_| pause(io::ErrorKind::WouldBlock).unwrap()).collect();
        assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 64, 64]);
    }

    #[test]
    fn interruptions_are_retried_but_not_forever() {
        let mut progress = Progress::new(true, false, 10);
        for (kind, skip) in [(io::ErrorKind::Interrupted, 0), (io::ErrorKind::WouldBlock, 4)] {
            for _ in 0..INTERRUPTIONS_MAX - 1 {
                assert_eq!(next(&mut progress, Err(kind.into())), Next::Skip(skip));
            }
            if skip == 0 {
                assert_eq!(next(&mut progress, Ok(4)), Next::Skip(4));
            }
        }
        let last = next(&mut progress, Err(io::ErrorKind::WouldBlock.into()));
        assert_eq!(last, Next::Fail(io::ErrorKind::WouldBlock));
    }
}
