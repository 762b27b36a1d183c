//! How much staging memory the background saves of a machine may take together.
//!
//! Half of what is available: of the machine's memory, and of what each control group still allows. All processes under
//! a limit count together. A save that gets no more streams through what it has.

use crate::sys::fork::{GENERATIONS, PerProcess};
use crate::sys::{
    memory::{Limit, limits},
    tally::Tally,
};
use crate::units::size;
use std::io;
use std::sync::Mutex;

/// What is counted: memory is taken in multiples of this.
pub(super) const UNIT_BYTES: usize = 64 << 20;

/// Of what is available, including what was taken, one part in this many may be taken.
const SHARE: u64 = 2;

/// Why no more memory may be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoMore {
    /// There is none left, or none that can be used.
    Taken(String),
    /// What is available cannot be found out.
    Unknown(String),
}

impl NoMore {
    /// The reason, for people.
    pub fn reason(&self) -> &str {
        let (Self::Taken(why) | Self::Unknown(why)) = self;
        why
    }
}

/// Units that were taken, until this is dropped.
#[derive(Debug)]
pub(super) struct Ration {
    units: u64,
}

impl Ration {
    /// Takes units.
    ///
    /// # Errors
    /// Why there are no more.
    pub fn take(units: u64) -> Result<Self, NoMore> {
        let Some(mut budget) = BUDGET.lock() else {
            return Err(NoMore::Unknown("too many forks".into()));
        };
        budget.take(units)?;
        Ok(Self { units })
    }

    /// Takes units whether there are more or not.
    pub fn take_anyway(units: u64) -> Self {
        if let Some(mut budget) = BUDGET.lock() {
            budget.take_anyway(units);
        }
        Self { units }
    }
}

impl Drop for Ration {
    fn drop(&mut self) {
        if let Some(mut budget) = BUDGET.lock() {
            budget.give_back(self.units);
        }
    }
}

/// Units that this process has to give back, since others have come to need the memory.
pub(super) fn excess() -> u64 {
    BUDGET.lock().map_or(0, |mut budget| budget.excess())
}

/// Bytes that background saves may still take, and which limit says so.
///
/// # Errors
/// Why that is not known.
#[cfg(feature = "cli")]
pub fn left() -> Result<(u64, String), NoMore> {
    let Some(mut budget) = BUDGET.lock() else {
        return Err(NoMore::Unknown("too many forks".into()));
    };
    budget.left()
}

/// Units that this process has taken.
#[cfg(test)]
pub(super) fn taken() -> u64 {
    BUDGET.lock().unwrap().taken
}

static BUDGET: PerProcess<Budget> =
    PerProcess::new([const { Mutex::new(Budget::new()) }; GENERATIONS]);

/// What this process has taken, counted under each limit that it is subject to.
#[derive(Debug)]
struct Budget {
    counts: Vec<(String, Tally)>,
    taken: u64,
}

impl Budget {
    const fn new() -> Self {
        Self { counts: Vec::new(), taken: 0 }
    }

    /// The limits, of which this process takes part in the counts.
    fn joined(&mut self) -> Result<Vec<Limit>, NoMore> {
        let joined = limits().and_then(|limits| self.join(&limits).map(|()| limits));
        joined.map_err(unknown)
    }

    #[cfg(feature = "cli")]
    fn left(&mut self) -> Result<(u64, String), NoMore> {
        let limits = self.joined()?;
        let left = |limit: &Limit| {
            let taken = self.counted(limit).map_err(unknown)?;
            let units = share(limit, taken).saturating_sub(taken);
            Ok((units * UNIT_BYTES as u64, limit.of.clone()))
        };
        let each: Result<Vec<_>, NoMore> = limits.iter().map(left).collect();
        Ok(each?.into_iter().min().expect("the machine is one"))
    }

    fn take(&mut self, units: u64) -> Result<(), NoMore> {
        let limits = self.joined()?;
        for limit in &limits {
            self.check(limit, units)?;
        }
        self.set(self.taken + units).map_err(unknown)?;
        // Of two processes that looked at once, both may have to go without.
        let checked = limits.iter().try_for_each(|limit| self.check(limit, 0));
        if checked.is_err() {
            self.give_back(units);
        }
        checked
    }

    fn take_anyway(&mut self, units: u64) {
        let _ = self.joined(); // where it is not known who takes what, nobody takes more
        if let Err(error) = self.set(self.taken + units) {
            tracing::debug!(%error, "cannot note that memory was taken");
        }
    }

    fn give_back(&mut self, units: u64) {
        let left = self.taken.saturating_sub(units);
        if let Err(error) = self.set(left) {
            tracing::debug!(%error, "cannot note that memory was given back");
        }
    }

    fn excess(&mut self) -> u64 {
        if self.taken == 0 {
            return 0;
        }
        let Ok(limits) = limits() else { return 0 };
        let over = |limit: &Limit| {
            let taken = self.counted(limit).ok()?;
            Some(taken.saturating_sub(share(limit, taken)))
        };
        limits.iter().filter_map(over).max().unwrap_or(0).min(self.taken)
    }

    /// Takes part in the counts of these limits, of which there may be more than before.
    fn join(&mut self, limits: &[Limit]) -> io::Result<()> {
        for limit in limits {
            if !self.counts.iter().any(|(id, _)| *id == limit.id) {
                let mut tally = Tally::join(&format!("memory-{}", limit.id))?;
                tally.set(self.taken)?;
                self.counts.push((limit.id.clone(), tally));
            }
        }
        Ok(())
    }

    fn set(&mut self, units: u64) -> io::Result<()> {
        for (_, tally) in &mut self.counts {
            tally.set(units)?;
        }
        self.taken = units;
        Ok(())
    }

    /// Units that all processes under a limit have taken.
    fn counted(&self, limit: &Limit) -> io::Result<u64> {
        let mut counts = self.counts.iter();
        counts.find(|(id, _)| *id == limit.id).map_or(Ok(0), |(_, tally)| tally.all())
    }

    /// Checks whether so many units more may be taken under a limit.
    fn check(&self, limit: &Limit, more: u64) -> Result<(), NoMore> {
        let taken = self.counted(limit).map_err(unknown)?;
        let share = share(limit, taken);
        if taken + more <= share {
            return Ok(());
        }
        let units = |units: u64| size(units * UNIT_BYTES as u64);
        Err(NoMore::Taken(format!(
            "background saves may take half of what is available, {} of {} (limit {}, {} available), and they have {}",
            units(share),
            limit.of,
            size(limit.bytes),
            size(limit.available),
            units(taken),
        )))
    }
}

fn unknown(error: io::Error) -> NoMore {
    NoMore::Unknown(format!("what memory is available is not known: {error}"))
}

/// Units that all processes may take under a limit, of which they have taken some.
fn share(limit: &Limit, taken: u64) -> u64 {
    (limit.available / UNIT_BYTES as u64 + taken) / SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(available: u64) -> Limit {
        let bytes = 100 * UNIT_BYTES as u64;
        let available = available * UNIT_BYTES as u64;
        Limit {
            of: "the control group /job".into(),
            id: format!("test-{available}"),
            bytes,
            available,
        }
    }

    #[test]
    fn half_of_what_is_available_is_taken_and_no_more() {
        // What was taken is no longer available.
        for (available, taken, expected) in [(40, 0, 20), (30, 10, 20), (20, 20, 20), (10, 20, 15)]
        {
            assert_eq!(share(&limit(available), taken), expected);
        }
    }

    #[test]
    fn the_reason_names_the_limit_and_what_is_left() {
        let said = Budget::new().check(&limit(6), 4).unwrap_err();
        let said = said.reason();
        for part in ["201 MB of the control group /job (limit 6.71 GB, 403 MB available)", "0 B"] {
            assert!(said.contains(part), "{part:?} is not in: {said}");
        }
        Budget::new().check(&limit(6), 3).unwrap();
    }
}
