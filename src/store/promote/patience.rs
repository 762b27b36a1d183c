//! Retries requests while a store does not answer, up to a time limit.

use crate::engine::queue::is_cancelled;
use crate::error::Error;
use crate::pipeline::job::Job;
use crate::pipeline::pace::wait_until;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The first pause between two requests, and the longest. The store's client has tried each request a few times.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The most that anybody waits for.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The retries of a promotion, and their time limit.
pub(super) struct Patience {
    place: PathBuf,
    most: Duration,
    pauses: (Duration, Duration),
    job: Arc<Job>,
    has_warned: AtomicBool,
}

impl Patience {
    pub fn new(place: &Path, most: Duration, job: &Arc<Job>) -> Self {
        let has_warned = AtomicBool::new(false);
        let most = most.min(LONGEST); // a moment that far ahead must exist
        Self { place: place.into(), most, pauses: PAUSES, job: job.clone(), has_warned }
    }

    /// Makes a request, and retries it while the store does not answer.
    ///
    /// # Errors
    /// The request's. If the time limit has passed, with the seconds that it was tried for.
    pub fn ask<T, E: Failure>(&self, mut request: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        let began = Instant::now();
        let mut pause = self.pauses.0;
        loop {
            let error = match request() {
                Err(error) if error.cause().is_some_and(is_passing) && !self.job.stopped() => error,
                ended => return ended,
            };
            if began.elapsed() >= self.most {
                let seconds = began.elapsed().as_secs_f64();
                return Err(error.explained(&format!("tried for {seconds:.0} s")));
            }
            self.warn(&error);
            // Half of the pause is random, so that ranks whose requests failed together do not retry together.
            let until = began + self.most;
            wait_until(
                (Instant::now() + pause.mul_f64(0.5 + 0.5 * jitter())).min(until),
                &self.job,
            );
            pause = (pause * 2).min(self.pauses.1);
        }
    }

    fn warn(&self, error: &impl Display) {
        if !self.has_warned.swap(true, Relaxed) {
            tracing::warn!(
                "{} does not answer ({error}): trying again for {} s at most",
                self.place.display(),
                self.most.as_secs()
            );
        }
    }
}

/// A number from 0 to 1 that differs from process to process, and from call to call.
fn jitter() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as f64 / u64::MAX as f64
}

/// Whether a store has not answered, or was too busy: the same request may succeed later.
pub(super) fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Other, TimedOut};
    let kinds = [ConnectionAborted, ConnectionRefused, ConnectionReset, Other, TimedOut];
    kinds.contains(&error.kind()) && !is_cancelled(error)
}

/// An error of a request.
pub(super) trait Failure: Display {
    /// What the store or the system said.
    fn cause(&self) -> Option<&io::Error>;

    /// The same with more words.
    fn explained(self, why: &str) -> Self;
}

impl Failure for io::Error {
    fn cause(&self) -> Option<&io::Error> {
        Some(self)
    }

    fn explained(self, why: &str) -> Self {
        Self::new(self.kind(), format!("{self}; {why}"))
    }
}

impl Failure for Error {
    fn cause(&self) -> Option<&io::Error> {
        self.io_error()
    }

    fn explained(mut self, why: &str) -> Self {
        if let Self::Io { cause, .. } = &mut self {
            let kind = cause.kind();
            *cause = io::Error::new(kind, format!("{cause}; {why}"));
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn patience(most: Duration) -> Patience {
        let pauses = (Duration::ZERO, Duration::ZERO);
        Patience { pauses, ..Patience::new(Path::new("s3://b/x"), most, &Arc::default()) }
    }

    fn refused() -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens")
    }

    #[test]
    fn store_that_comes_back_is_asked_until_it_does() {
        let asked = Cell::new(0);
        let answer = patience(Duration::MAX / 4).ask(|| {
            asked.set(asked.get() + 1);
            if asked.get() < 100 { Err(refused()) } else { Ok("there") }
        });
        assert_eq!((answer.unwrap(), asked.get()), ("there", 100));
    }

    #[test]
    fn store_that_stays_away_is_given_up_and_the_error_says_after_which_time() {
        let error = patience(Duration::ZERO).ask(|| Err::<(), _>(refused())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(error.to_string(), "nobody listens; tried for 0 s");
        let of_a_file = || Err::<(), _>(Error::io("reading", "s3://b/x", refused()));
        let error = patience(Duration::ZERO).ask(of_a_file).unwrap_err();
        assert!(error.to_string().contains("nobody listens; tried for 0 s"), "{error}");
    }

    #[test]
    fn answers_and_a_stopped_job_end_it_at_once() {
        let asked = Cell::new(0);
        for kind in [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied] {
            let patience = patience(Duration::MAX / 4);
            let answer = patience.ask(|| {
                asked.set(asked.get() + 1);
                Err::<(), _>(io::Error::from(kind))
            });
            assert_eq!(answer.unwrap_err().kind(), kind);
        }
        let stopped = patience(Duration::MAX / 4);
        stopped.job.cancel();
        stopped.ask(|| Err::<(), _>(refused())).unwrap_err();
        assert_eq!(asked.get(), 2);
    }
}
