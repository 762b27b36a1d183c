//! Which steps a manager keeps.

use super::slim::Slim;
use crate::error::{Error, Result};
use crate::store::{Best, Disposal, RetainOptions, Setting, check_covers};
use crate::units::span;
use std::time::Duration;

/// Which steps a [`CheckpointManager`](crate::CheckpointManager) keeps. A step stays if one rule keeps it. Without a rule, all stay. The newest
/// step always stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retention {
    /// How many of the newest steps.
    pub last: Option<usize>,
    /// Steps that this number divides.
    pub every: Option<u64>,
    /// The first save in each interval of this length, as [`RetainOptions::every_time`].
    pub every_time: Option<Duration>,
    /// The saves that are no older than the last one by more than this.
    pub within: Option<Duration>,
    /// The best steps by a metric.
    pub best: Option<Best>,
    /// Which of the steps that stay lose a part, such as the optimizer's state. Removes no step.
    pub slim: Option<Slim>,
}

impl Retention {
    /// What carries these rules out; `None` if nothing is ever removed.
    pub(super) fn options(self, disposal: Disposal) -> Option<RetainOptions> {
        let Self { last, every, every_time, within, best, slim: _ } = self;
        let has_time = every_time.is_some() || within.is_some();
        let has_rule = last.is_some() || every.is_some() || has_time || best.is_some();
        let newest = RetainOptions::new(last.unwrap_or(1));
        has_rule.then_some(RetainOptions { every, every_time, within, best, disposal, ..newest })
    }
}

/// How much room the steps of a run need, for the error of a save that met a full disk.
pub(super) fn room(retention: Option<&RetainOptions>) -> String {
    let Some(RetainOptions { last, every, every_time, within, best, .. }) = retention else {
        return "the manager removes no step, since it has no rule: with `Retention::last` of n it keeps n, and needs room for \
                n + 1"
            .into();
    };
    let others = [
        every.as_ref().map(|every| format!("`Retention::every` of {every}")),
        every_time.map(|time| format!("`Retention::every_time` of {}", span(time))),
        within.map(|time| format!("`Retention::within` of {}", span(time))),
        best.as_ref().map(|best| format!("`Retention::best` by {}", best.metric)),
    ];
    let others: Vec<String> = others.into_iter().flatten().collect();
    let besides = match others.is_empty() {
        true => String::new(),
        false => format!(", and for the steps that {} keeps", others.join(" and ")),
    };
    format!(
        "the manager removes old steps after the commit, so the disk needs room for keep + 1 steps: `Retention::last` of \
         {last} for {}{besides}",
        last + 1
    )
}

/// The rules for places, which also keep there what these keep here for good.
pub(super) fn besides(there: RetainOptions, own: Option<&RetainOptions>) -> RetainOptions {
    let Some(own) = own else { return there };
    let every = there.every.or(own.every);
    let every_time = there.every_time.or(own.every_time);
    let within = there.within.or(own.within);
    let best = there.best.clone().or_else(|| own.best.clone());
    RetainOptions { every, every_time, within, best, ..there }
}

/// Checks that places keep what `keep_here` and the manager's own rules keep: it leaves the root.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn check_keeps(
    there: &RetainOptions,
    own: Option<&RetainOptions>,
    keep_here: usize,
) -> Result<()> {
    let last = own.map(|own| ("Retention.last", own.last));
    let others: Vec<Setting> =
        [Some(("keep_here", keep_here)), last].into_iter().flatten().collect();
    check_covers(("Tiers.keep.last", there.last), &others)?;
    let Some(own) = own else { return Ok(()) };
    let has_every = own
        .every
        .is_none_or(|own| there.every.is_some_and(|there| there > 0 && own.is_multiple_of(there)));
    let has_best = own.best.as_ref().is_none_or(|own| {
        let is_same =
            |there: &&Best| (&there.metric, there.direction) == (&own.metric, own.direction);
        there.best.as_ref().filter(is_same).is_some_and(|there| there.count >= own.count)
    });
    // Intervals begin at one moment: the first save of a long one is the first of a short one that divides it.
    let has_every_time = own.every_time.is_none_or(|own| {
        let divides = |there: Duration| own.as_millis().checked_rem(there.as_millis()) == Some(0);
        there.every_time.is_some_and(divides)
    });
    let has_within = own.within.is_none_or(|own| there.within.is_some_and(|there| there >= own));
    if has_every && has_every_time && has_within && has_best {
        return Ok(());
    }
    Err(Error::invalid(
        "with keep_here, steps that `every`, `every_time`, `within` and `best` of the manager's rules keep are in the further \
         places alone, and one of these in Tiers.keep would remove some of them: leave it out there, which means the same one",
    ))
}
