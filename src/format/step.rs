//! The step in a checkpoint's name: which number it is, and which numbers are not steps.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Endings that may follow the number.
const SUFFIXES: [&str; 6] = [".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".dir"];

/// Words that may precede `=` and the step. Any other word names a value: a loss, a seed.
const COUNTERS: [&str; 8] =
    ["step", "steps", "epoch", "epochs", "iter", "iters", "iteration", "batch"];

/// A name without its step: what all names in one row of checkpoints have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stem {
    /// The text before the number, with `*` for an epoch in it.
    before: Vec<u8>,
    suffix: &'static str,
}

/// A name that ends in a step number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepName {
    /// The name without its step.
    pub stem: Stem,
    /// The number.
    pub step: u64,
}

/// Why a name has no step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoStep {
    /// It does not end in a number.
    NoNumber,
    /// The number follows a dot, as in `v1.5` and `loss=0.2`.
    Fraction,
    /// The number is the value of something that does not count steps: `loss=3`.
    Value,
    /// A date or a time.
    Date,
}

impl StepName {
    /// Splits the last component of a path.
    ///
    /// # Errors
    /// Why it has no step.
    pub fn of(name: &[u8]) -> std::result::Result<Self, NoStep> {
        let suffix = SUFFIXES.into_iter().find(|suffix| name.ends_with(suffix.as_bytes()));
        let suffix = suffix.unwrap_or_default();
        let name = &name[..name.len() - suffix.len()];
        let digits = name.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
        let (before, number) = name.split_at(name.len() - digits);
        // No digits, or more than fit 64 bits, are not a step.
        let step = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
        let step = step.ok_or(NoStep::NoNumber)?;
        if before.last().is_some_and(|last| b".,".contains(last)) || is_exponent(before) {
            return Err(NoStep::Fraction);
        }
        if is_date(before, digits) {
            return Err(NoStep::Date);
        }
        if let Some(key) = before.strip_suffix(b"=")
            && !counts(key)
        {
            return Err(NoStep::Value);
        }
        Ok(Self { stem: Stem { before: without_epoch(before), suffix }, step })
    }
}

impl Stem {
    /// Whether all its words are known to count steps (`step-`, `global_step`, `checkpoint-`), or it has none. For
    /// `ema-step-` this is false: such a row may exist beside the steps.
    pub fn counts_steps(&self) -> bool {
        const WORDS: [&str; 7] = ["ckpt", "checkpoint", "global", "train", "it", "ep", "save"];
        let words = self.before.split(|byte| !byte.is_ascii_alphabetic() && byte.is_ascii());
        words.filter(|word| !word.is_empty()).all(|word| {
            let is = |known: &&str| word.eq_ignore_ascii_case(known.as_bytes());
            COUNTERS.iter().chain(&WORDS).any(is)
        })
    }
}

impl fmt::Display for Stem {
    /// As a [`StepPattern`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = String::from_utf8_lossy(&self.before);
        let number = if before.contains('*') { "{step}" } else { "*" };
        write!(f, "{before}{number}{}", self.suffix)
    }
}

impl fmt::Display for NoStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoNumber => "its name does not end in a number",
            Self::Fraction => "the number at the end of its name is a fraction",
            Self::Value => "the number at the end of its name is a value, not a count of steps",
            Self::Date => "its name ends in a date or a time",
        })
    }
}

/// Whether the number that follows is an exponent: `lr=1e-5`.
fn is_exponent(before: &[u8]) -> bool {
    let before = before.strip_suffix(b"-").or(before.strip_suffix(b"+")).unwrap_or(before);
    let before = before.strip_suffix(b"e").or(before.strip_suffix(b"E"));
    before.and_then(<[u8]>::last).is_some_and(u8::is_ascii_digit)
}

/// Whether the number ends a date or a time: `2026-11-23`, `10-30-00`, `20261123-103000`.
fn is_date(before: &[u8], digits: usize) -> bool {
    let is = |shape: &[u8]| {
        before.len() >= shape.len()
            && shape.iter().zip(&before[before.len() - shape.len()..]).all(|(shape, byte)| {
                match shape {
                    b'0' => byte.is_ascii_digit(),
                    _ => b"-_:T".contains(byte),
                }
            })
    };
    (digits == 2 && is(b"00-00-")) || ([4, 6].contains(&digits) && is(b"00000000-"))
}

/// Whether this key's value counts steps.
fn counts(key: &[u8]) -> bool {
    let word = key.rsplit(|byte| !byte.is_ascii_alphabetic()).next().unwrap_or_default();
    COUNTERS.iter().any(|counter| word.eq_ignore_ascii_case(counter.as_bytes()))
}

/// Turns `epoch=3-step=` into `epoch=*-step=`: the epoch grows with the step, so it does not distinguish rows. Any other
/// number does, as in `run1-` and `run2-`.
fn without_epoch(before: &[u8]) -> Vec<u8> {
    let whole = || before.to_vec();
    let step = before.strip_suffix(b"=").or(before.strip_suffix(b"_"));
    if !step.or(before.strip_suffix(b"-")).is_some_and(counts) {
        return whole();
    }
    let lower = before.to_ascii_lowercase();
    let Some(epoch) = lower.windows(5).position(|word| word == b"epoch") else { return whole() };
    let mut begin = epoch + b"epoch".len();
    begin += usize::from(before.get(begin).is_some_and(|byte| b"=_-".contains(byte)));
    let digits = before[begin..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let ends = before.get(begin + digits).is_some_and(|byte| b"-_,".contains(byte));
    if digits == 0 || !ends {
        return whole();
    }
    [&before[..begin], b"*", &before[begin + digits..]].concat()
}

/// Which names are steps, and where in them the step is. A pattern matches the whole name.
///
/// `{step}` matches the step's digits, and `*` any text: `epoch={step}-loss=*`. Without `{step}`, a single `*` matches
/// the step: `step-*`, `ckpt_*.pt`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPattern {
    text: String,
    tokens: Vec<Token>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Text(Vec<u8>),
    Step,
    Any,
}

impl StepPattern {
    /// The step in the last component of a path, if that matches the pattern.
    #[doc(hidden)]
    pub fn step_in(&self, name: &[u8]) -> Option<u64> {
        let mut tried = vec![false; (self.tokens.len() + 1) * (name.len() + 1)];
        fit(&self.tokens, name, 0, &mut tried).flatten()
    }
}

/// The step in a name whose bytes from `at` on match, if the tokens have one; `None` if they do not match.
///
/// `tried` marks the numbers of tokens and the places that were tried: all of these failed, since the first match ends the
/// search. Without it, each further `*` would multiply the time by the length of the name.
fn fit(tokens: &[Token], name: &[u8], at: usize, tried: &mut [bool]) -> Option<Option<u64>> {
    let Some((token, others)) = tokens.split_first() else {
        return (at == name.len()).then_some(None);
    };
    if std::mem::replace(&mut tried[tokens.len() * (name.len() + 1) + at], true) {
        return None;
    }
    let rest = &name[at..];
    match token {
        Token::Text(text) => {
            rest.starts_with(text).then(|| fit(others, name, at + text.len(), tried))?
        }
        Token::Step => {
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            // A step never begins in the middle of a number.
            let follows_digit = name[..at].last().is_some_and(u8::is_ascii_digit);
            let number = std::str::from_utf8(&rest[..digits]).ok().filter(|_| !follows_digit)?;
            let step = number.parse().ok()?;
            fit(others, name, at + digits, tried).map(|_| Some(step))
        }
        Token::Any => (at..=name.len()).find_map(|at| fit(others, name, at, tried)),
    }
}

impl FromStr for StepPattern {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] for a pattern without a place for the step, or with two.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::invalid(format!("the pattern {text:?} {why}"));
        let (steps, stars) = (text.matches("{step}").count(), text.matches('*').count());
        match (steps, stars) {
            (1, _) | (0, 1) => {}
            (0, 0) => return Err(bad("names no step: put `*` or `{step}` where the number is")),
            (0, _) => return Err(bad("has several `*`: put `{step}` where the step is")),
            _ => return Err(bad("names the step twice")),
        }
        if text.contains('/') {
            return Err(bad("matches names in the directory, so it must have no `/`"));
        }
        if text.replace("{step}", "").contains('{') {
            return Err(bad("has a `{` that begins no `{step}`"));
        }
        let star = if steps == 1 { Token::Any } else { Token::Step };
        let mut tokens = Vec::new();
        for (index, between) in text.split("{step}").enumerate() {
            tokens.extend((index > 0).then_some(Token::Step));
            for (index, text) in between.split('*').enumerate() {
                tokens.extend((index > 0).then(|| star.clone()));
                tokens.push(Token::Text(text.into()));
            }
        }
        tokens.retain(|token| *token != Token::Text(Vec::new()));
        Ok(Self { text: text.into(), tokens })
    }
}

impl fmt::Display for StepPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str) -> Option<u64> {
        StepName::of(name.as_bytes()).ok().map(|name| name.step)
    }

    #[test]
    fn step_is_the_number_at_the_end_of_the_name() {
        for (name, number) in [
            ("step-00001000", 1000),
            ("global_step500", 500),
            ("größe42", 42),
            ("7", 7),
            ("ckpt_100.pt", 100),
            ("step=3.ckpt", 3),
            ("iter_0000100.distcp", 100),
            ("epoch=1-step=500.ckpt", 500),
            ("model-2.safetensors", 2),
        ] {
            assert_eq!(step(name), Some(number), "{name}");
        }
        assert_eq!(StepName::of(b"gr\xf6\xdfe42").map(|name| name.step), Ok(42));
    }

    #[test]
    fn other_numbers_are_not_steps() {
        use NoStep::{Date, Fraction, NoNumber, Value};
        for (name, why) in [
            ("latest", NoNumber),
            ("step-1000.bak", NoNumber),
            ("step-99999999999999999999", NoNumber),
            ("epoch=10-loss=0.2", Fraction),
            ("epoch=10-loss=0.2.ckpt", Fraction),
            ("loss=0,25", Fraction),
            ("v1.5", Fraction),
            ("lr=1e-05", Fraction),
            ("epoch=1-acc=95", Value),
            ("seed=3", Value),
            ("2026-11-23", Date),
            ("run_2026-11-23T10-30-00", Date),
            ("20261123-103000", Date),
        ] {
            assert_eq!(StepName::of(name.as_bytes()).map(|name| name.step), Err(why), "{name}");
        }
    }

    #[test]
    fn stem_ignores_step_and_epoch() {
        let stem = |name: &str| StepName::of(name.as_bytes()).unwrap().stem;
        assert_eq!(stem("step-9"), stem("step-0010"));
        assert_eq!(stem("epoch=1-step=500.ckpt"), stem("epoch=2-step=1000.ckpt"));
        assert_eq!(stem("epoch_01_step_5"), stem("epoch_02_step_6"));
        assert_ne!(stem("run1-100"), stem("run2-100"));
        assert_ne!(stem("seed=1-step=5"), stem("seed=2-step=5"));
        assert_ne!(stem("step-1"), stem("step-1.pt"));
        assert_eq!(stem("ckpt_7.pt").to_string(), "ckpt_*.pt");
        let pattern: StepPattern = stem("epoch=1-step=5").to_string().parse().unwrap();
        assert_eq!(pattern.step_in(b"epoch=2-step=7"), Some(7));
    }

    #[test]
    fn counts_steps_only_for_known_words() {
        let counts = |name: &str| StepName::of(name.as_bytes()).unwrap().stem.counts_steps();
        for name in ["step-1", "global_step5", "7", "Epoch_3.ckpt", "checkpoint-500", "iter_01.pt"]
        {
            assert!(counts(name), "{name}");
        }
        for name in
            ["ema-step-1", "gpt2", "best-7", "swa_v3", "best_epoch_7", "run1-step-5", "größe42"]
        {
            assert!(!counts(name), "{name}");
        }
    }

    #[test]
    fn pattern_finds_the_step() {
        for (pattern, name, step) in [
            ("step-*", "step-0100", Some(100)),
            ("step-*", "step-", None),
            ("step-*", "step-1.pt", None),
            ("step-*", "old-step-1", None),
            ("ckpt_*.pt", "ckpt_5.pt", Some(5)),
            ("v1.*", "v1.5", Some(5)),
            ("epoch={step}-loss=*", "epoch=10-loss=0.2", Some(10)),
            ("*-{step}", "run1-100", Some(100)),
            ("*{step}", "run100", Some(100)),
            ("{step}*", "100", Some(100)),
            ("1{step}", "12", None),
        ] {
            let parsed: StepPattern = pattern.parse().unwrap();
            assert_eq!(parsed.step_in(name.as_bytes()), step, "{pattern} {name}");
        }
    }

    #[test]
    fn pattern_with_many_stars_is_matched_at_once() {
        let pattern: StepPattern = "*a*a*a*a*a*a*a*a*{step}b".parse().unwrap();
        let name = [&[b'a'; 200][..], b"7c"].concat();
        assert_eq!(pattern.step_in(&name), None);
        assert_eq!(pattern.step_in(&[&[b'a'; 200][..], b"7b"].concat()), Some(7));
    }

    #[test]
    fn pattern_without_one_step_is_refused() {
        for (pattern, says) in [
            ("step", "names no step"),
            ("epoch=*-loss=*", "put `{step}`"),
            ("{step}-{step}", "twice"),
            ("run/step-*", "no `/`"),
            ("{steps}-*", "begins no"),
        ] {
            let error = pattern.parse::<StepPattern>().unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(pattern), "{error}");
        }
    }
}
