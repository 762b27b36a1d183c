//! Which steps a retention keeps, and why. Pure: takes numbers, metrics and the order of saves, and does no I/O.

use crate::error::{Error, Result};
use crate::format::Metrics;
use crate::format::manifest::Age;
use crate::units::span;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::time::Duration;

/// The steps with the best numbers of one metric. `"loss:min:2"` parses as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Best {
    /// The metric's name, as [`StateDict::metrics`](crate::StateDict::metrics) noted it.
    pub metric: String,
    /// Which numbers are better.
    pub direction: Direction,
    /// How many steps, at least 1.
    pub count: usize,
}

/// Which numbers of a metric are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Lower ones, as for a loss.
    Min,
    /// Higher ones, as for an accuracy.
    Max,
}

impl Direction {
    /// Compares two numbers: the better one is less. NaN counts as worse than every number.
    pub(crate) fn compare(self, a: f64, b: f64) -> Ordering {
        let ascending = a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
        match self {
            Self::Max if !a.is_nan() && !b.is_nan() => ascending.reverse(),
            _ => ascending,
        }
    }
}

impl FromStr for Direction {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "min" => Ok(Self::Min),
            "max" => Ok(Self::Max),
            _ => Err(Error::invalid(format!(
                "{text:?} does not say which numbers are better: `min` or `max`"
            ))),
        }
    }
}

impl FromStr for Best {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // A metric's name may contain colons.
        let mut parts = text.rsplitn(3, ':');
        let (count, direction, metric) = (parts.next(), parts.next(), parts.next());
        let (Some(Ok(count)), Some(direction), Some(metric)) =
            (count.map(str::parse), direction, metric)
        else {
            return Err(Error::invalid(format!(
                "{text:?} names no best steps: write metric, `min` or `max`, and a count, as in loss:min:2"
            )));
        };
        Ok(Self { metric: metric.into(), direction: direction.parse()?, count })
    }
}

/// A step, as the rules see it.
#[derive(Debug, Clone, Copy)]
pub(in crate::store) struct Candidate<'a> {
    pub step: u64,
    pub metrics: &'a Metrics,
    pub age: Age,
}

/// The rules of a retention. A step stays if one of them keeps it.
#[derive(Debug, Clone, Copy)]
pub(in crate::store) struct Rules<'a> {
    /// How many of the newest stay.
    pub newest: usize,
    /// Steps that this number divides stay.
    pub every: Option<u64>,
    /// The first save in each interval of this length stays. Intervals begin at 1970-01-01 UTC, so that no other step moves them.
    pub every_time: Option<Duration>,
    /// Saves that are no older than the last one by more than this stay.
    pub within: Option<Duration>,
    pub best: Option<&'a Best>,
}

/// What happens to a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store) enum Verdict {
    /// A rule keeps it, for this reason.
    Stays(String),
    /// No rule keeps it, but it was saved last: the run went back to an earlier step.
    SavedLast,
    Goes,
}

impl Rules<'_> {
    /// Keeps so many of the newest.
    pub fn newest(newest: usize) -> Self {
        Self { newest, every: None, every_time: None, within: None, best: None }
    }

    /// Checks that each rule keeps something.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self) -> Result<()> {
        if self.newest == 0 {
            return Err(Error::invalid("last = 0 would remove every checkpoint; keep at least 1"));
        }
        if self.every == Some(0) {
            return Err(Error::invalid(
                "every = 0 divides no step; keep every 1000th, or leave it out",
            ));
        }
        for (name, time) in [("every_time", self.every_time), ("within", self.within)] {
            if time.is_some_and(|time| time.as_millis() == 0) {
                return Err(Error::invalid(format!(
                    "{name} is less than a millisecond; give a time such as 1h, or leave it out"
                )));
            }
        }
        if self.best.is_some_and(|best| best.count == 0) {
            return Err(Error::invalid(
                "best of 0 steps keeps none; keep at least 1, or leave it out",
            ));
        }
        Ok(())
    }

    /// Decides on each step. The newer is later.
    pub fn judge(&self, steps: &[Candidate<'_>]) -> Vec<Verdict> {
        let best = self.best.map_or_else(BTreeSet::new, |best| best.among(steps));
        let first = self.every_time.map_or_else(BTreeSet::new, |time| first_in_each(time, steps));
        let cannot_compare = self.missing_metric(steps).is_some();
        // Of several of one age, the newest counts as last.
        let last = (0..steps.len()).max_by_key(|&at| steps[at].age);
        let dated = steps.iter().filter_map(|step| Some((step.age, step.created_ms()?)));
        let last_ms = dated.max().map(|(_, ms)| ms);
        let verdict = |(at, step): (usize, &Candidate<'_>)| {
            let is_dated = step.created_ms().is_some();
            let newest = at + self.newest >= steps.len();
            let every = self.every.filter(|every| step.step.is_multiple_of(*every));
            let reasons: Vec<String> = [
                newest.then(|| among(self.newest, "newest")),
                every.map(|every| format!("its number is a multiple of {every}")),
                self.every_time
                    .filter(|_| first.contains(&at))
                    .map(|time| format!("it is the first in an interval of {}", span(time))),
                self.within
                    .filter(|time| step.is_within(*time, last_ms))
                    .map(|time| format!("it was saved within {} of the last save", span(time))),
                (!is_dated && (self.every_time.or(self.within)).is_some())
                    .then(|| "when it was saved is not known".into()),
                self.best.filter(|_| best.contains(&at)).map(|best| best.reason(step)),
            ]
            .into_iter()
            .flatten()
            .collect();
            match reasons.is_empty() {
                false => Verdict::Stays(reasons.join("; ")),
                true if cannot_compare => {
                    Verdict::Stays("no step has the metric to compare".into())
                }
                true if Some(at) == last => Verdict::SavedLast,
                true => Verdict::Goes,
            }
        };
        steps.iter().enumerate().map(verdict).collect()
    }

    /// The metric to compare, if there are steps and none has it: a misspelled name must not remove the best.
    pub fn missing_metric(&self, steps: &[Candidate<'_>]) -> Option<&str> {
        let metric = &*self.best?.metric;
        let is_missing = steps.iter().all(|step| !step.metrics.contains_key(metric));
        (!steps.is_empty() && is_missing).then_some(metric)
    }
}

impl Candidate<'_> {
    fn created_ms(&self) -> Option<u128> {
        self.age.created_unix_ms.filter(|ms| *ms > 0).map(u128::from)
    }

    /// Whether it was saved so long before a time at most. A clock that was set back makes it later, not older.
    fn is_within(&self, time: Duration, last_ms: Option<u128>) -> bool {
        let own = self.created_ms().zip(last_ms);
        own.is_some_and(|(own, last)| own + time.as_millis() >= last)
    }
}

/// Where the steps are that were saved first in each interval: in the order of the saves, whatever the clock did.
fn first_in_each(time: Duration, steps: &[Candidate<'_>]) -> BTreeSet<usize> {
    let mut first = BTreeMap::new();
    for (at, step) in steps.iter().enumerate() {
        let Some(interval) = step.created_ms().map(|ms| ms / time.as_millis().max(1)) else {
            continue;
        };
        let known = first.entry(interval).or_insert(at);
        if step.age < steps[*known].age {
            *known = at;
        }
    }
    first.into_values().collect()
}

impl Best {
    fn of(&self, step: &Candidate<'_>) -> Option<f64> {
        step.metrics.get(&self.metric).copied().filter(|number| !number.is_nan())
    }

    /// Where the best steps are. Between equal numbers, the newer step is better.
    fn among(&self, steps: &[Candidate<'_>]) -> BTreeSet<usize> {
        let number = |at: usize| Some((at, self.of(&steps[at])?));
        let mut numbers: Vec<(usize, f64)> = (0..steps.len()).rev().filter_map(number).collect();
        numbers.sort_by(|a, b| self.direction.compare(a.1, b.1)); // stable: the newer stays ahead
        numbers.into_iter().take(self.count).map(|(at, _)| at).collect()
    }

    fn reason(&self, step: &Candidate<'_>) -> String {
        let (metric, number) = (&self.metric, self.of(step).unwrap_or(f64::NAN));
        let extreme = match self.direction {
            Direction::Min => "lowest",
            Direction::Max => "highest",
        };
        format!("its {metric} of {number} {}", among(self.count, extreme).trim_start_matches("it "))
    }
}

fn among(count: usize, what: &str) -> String {
    if count == 1 { format!("it is the {what}") } else { format!("it is among the {count} {what}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loss(number: f64) -> Metrics {
        Metrics::from([("loss".into(), number)])
    }

    fn aged(sequence: u64) -> Age {
        Age { sequence, created_unix_ms: Some(100 - sequence) }
    }

    fn best(text: &str) -> Best {
        text.parse().unwrap()
    }

    /// Which saves, each a step and a minute, stay; they are in the order of the run.
    fn stay_by_time(saves: &[(u64, Option<u64>)], rules: Rules<'_>) -> Vec<(u64, Option<u64>)> {
        let none = Metrics::new();
        let steps: Vec<Candidate> = (saves.iter())
            .map(|&(step, minute)| {
                let created_unix_ms = minute.map(|minute| minute * 60_000);
                Candidate { step, metrics: &none, age: Age { sequence: step, created_unix_ms } }
            })
            .collect();
        let verdicts = rules.judge(&steps).into_iter().zip(saves);
        verdicts.filter(|(verdict, _)| *verdict != Verdict::Goes).map(|(_, save)| *save).collect()
    }

    #[test]
    fn times_keep_the_first_of_each_interval_and_the_last_ones() {
        let time = |text| crate::units::parse_span(text).ok();
        let hourly = Rules { every_time: time("1h"), ..Rules::newest(1) };
        let recent = Rules { within: time("1h"), ..Rules::newest(1) };
        let at = |minutes: &[u64]| -> Vec<_> {
            (1..).zip(minutes).map(|(step, minute)| (step, Some(*minute))).collect()
        };
        for (name, saves, by_hour, by_age) in [
            ("steady", at(&[600, 630, 660, 690, 720]), vec![1, 3, 5], vec![3, 4, 5]),
            ("a border is the next hour's", at(&[659, 660, 661]), vec![1, 2, 3], vec![1, 2, 3]),
            // Steps 3 and 4 are in the hour of step 1 again; of the last hour's there are none before step 5.
            ("clock set back", at(&[600, 660, 610, 611, 612]), vec![1, 2, 5], vec![1, 2, 3, 4, 5]),
            ("clock far ahead once", at(&[600, 99_999, 601, 602]), vec![1, 2, 4], vec![1, 2, 3, 4]),
            (
                "no time known",
                vec![(1, None), (2, Some(0)), (3, Some(600)), (4, Some(700))],
                vec![1, 2, 3, 4],
                vec![1, 2, 4],
            ),
        ] {
            let stay = |rules| -> Vec<u64> {
                stay_by_time(&saves, rules).into_iter().map(|(step, _)| step).collect()
            };
            assert_eq!(stay(hourly), by_hour, "{name}");
            assert_eq!(stay(recent), by_age, "{name}");
        }
    }

    /// The steps of `numbers`, 10 and 20 and so on, each committed after the one before, that stay.
    fn stay(numbers: &[Option<f64>], rules: Rules<'_>) -> Vec<u64> {
        let metrics: Vec<Metrics> =
            numbers.iter().map(|n| n.map(loss).unwrap_or_default()).collect();
        let steps: Vec<Candidate> = (1..)
            .zip(&metrics)
            .map(|(at, metrics)| Candidate { step: at * 10, metrics, age: aged(at) })
            .collect();
        let verdicts = rules.judge(&steps).into_iter().zip(&steps);
        verdicts
            .filter(|(verdict, _)| *verdict != Verdict::Goes)
            .map(|(_, step)| step.step)
            .collect()
    }

    #[test]
    fn best_steps_are_those_with_numbers_and_the_newer_of_equals() {
        let stay_by = |numbers: &[_], text| {
            stay(numbers, Rules { best: Some(&best(text)), ..Rules::newest(1) })
        };
        let numbers = [Some(0.3), Some(f64::NAN), Some(0.1), None, Some(0.1), Some(0.2), Some(9.0)];
        assert_eq!(stay_by(&numbers, "loss:min:1"), [50, 70]);
        assert_eq!(stay_by(&numbers, "loss:min:2"), [30, 50, 70]);
        assert_eq!(stay_by(&numbers, "loss:max:2"), [10, 70]);
        assert_eq!(stay_by(&numbers, "loss:min:9"), [10, 30, 50, 60, 70]);
        let infinite = [Some(f64::INFINITY), Some(f64::NEG_INFINITY), Some(0.0), Some(-0.0), None];
        assert_eq!(stay_by(&infinite, "loss:min:1"), [20, 50]);
        assert_eq!(stay_by(&infinite, "loss:max:2"), [10, 40, 50]);
    }

    #[test]
    fn metric_that_no_step_has_removes_nothing() {
        let all = [Some(0.3), None, Some(f64::NAN), Some(0.1)];
        let (accuracy, loss) = (best("accuracy:max:1"), best("loss:max:1"));
        let rules = |best| Rules { best: Some(best), ..Rules::newest(1) };
        assert_eq!(stay(&all, rules(&accuracy)), [10, 20, 30, 40]);
        // NaN is a number that the step has.
        assert_eq!(stay(&[None, Some(f64::NAN), None], rules(&loss)), [30]);
    }

    #[test]
    fn step_that_was_saved_last_stays_for_that_reason() {
        let none = Metrics::new();
        let steps = [(10, 1), (11, 9), (20, 2), (30, 3)].map(|(step, at)| Candidate {
            step,
            metrics: &none,
            age: aged(at),
        });
        let rules = Rules { every: Some(20), ..Rules::newest(1) };
        let stays = |why: &str| Verdict::Stays(why.into());
        let (multiple, newest) = ("its number is a multiple of 20", "it is the newest");
        let expected = [Verdict::Goes, Verdict::SavedLast, stays(multiple), stays(newest)];
        assert_eq!(rules.judge(&steps), expected);
        let two = Rules { newest: 2, ..rules }.judge(&steps);
        assert_eq!(two[2], stays("it is among the 2 newest; its number is a multiple of 20"));
    }

    #[test]
    fn reason_has_the_number_that_was_compared() {
        let metrics = loss(0.25);
        let steps = [Candidate { step: 7, metrics: &metrics, age: Age::default() }; 3];
        for (text, reason) in [
            ("loss:min:1", "it is the newest; its loss of 0.25 is the lowest"),
            ("loss:max:2", "it is the newest; its loss of 0.25 is among the 2 highest"),
        ] {
            let rules = Rules { best: Some(&best(text)), ..Rules::newest(1) };
            assert_eq!(rules.judge(&steps)[2], Verdict::Stays(reason.into()));
        }
    }

    #[test]
    fn rules_that_keep_nothing_are_refused() {
        let rules = Rules::newest(1);
        rules.check().unwrap();
        Rules { every_time: Some(Duration::from_micros(9)), ..rules }.check().unwrap_err();
        Rules { within: Some(Duration::ZERO), ..rules }.check().unwrap_err();
        Rules { newest: 0, ..rules }.check().unwrap_err();
        Rules { every: Some(0), ..rules }.check().unwrap_err();
        Rules { best: Some(&best("loss:min:0")), ..rules }.check().unwrap_err();
    }

    #[test]
    fn metric_direction_and_count_are_read_from_the_end() {
        let read = best("val:loss/1:max:12");
        assert_eq!((&*read.metric, read.direction, read.count), ("val:loss/1", Direction::Max, 12));
        for text in ["", "loss", "loss:min", "loss:2:min", "loss:lowest:2", "loss:min:-1", "min:2"]
        {
            assert!(matches!(text.parse::<Best>(), Err(Error::Invalid { .. })), "{text}");
        }
    }

    proptest! {
        #[test]
        fn rules_of_time_only_add_to_others_and_decide_alike_once_the_rest_has_gone(
            minutes in prop::collection::vec(prop::option::weighted(0.9, 1u64..500), 1..12),
            newest in 1usize..3,
            every in prop::option::of(1u64..5),
            times: (bool, bool),
            lost in 0usize..12,
        ) {
            let hour = Some(Duration::from_secs(3600));
            let others = Rules { every, ..Rules::newest(newest) };
            let every_time = hour.filter(|_| times.0);
            let rules = Rules { every_time, within: hour.filter(|_| times.1), ..others };
            let saves: Vec<_> = (1..).zip(minutes).collect();
            let stay = stay_by_time(&saves, rules);
            for save in stay_by_time(&saves, others) {
                prop_assert!(stay.contains(&save), "{save:?} of {saves:?}");
            }
            prop_assert_eq!(&stay_by_time(&stay, rules), &stay);
            // A step that is removed by hand takes no other with it, unless the others are compared with it: it is the last, or
            // the last whose time is known.
            let compared = [stay.last(), stay.iter().rfind(|(_, minute)| minute.is_some())];
            let gone = stay.get(lost).filter(|save| !compared.contains(&Some(save)));
            let left: Vec<_> = stay.iter().copied().filter(|save| Some(save) != gone).collect();
            prop_assert_eq!(&stay_by_time(&left, rules), &left);
        }

        #[test]
        fn each_step_stays_exactly_if_a_rule_says_so(
            numbers in prop::collection::vec((0u64..9, prop::option::of(-2i8..3), 0u64..4), 0..12),
            newest in 1usize..4,
            every in prop::option::of(1u64..5),
            count in prop::option::of(1usize..4),
            lowest: bool,
        ) {
            let mut numbers = numbers;
            numbers.sort_unstable_by_key(|(step, ..)| *step);
            // -2 stands for NaN.
            let number = |n: i8| if n == -2 { f64::NAN } else { n.into() };
            let metrics: Vec<Metrics> =
                numbers.iter().map(|(_, n, _)| n.map(|n| loss(number(n))).unwrap_or_default()).collect();
            let steps: Vec<Candidate> = numbers.iter().zip(&metrics).map(|(&(step, _, at), metrics)| {
                Candidate { step, metrics, age: aged(at) }
            }).collect();
            let direction = if lowest { Direction::Min } else { Direction::Max };
            let best = count.map(|count| Best { metric: "loss".into(), direction, count });
            let rules = Rules { every, best: best.as_ref(), ..Rules::newest(newest) };

            let of = |at: usize| numbers[at].1.filter(|n| *n != -2).map(|n| if lowest { n } else { -n });
            let is_best = |at: usize| best.as_ref().is_some_and(|best| of(at).is_some_and(|own| {
                let better = |&other: &usize| of(other).is_some_and(|n| n < own || (n == own && other > at));
                (0..numbers.len()).filter(better).count() < best.count
            }));
            let none_has_it = numbers.iter().all(|(_, n, _)| n.is_none());
            let verdicts = rules.judge(&steps);
            for (at, verdict) in verdicts.iter().enumerate() {
                let stays = at + newest >= steps.len()
                    || every.is_some_and(|every| numbers[at].0 % every == 0)
                    || is_best(at)
                    || (best.is_some() && none_has_it);
                prop_assert_eq!(matches!(verdict, Verdict::Stays(_)), stays, "{} of {:?}", at, numbers);
            }
            // The save that was last never goes.
            let last = numbers.iter().map(|(.., at)| at).max();
            let survives = |(verdict, (.., at)): (&Verdict, &(u64, Option<i8>, u64))| *verdict != Verdict::Goes && Some(at) == last;
            prop_assert!(steps.is_empty() || verdicts.iter().zip(&numbers).any(survives));
        }
    }
}
