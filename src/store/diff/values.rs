//! Compares the values that are not tensors: two trees, walked together.

use super::shown::{
    Items, Keys, Pairs, below, is_set, json, key_text, kind, kind_fields, sorted, step, text,
};
use crate::error::Result;
use crate::format::Value;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// A value that differs, or that only one checkpoint has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ValueDiff {
    /// Its name: the path joined by dots. Empty for the state itself.
    pub name: String,
    /// The value in `a`, as JSON as in the manifest; `None` if only `b` has it. In words for a container, a tensor, an
    /// array or an object, and for a key or an order of keys that differs: `"a dict"`, `"tied to w"`, `"key 1 (int)"`.
    pub a: Option<String>,
    /// Likewise in `b`.
    pub b: Option<String>,
}

/// Compares two trees. Takes with each the tensors that only that checkpoint has: these are reported as tensors.
pub fn compare(
    (a, only_a): (&Value, &[String]),
    (b, only_b): (&Value, &[String]),
) -> Result<Vec<ValueDiff>> {
    let mut walk = Walk { a: Side::new(a, only_a)?, b: Side::new(b, only_b)?, diffs: Vec::new() };
    walk.both("", a, b)?;
    Ok(pair_up(walk.diffs).into_iter().map(|found| found.diff).collect())
}

/// One of the two trees.
struct Side<'a> {
    /// Tensors that only this checkpoint has.
    only: HashSet<&'a str>,
    /// Where each tensor, array or object is met first: the others are tied to it.
    first: HashMap<&'a str, String>,
}

impl<'a> Side<'a> {
    fn new(tree: &'a Value, only: &'a [String]) -> Result<Self> {
        let mut first = HashMap::new();
        find_stored(tree, "", &mut first)?;
        Ok(Self { only: only.iter().map(String::as_str).collect(), first })
    }

    /// The place that a tensor here is tied to, unless this is the first.
    fn tied_to(&self, stored: &str, name: &str) -> Option<&str> {
        self.first.get(stored).map(String::as_str).filter(|first| *first != name)
    }
}

/// What was found at one place. A value that only one tree has keeps its keys, which tell two places of one name apart.
struct Found {
    diff: ValueDiff,
    keys: Option<String>,
}

struct Walk<'a> {
    a: Side<'a>,
    b: Side<'a>,
    diffs: Vec<Found>,
}

impl<'a> Walk<'a> {
    fn report(&mut self, name: &str, a: impl Into<String>, b: impl Into<String>) {
        let diff = ValueDiff { name: name.into(), a: Some(a.into()), b: Some(b.into()) };
        self.diffs.push(Found { diff, keys: None });
    }

    /// Compares what both trees have at a place.
    fn both(&mut self, name: &str, one: &'a Value, other: &'a Value) -> Result<()> {
        if let (Some(x), Some(y)) = (one.stored(), other.stored()) {
            return self.both_stored(name, (one, x), (other, y));
        }
        let (Some(items), Some(others)) = (Items::of(one), Items::of(other)) else {
            let (x, y) = (text(one)?, text(other)?);
            if x != y || (kind(one) != kind(other)) {
                self.report(name, x, y);
            }
            return Ok(());
        };
        if kind(one) != kind(other) {
            self.report(name, kind(one), kind(other));
        } else if (kind_fields(one)?) != kind_fields(other)? {
            self.report(name, kind_fields(one)?, kind_fields(other)?);
        }
        match (items, others) {
            (Items::Named(x), Items::Named(y)) => self.dicts(name, x, y),
            (Items::Listed(x), Items::Listed(y)) if is_set(one) && is_set(other) => {
                if sorted(x)? != sorted(y)? {
                    self.report(name, json(one)?, json(other)?);
                }
                Ok(())
            }
            (Items::Listed(x), Items::Listed(y)) => self.lists(name, x, y),
            _ => Ok(()),
        }
    }

    fn both_stored(
        &mut self,
        name: &str,
        (one, x): (&Value, &str),
        (other, y): (&Value, &str),
    ) -> Result<()> {
        if kind(one) != kind(other) {
            self.report(name, kind(one), kind(other));
            return Ok(());
        }
        let (tied_a, tied_b) = (self.a.tied_to(x, name), self.b.tied_to(y, name));
        if tied_a != tied_b {
            let own = format!("{} of its own", kind(one));
            let say = |tied: Option<&str>| tied.map_or(own.clone(), |to| format!("tied to {to}"));
            let (a, b) = (say(tied_a), say(tied_b));
            self.report(name, a, b);
        } else if x != y && !(self.a.only.contains(x) && self.b.only.contains(y)) {
            let what = kind(one).trim_start_matches("an ").trim_start_matches("a ");
            self.report(name, format!("the {what} {x}"), format!("the {what} {y}"));
        } else if kind_fields(one)? != kind_fields(other)? {
            self.report(name, kind_fields(one)?, kind_fields(other)?);
        }
        Ok(())
    }

    fn lists(&mut self, name: &str, one: &'a [Value], other: &'a [Value]) -> Result<()> {
        for (index, (x, y)) in one.iter().zip(other).enumerate() {
            self.both(&below(name, &index.to_string()), x, y)?;
        }
        let from = one.len().min(other.len());
        for (items, in_a) in [(one, true), (other, false)] {
            for (index, item) in items.iter().enumerate().skip(from) {
                let step = index.to_string();
                self.alone(&below(name, &step), &format!("{name}[{step}]"), item, in_a)?;
            }
        }
        Ok(())
    }

    fn dicts(&mut self, name: &str, one: &'a Pairs, other: &'a Pairs) -> Result<()> {
        let (a, b) = (Keys::of(one)?, Keys::of(other)?);
        let mut pairs = Vec::new(); // numbers of what both have, in a's order
        for (number, (key, value)) in one.iter().enumerate() {
            let place = below(name, &step(key)?);
            if let Some(&same) = b.by_json.get(&a.json[number]) {
                pairs.push(same);
                self.both(&place, value, &other[same].1)?;
            } else if let Some(&alike) = b.by_step.get(&step(key)?)
                && !a.by_json.contains_key(&b.json[alike])
            {
                let (x, y) = (format!("key {}", key_text(key)?), key_text(&other[alike].0)?);
                self.report(&place, x, format!("key {y}"));
                self.both(&place, value, &other[alike].1)?;
            } else {
                self.alone(&place, &format!("{name}[{}]", a.json[number]), value, true)?;
            }
        }
        for (number, (key, value)) in other.iter().enumerate() {
            let alike = a.by_step.get(&step(key)?);
            let is_paired = a.by_json.contains_key(&b.json[number])
                || alike.is_some_and(|&alike| !b.by_json.contains_key(&a.json[alike]));
            if !is_paired {
                let keys = format!("{name}[{}]", b.json[number]);
                self.alone(&below(name, &step(key)?), &keys, value, false)?;
            }
        }
        if let Some(at) = pairs.windows(2).position(|two| two[0] > two[1]) {
            let named = |number: usize| key_text(&other[number].0);
            let (x, y) = (named(pairs[at])?, named(pairs[at + 1])?);
            self.report(name, format!("keys {x}, {y}"), format!("keys {y}, {x}"));
        }
        Ok(())
    }

    /// Reports what only one tree has, item by item.
    fn alone(&mut self, name: &str, keys: &str, value: &'a Value, in_a: bool) -> Result<()> {
        let side = if in_a { &self.a } else { &self.b };
        match Items::of(value) {
            Some(Items::Named(items)) if !items.is_empty() => {
                for (key, item) in items {
                    let keys = format!("{keys}[{}]", json(key)?);
                    self.alone(&below(name, &step(key)?), &keys, item, in_a)?;
                }
            }
            Some(Items::Listed(items)) if !items.is_empty() => {
                for (index, item) in items.iter().enumerate() {
                    let keys = format!("{keys}[{index}]");
                    self.alone(&below(name, &index.to_string()), &keys, item, in_a)?;
                }
            }
            _ if value.stored().is_some_and(|stored| side.only.contains(stored)) => {}
            _ => {
                let tied = value.stored().and_then(|stored| side.tied_to(stored, name));
                let text = tied.map_or_else(|| text(value), |to| Ok(format!("tied to {to}")))?;
                let (a, b) = if in_a { (Some(text), None) } else { (None, Some(text)) };
                let diff = ValueDiff { name: name.into(), a, b };
                self.diffs.push(Found { diff, keys: Some(keys.into()) });
            }
        }
        Ok(())
    }
}

/// Makes one difference of two values of one name that each tree has at other keys: `{"a.b": 1}` and `{"a": {"b": 1}}`.
fn pair_up(found: Vec<Found>) -> Vec<Found> {
    let alone = |found: &Found, in_a: bool| {
        found.keys.is_some() && found.diff.a.is_some() == in_a && found.diff.b.is_some() != in_a
    };
    let in_b: HashMap<String, String> = found
        .iter()
        .filter(|found| alone(found, false))
        .map(|found| (found.diff.name.clone(), found.keys.clone().unwrap_or_default()))
        .collect();
    let mut paired = HashSet::new();
    let mut kept = Vec::with_capacity(found.len());
    for mut one in found {
        if alone(&one, true)
            && let Some(keys) = in_b.get(&one.diff.name)
        {
            paired.insert(one.diff.name.clone());
            one.diff.a = Some(format!("at {}", one.keys.take().unwrap_or_default()));
            one.diff.b = Some(format!("at {keys}"));
        } else if alone(&one, false) && paired.contains(&one.diff.name) {
            continue;
        }
        kept.push(one);
    }
    kept
}

fn find_stored<'a>(
    value: &'a Value,
    name: &str,
    first: &mut HashMap<&'a str, String>,
) -> Result<()> {
    if let Some(stored) = value.stored() {
        first.entry(stored).or_insert_with(|| name.into());
    }
    match Items::of(value) {
        Some(Items::Named(items)) => {
            for (key, item) in items {
                find_stored(item, &below(name, &step(key)?), first)?;
            }
        }
        Some(Items::Listed(items)) => {
            for (index, item) in items.iter().enumerate() {
                find_stored(item, &below(name, &index.to_string()), first)?;
            }
        }
        None => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(json: &str) -> Value {
        Value::from_json_with_types(&serde_json::value::RawValue::from_string(json.into()).unwrap())
            .unwrap()
    }

    fn diffs(a: &str, b: &str) -> Vec<(String, Option<String>, Option<String>)> {
        let only = [vec!["lost".to_owned()], vec!["new".to_owned()]];
        let diffs = compare((&tree(a), &only[0]), (&tree(b), &only[1])).unwrap();
        diffs.into_iter().map(|ValueDiff { name, a, b }| (name, a, b)).collect()
    }

    #[test]
    fn values_are_compared_by_name() {
        let a = r#"{"lr": 0.1, "nan": {"$float": "nan"}, "betas": [0.9, 1], "w": {"$tensor": "w"},
                    "gone": null, "lost": {"$tensor": "lost"}, "tied": {"$tensor": "w"}, "e": {}}"#;
        assert_eq!(diffs(a, a), []);
        let b = r#"{"lr": 0.2, "nan": {"$float": "nan"}, "betas": {"$tuple": [0.9, 1]},
                    "w": {"$tensor": "w"}, "new": {"$tensor": "new"}, "tied": {"$tensor": "tied"},
                    "e": {"f": true}}"#;
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(
            diffs(a, b),
            [
                ("lr".into(), text("0.1"), text("0.2")),
                ("betas".into(), text("a list"), text("a tuple")),
                ("gone".into(), text("null"), None),
                ("tied".into(), text("tied to w"), text("a tensor of its own")),
                ("e.f".into(), None, text("true")),
            ]
        );
    }

    #[test]
    fn states_that_load_differently_differ() {
        let tensor = r#"{"$tensor": "1"}"#;
        let int = r#"{"$dict": [[1, {"$tensor": "1"}]]}"#;
        let one = |a: &str, b: &str| match &diffs(a, b)[..] {
            [(name, Some(a), Some(b))] => format!("{name}: {a} -> {b}"),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            one(r#"{"a.b": 1}"#, r#"{"a": {"b": 1}}"#),
            r#"a.b: at ["a.b"] -> at ["a"]["b"]"#
        );
        let keys = r#"1: key 1 (int) -> key "1" (str)"#;
        assert_eq!(one(int, &format!(r#"{{"1": {tensor}}}"#)), keys);
        assert_eq!(one(r#"{"$dict": [[1, {"x": 1}]]}"#, r#"{"1": {"x": 1}}"#), keys);
        assert_eq!(
            one(r#"{"o": {"$odict": {"x": 1}}}"#, r#"{"o": {"x": 1}}"#),
            "o: an OrderedDict -> a dict"
        );
        assert_eq!(
            one(r#"{"x": 1, "y": 2}"#, r#"{"y": 2, "x": 1}"#),
            r#": keys "x" (str), "y" (str) -> keys "y" (str), "x" (str)"#
        );
        assert_eq!(diffs(r#"{"$set": ["x", 1]}"#, r#"{"$set": [1, "x"]}"#), []);
        let array = r#"{"n": {"$ndarray": "n", "dtype": "<f4"}}"#;
        assert_eq!(one(array, r#"{"n": {"$tensor": "n"}}"#), "n: an array -> a tensor");
        assert_eq!(diffs("{}", r#"{"new": {"$tensor": "new"}}"#), []);
    }
}
