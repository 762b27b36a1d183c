//! The staging memory of one stream.
//!
//! A program may keep a stream open as long as it likes, and save meanwhile. So a stream never waits for the pool, only
//! for its own transfers, and leaves a buffer to the saves. Where the pool has none to spare, it has one of its own.

use crate::pool::{Buffer, Pool};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::io;

/// Leases the buffers of a stream that writes.
pub(super) struct Buffers {
    pool: Pool,
    /// Memory of this stream's own, while no transfer has it.
    own: Option<Buffer>,
    in_flight: usize,
    returned: Receiver<Option<Buffer>>,
    give_back: Sender<Option<Buffer>>,
}

/// Returns the buffer of a transfer that has ended. Call it once.
pub(super) struct GiveBack(Sender<Option<Buffer>>);

impl Buffers {
    pub fn new(pool: Pool) -> Self {
        let (give_back, returned) = unbounded();
        Self { pool, own: None, in_flight: 0, returned, give_back }
    }

    /// Takes a buffer; waits for one of this stream's transfers if the pool has none to spare.
    ///
    /// # Errors
    /// The system's, if it has no memory for a buffer of the stream's own.
    pub fn take(&mut self) -> io::Result<Buffer> {
        loop {
            while let Ok(ended) = self.returned.try_recv() {
                self.note(ended);
            }
            if let Some(buffer) = self.pool.try_lease_spare().or_else(|| self.own.take()) {
                return Ok(buffer);
            }
            match self.in_flight {
                0 => return Buffer::alone(self.pool.block_bytes()),
                _ => {
                    let ended = self.returned.recv().expect("this holds a sender");
                    self.note(ended);
                }
            }
        }
    }

    /// Notes that a transfer begins.
    pub fn lend(&mut self) -> GiveBack {
        self.in_flight += 1;
        GiveBack(self.give_back.clone())
    }

    fn note(&mut self, ended: Option<Buffer>) {
        self.in_flight -= 1;
        self.own = self.own.take().or(ended);
    }
}

impl GiveBack {
    /// A pool's buffer returns to the pool at once, and others to the stream.
    pub fn give(self, buffer: Option<Buffer>) {
        let own = buffer.filter(|buffer| buffer.slot().is_none());
        let _ = self.0.send(own); // the stream may be gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_with_nothing_in_flight_gets_memory_of_its_own_and_uses_it_again() {
        let pool = Pool::new(1, 4096).unwrap();
        let mut buffers = Buffers::new(pool.clone());
        let mut first = buffers.take().unwrap();
        assert_eq!((first.slot(), first.len(), pool.used()), (None, 4096, 0));
        let address = first.as_mut_ptr();
        let give_back = buffers.lend();
        std::thread::spawn(move || give_back.give(Some(first)));
        let mut second = buffers.take().unwrap();
        assert_eq!(second.as_mut_ptr(), address);
    }

    #[test]
    fn stream_takes_the_pool_s_buffers_but_the_last() {
        let pool = Pool::new(3, 4096).unwrap();
        let mut buffers = Buffers::new(pool.clone());
        let taken: Vec<_> = (0..3).map(|_| buffers.take().unwrap().slot()).collect();
        assert!(taken.iter().all(Option::is_some), "each was returned before the next");
        let held: Vec<Buffer> = (0..3).map(|_| buffers.take().unwrap()).collect();
        assert_eq!(held.iter().filter(|buffer| buffer.slot().is_some()).count(), 2);
        assert!(pool.try_lease().is_some());
    }
}
