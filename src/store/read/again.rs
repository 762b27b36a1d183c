//! Reading again what another process has replaced or removed meanwhile: the one loop that does it, and its one limit.

use crate::error::{Error, Result};
use std::time::{Duration, Instant};

/// How long one call reads again. It is a time and not a count, so that a loop within a loop adds to it and does not
/// multiply it.
const LIMIT: Duration = Duration::from_secs(20);
/// Attempts that are made however long they take: a large checkpoint may take longer to load than [`LIMIT`].
const ATTEMPTS_MIN: usize = 3;
/// After so many there is a pause before each.
const ATTEMPTS_AT_ONCE: usize = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// Repeats `attempt` until `is_final`, or for too long; returns what the last one did.
pub(crate) fn again<T>(attempt: impl FnMut() -> T, is_final: impl FnMut(&T) -> bool) -> T {
    again_for(LIMIT, attempt, is_final)
}

fn again_for<T>(
    limit: Duration,
    mut attempt: impl FnMut() -> T,
    mut is_final: impl FnMut(&T) -> bool,
) -> T {
    let began = Instant::now();
    let mut attempts = 0;
    loop {
        let done = attempt();
        attempts += 1;
        if is_final(&done) || (attempts >= ATTEMPTS_MIN && began.elapsed() >= limit) {
            return done;
        }
        if attempts > ATTEMPTS_AT_ONCE {
            std::thread::sleep(PAUSE); // leaves the processor to the process that changes it
        }
    }
}

/// Repeats `attempt` while a save replaces the checkpoint that it reads, or it is slimmed. Every repetition takes one
/// complete save in between, so the limit is hardly ever reached.
///
/// # Errors
/// Those of `attempt`; [`Error::Replaced`] after too long.
pub(crate) fn while_replaced<T>(attempt: impl FnMut() -> Result<T>) -> Result<T> {
    again(attempt, |done| match done {
        Err(error @ (Error::Replaced { .. } | Error::Slimmed { .. })) => {
            tracing::debug!(%error, "the checkpoint was replaced; reading the new one");
            false
        }
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced<T>() -> Result<T> {
        Err(Error::Replaced { path: "a".into() })
    }

    #[test]
    fn what_was_replaced_is_read_again() {
        let mut left = 200;
        let last = while_replaced(|| {
            left -= 1;
            if left > 0 { replaced() } else { Ok(7) }
        });
        assert_eq!((last.unwrap(), left), (7, 0));
    }

    #[test]
    fn loop_within_a_loop_takes_no_longer_than_the_limit_of_each() {
        let limit = Duration::from_millis(50);
        let began = Instant::now();
        let mut count = 0;
        again_for(
            limit,
            || {
                again_for(
                    limit,
                    || {
                        count += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    },
                    |()| false,
                );
            },
            |()| false,
        );
        // The outer loop's least number of attempts, each for as long as the inner one's limit.
        assert!(count >= ATTEMPTS_MIN && began.elapsed() < limit * 20, "{count}");
    }

    #[test]
    fn other_failures_are_final() {
        let mut count = 0;
        let busy = while_replaced(|| {
            count += 1;
            Err::<(), _>(Error::Busy { path: "a".into() })
        });
        assert!(matches!(busy, Err(Error::Busy { .. })));
        assert_eq!(count, 1);
    }
}
