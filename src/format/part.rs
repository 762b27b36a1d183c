//! A part of a state, such as the optimizer's: which tensors go with it, and what stays.

use super::Value;
use super::select::{Wanted, cut, is_below};
use crate::error::{Error, Result};
use serde_json::value::RawValue;
use std::collections::HashSet;

/// What is at some names and below them. A tensor that the rest of the state refers to as well (tied) is not of the part.
#[derive(Debug)]
pub struct Part {
    names: Vec<String>,
    /// The tree without the part; `None` if the part has nothing in it.
    pub rest: Option<Box<RawValue>>,
    /// Names of the tensors, arrays and objects that the tree refers to.
    before: HashSet<String>,
    /// Those that it refers to without the part.
    after: HashSet<String>,
}

impl Part {
    /// The part of a state whose tree of values is not known: the names of the tensors decide.
    pub fn named(names: &[String]) -> Self {
        let (before, after) = (HashSet::new(), HashSet::new());
        Self { names: names.to_vec(), rest: None, before, after }
    }

    /// The part of a tree of values.
    ///
    /// # Errors
    /// [`Error::Invalid`] for text that is no tree.
    pub fn of_tree(tree: &RawValue, names: &[String]) -> Result<Self> {
        let names = names.to_vec();
        Ok(match without(tree, &names)? {
            Some(rest) => {
                let (before, after) = (stored(tree)?, stored(&rest)?);
                Self { names, rest: Some(rest), before, after }
            }
            None => Self { names, rest: None, before: HashSet::new(), after: stored(tree)? },
        })
    }

    /// Whether a tensor, array or object goes with the part: nothing else refers to it, or nothing at all does and its
    /// name is of the part.
    pub fn has(&self, tensor: &str) -> bool {
        let is_named = || self.names.iter().any(|name| is_below(tensor, name));
        !self.after.contains(tensor) && (self.before.contains(tensor) || is_named())
    }
}

/// Whether a tree has something at a name or below it that can be cut out. Reads no more of the tree than it must.
///
/// # Errors
/// [`Error::Invalid`] for text that is no tree.
pub fn has(tree: &RawValue, name: &str) -> Result<bool> {
    let rest = cut(tree, &Wanted::NotBelow(vec![name.into()])).map_err(unreadable)?;
    Ok(rest.len() < tree.get().len())
}

/// The tree without what is at the names and below them; `None` if there is nothing.
fn without(tree: &RawValue, names: &[String]) -> Result<Option<Box<RawValue>>> {
    let all = cut(tree, &Wanted::NotBelow(names.into())).and_then(RawValue::from_string);
    let rest = all.map_err(unreadable)?;
    // The texts may differ in spaces alone.
    let plain = |tree: &RawValue| {
        Value::from_json_with_types(tree)?.to_json().map(|text| text.get().to_owned())
    };
    Ok((plain(tree)? != plain(&rest)?).then_some(rest))
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::invalid(format!("the state's values cannot be read: {error}"))
}

/// Names of the tensors, arrays and objects that a tree refers to.
fn stored(tree: &RawValue) -> Result<HashSet<String>> {
    fn add(value: &Value, names: &mut HashSet<String>) {
        if let Some(name) = value.stored() {
            names.insert(name.into());
        }
        match value {
            Value::List(items) | Value::Tuple(items) => {
                items.iter().for_each(|item| add(item, names));
            }
            Value::Dict(items) => items.iter().for_each(|(key, value)| {
                add(key, names);
                add(value, names);
            }),
            Value::Other(fields) => fields.iter().for_each(|(_, value)| add(value, names)),
            _ => {}
        }
    }
    let mut names = HashSet::new();
    add(&Value::from_json_with_types(tree)?, &mut names);
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.into()).unwrap()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).into()).collect()
    }

    const TIED: &str = concat!(
        r#"{"opt":{"w":{"$tensor":"opt.w"},"m":{"$tensor":"opt.m"},"e":{"$tensor":"opt.e"}},"#,
        r#""ema":{"e":{"$tensor":"opt.e"}},"model":{"w":{"$tensor":"opt.w"}},"l":[{"x":{"$tensor":"l.0.x"}}]}"#
    );

    #[test]
    fn tensor_is_of_the_part_that_alone_refers_to_it_whatever_its_name() {
        let of = |names_of: &[&str]| {
            let part = Part::of_tree(&tree(TIED), &names(names_of)).unwrap();
            ["opt.w", "opt.m", "opt.e", "opt.other", "l.0.x"].map(|name| part.has(name))
        };
        assert_eq!(of(&["opt"]), [false, true, false, true, false]);
        assert_eq!(of(&["ema"]), [false; 5]);
        assert_eq!(of(&["opt", "ema"]), [false, true, true, true, false]);
        assert_eq!(of(&["model"]), [false; 5]);
        assert_eq!(of(&["opt", "model"]), [true, true, false, true, false]);
        assert_eq!(of(&["l.0"]), [false; 5], "lists are not cut");
    }

    #[test]
    fn names_alone_decide_without_a_tree() {
        let part = Part::named(&names(&["opt"]));
        assert!(part.has("opt") && part.has("opt.w") && !part.has("optimizer") && !part.has("w"));
    }

    #[test]
    fn tree_has_what_could_be_cut_out_of_it() {
        let has = |name| has(&tree(TIED), name).unwrap();
        assert!(has("opt") && has("opt.m") && has("l"));
        assert!(!has("op") && !has("opt.x") && !has("l.0"));
    }
}
