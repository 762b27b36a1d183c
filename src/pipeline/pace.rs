//! Spreads writes over time: those of a save, a stream or a promotion, which are to be no faster than they may.

use crate::pipeline::job::Job;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Longest sleep before a look at whether the job was cancelled.
const SLICE: Duration = Duration::from_millis(20);

/// Says when each block may be written.
#[derive(Debug)]
pub(crate) struct Pace {
    bytes_per_second: u64,
    /// When the next block is due; `None` before the first.
    next: Mutex<Option<Instant>>,
}

impl Pace {
    /// `None` if there is no limit.
    pub fn new(bytes_per_second: u64) -> Option<Self> {
        (bytes_per_second > 0).then(|| Self { bytes_per_second, next: Mutex::new(None) })
    }

    /// When a block of `bytes` bytes, which is full `now`, may be written. Time in which nothing was full is not made up
    /// for: afterwards a save would take more than its share.
    pub fn due(&self, now: Instant, bytes: usize) -> Instant {
        self.span(now, bytes).0
    }

    /// When `bytes` bytes that are ready `now` may be sent, such that at no moment more was sent than the rate allows since
    /// the first were ready: these wait, too.
    pub fn earned(&self, now: Instant, bytes: usize) -> Instant {
        self.span(now, bytes).1
    }

    /// The time that a block takes at the rate, after those before it.
    fn span(&self, now: Instant, bytes: usize) -> (Instant, Instant) {
        let mut next = self.next.lock().expect("no panic while it is held");
        let begin = next.map_or(now, |next| next.max(now));
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let end = begin + takes;
        *next = Some(end);
        (begin, end)
    }
}

/// Waits until `due`, or until the job is stopped.
pub(crate) fn wait_until(due: Instant, job: &Job) {
    while !job.stopped() {
        match due.saturating_duration_since(Instant::now()) {
            Duration::ZERO => return,
            left => thread::sleep(left.min(SLICE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_due_one_after_another_and_idle_time_is_not_made_up_for() {
        let (pace, now) = (Pace::new(1000).unwrap(), Instant::now());
        let after = |ms: u64| now + Duration::from_millis(ms);
        assert_eq!(pace.due(now, 500), now);
        assert_eq!(pace.due(now, 100), after(500));
        assert_eq!(pace.due(after(550), 100), after(600));
        assert_eq!(pace.due(after(9000), 100), after(9000));
        assert_eq!(pace.due(after(9000), 100), after(9100));
        assert!(Pace::new(0).is_none());
    }

    #[test]
    fn first_byte_too_is_sent_only_when_the_rate_allows_it() {
        let (pace, now) = (Pace::new(1000).unwrap(), Instant::now());
        let after = |ms: u64| now + Duration::from_millis(ms);
        assert_eq!(pace.earned(now, 500), after(500));
        assert_eq!(pace.earned(now, 100), after(600));
        assert_eq!(pace.earned(after(9000), 100), after(9100));
    }
}
