//! Whose request the server answers next, while programs of both hosts work: decided by a seed, so that a run can be
//! repeated.

use fastrand::Rng;

pub struct Turns {
    random: Rng,
    now: usize,
    left: u64,
    working: [bool; 2],
}

impl Turns {
    pub fn new(seed: u64) -> Self {
        Self { random: Rng::with_seed(seed), now: 0, left: 0, working: [false; 2] }
    }

    /// Whether a request of this host is answered now.
    pub fn is_next(&self, host: usize) -> bool {
        !self.working[1 - host] || !self.working[host] || self.now == host
    }

    /// Counts a request of this host, and may give the turn to the other host.
    pub fn count(&mut self, host: usize) {
        if self.working != [true; 2] || self.now != host {
            return;
        }
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.give(1 - host);
        }
    }

    /// A host's programs begin or end their work.
    pub fn set_working(&mut self, host: usize, working: bool) {
        self.working[host] = working;
        if self.working == [true; 2] {
            let first = self.random.usize(..2);
            self.give(first);
        }
    }

    /// Gives the turn to a host for up to 64 requests, often for few.
    fn give(&mut self, host: usize) {
        self.now = host;
        let most = 1 << self.random.u32(..7);
        self.left = self.random.u64(1..=most);
    }
}
