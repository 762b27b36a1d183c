//! Cuts the text of a tree of values down to what a load selects, or to what a checkpoint keeps when it is slimmed:
//! parsing a million names would take longer than reading the few selected tensors.
//!
//! The result may hold more than the selection: only dictionaries are cut, and only at keys that are text or integers.
//! Names are paths joined by dots; a duplicate name ends in `#` and a number.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The selection of a load.
#[derive(Debug)]
pub enum Wanted {
    /// Exactly these names, sorted.
    Names(Vec<String>),
    /// This name and everything below it.
    Below(String),
    /// Everything but these names and what is below them.
    NotBelow(Vec<String>),
}

/// Whether a name is `prefix` or lies below it: `optimizer` and `optimizer.state` below `optimizer`.
pub fn is_below(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Wanted {
    /// Selects exactly these names.
    pub fn names(mut names: Vec<String>) -> Self {
        names.sort_unstable();
        Self::Names(names)
    }

    /// How much to keep of the value at a path.
    fn at(&self, path: &str) -> Keep {
        let goes_on = |name: &str, with: char| {
            name.strip_prefix(path).is_some_and(|rest| rest.starts_with(with))
        };
        match self {
            Self::Names(names) => {
                let any = |with: char| {
                    let from = format!("{path}{with}");
                    let first = names.partition_point(|name| *name < from);
                    names.get(first).is_some_and(|name| goes_on(name, with))
                };
                let is_one = names.binary_search_by(|name| name.as_str().cmp(path)).is_ok();
                Keep::of(is_one || any('#'), any('.'))
            }
            Self::Below(prefix) => {
                let prefix = prefix.strip_suffix('.').unwrap_or(prefix);
                Keep::of(is_below(path, prefix) || goes_on(prefix, '#'), goes_on(prefix, '.'))
            }
            Self::NotBelow(dropped) => {
                let is_dropped = dropped.iter().any(|prefix| is_below(path, prefix));
                Keep::of(
                    !is_dropped && !dropped.iter().any(|prefix| goes_on(prefix, '.')),
                    !is_dropped,
                )
            }
        }
    }
}

/// How much of a value to keep.
#[derive(Clone, Copy, PartialEq)]
enum Keep {
    All,
    /// Something below it.
    Within,
    Nothing,
}

impl Keep {
    fn of(all: bool, some: bool) -> Self {
        match (all, some) {
            (true, _) => Self::All,
            (false, true) => Self::Within,
            (false, false) => Self::Nothing,
        }
    }
}

/// Cuts a tree down to the selection, in the same notation.
///
/// # Errors
/// The text is not JSON.
pub fn cut(tree: &RawValue, wanted: &Wanted) -> serde_json::Result<String> {
    let mut out = String::new();
    cut_value(tree, None, wanted, &mut out)?;
    Ok(out)
}

/// An object's fields, in order.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some((Key(key), value)) = from.next_entry()? {
                    fields.push((key, value));
                }
                Ok(fields)
            }
        }
        from.deserialize_map(Read).map(Self)
    }
}

/// A key, borrowed if it has no escapes.
#[derive(serde::Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

fn cut_value(
    value: &RawValue,
    path: Option<&str>,
    wanted: &Wanted,
    out: &mut String,
) -> serde_json::Result<()> {
    let text = value.get();
    if !text.starts_with('{') {
        out.push_str(text);
        return Ok(());
    }
    let Fields(fields) = serde_json::from_str(text)?;
    match fields.first() {
        Some((tag, body)) if tag == "$odict" || tag == "$dict" => {
            out.push_str("{\"");
            out.push_str(tag);
            out.push_str("\":");
            cut_body(body, path, wanted, out)?;
            for (name, value) in &fields[1..] {
                out.push(',');
                push_field(name, value.get(), out)?;
            }
            out.push('}');
        }
        Some((tag, _)) if tag.starts_with('$') => out.push_str(text),
        _ => cut_fields(&fields, path, wanted, out)?,
    }
    Ok(())
}

/// Cuts the body of a tagged dictionary: an object, or a list of pairs.
fn cut_body(
    body: &RawValue,
    path: Option<&str>,
    wanted: &Wanted,
    out: &mut String,
) -> serde_json::Result<()> {
    if body.get().starts_with('{') {
        let Fields(fields) = serde_json::from_str(body.get())?;
        return cut_fields(&fields, path, wanted, out);
    }
    let pairs: Vec<Vec<&RawValue>> = match serde_json::from_str(body.get()) {
        Ok(pairs) => pairs,
        Err(_) => {
            out.push_str(body.get()); // its reader reports the error
            return Ok(());
        }
    };
    out.push('[');
    let mut comma = "";
    for pair in &pairs {
        let [key, value] = pair[..] else { continue };
        let mut kept = String::new();
        let keep = match step(key) {
            Some(step) => cut_item(&step, value, path, wanted, &mut kept)?,
            None => {
                kept.push_str(value.get());
                true
            }
        };
        if keep {
            out.push_str(comma);
            out.extend(["[", key.get(), ",", &kept, "]"]);
            comma = ",";
        }
    }
    out.push(']');
    Ok(())
}

/// The path step of a key that is text or an integer.
fn step(key: &RawValue) -> Option<Cow<'_, str>> {
    let text = key.get();
    let is_integer = text.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit());
    if is_integer { Some(text.into()) } else { serde_json::from_str(text).ok().map(|Key(key)| key) }
}

fn cut_fields(
    fields: &[(Cow<str>, &RawValue)],
    path: Option<&str>,
    wanted: &Wanted,
    out: &mut String,
) -> serde_json::Result<()> {
    out.push('{');
    let mut comma = "";
    for (key, value) in fields {
        let mut kept = String::new();
        if cut_item(key, value, path, wanted, &mut kept)? {
            out.push_str(comma);
            push_field(key, &kept, out)?;
            comma = ",";
        }
    }
    out.push('}');
    Ok(())
}

/// Writes what is kept of the item at a step below a path. Returns whether that is anything.
fn cut_item(
    step: &str,
    value: &RawValue,
    path: Option<&str>,
    wanted: &Wanted,
    out: &mut String,
) -> serde_json::Result<bool> {
    let at = path.map_or_else(|| step.to_owned(), |path| format!("{path}.{step}"));
    match wanted.at(&at) {
        Keep::All => out.push_str(value.get()),
        Keep::Within => cut_value(value, Some(&at), wanted, out)?,
        Keep::Nothing => return Ok(false),
    }
    Ok(true)
}

fn push_field(name: &str, text: &str, out: &mut String) -> serde_json::Result<()> {
    out.push_str(&serde_json::to_string(name)?);
    out.push(':');
    out.push_str(text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut_of(tree: &str, wanted: &Wanted) -> String {
        cut(&RawValue::from_string(tree.into()).unwrap(), wanted).unwrap()
    }

    const TREE: &str = concat!(
        r#"{"model":{"$odict":{"a.w":{"$tensor":"model.a.w"},"b":1},"attrs":{"_metadata":2}},"#,
        r#""model_ema":{"w":3},"opt":{"$dict":[[0,{"s":4}],["k",5],[[1,2],6]]},"l":[{"x":7}],"é\"":8}"#
    );

    #[test]
    fn names_keep_only_the_dictionaries_around_them() {
        let of = |names: &[&str]| {
            cut_of(TREE, &Wanted::names(names.iter().map(|name| (*name).into()).collect()))
        };
        assert_eq!(of(&[]), "{}");
        assert_eq!(
            of(&["model.a.w"]),
            r#"{"model":{"$odict":{"a.w":{"$tensor":"model.a.w"}},"attrs":{"_metadata":2}}}"#
        );
        assert_eq!(of(&["opt.0.s"]), r#"{"opt":{"$dict":[[0,{"s":4}],[[1,2],6]]}}"#);
        assert_eq!(of(&["l.0.x", "é\""]), r#"{"l":[{"x":7}],"é\"":8}"#);
        assert_eq!(of(&["model_ema"]), r#"{"model_ema":{"w":3}}"#);
        let wanted = Wanted::names(vec![".x".into()]);
        assert_eq!(cut_of(r#"{"":{"x":1,"y":2},"x":3}"#, &wanted), r#"{"":{"x":1}}"#);
        assert_eq!(of(&["model_ema#2", "model_em"]), r#"{"model_ema":{"w":3}}"#);
    }

    #[test]
    fn prefix_keeps_everything_below_it() {
        let of = |prefix: &str| cut_of(TREE, &Wanted::Below(prefix.into()));
        assert_eq!(of("model_ema"), r#"{"model_ema":{"w":3}}"#);
        assert_eq!(of("model_ema."), r#"{"model_ema":{"w":3}}"#);
        assert_eq!(of("model_ema.w"), r#"{"model_ema":{"w":3}}"#);
        assert_eq!(of("model_"), "{}");
        let model = of("model");
        assert!(model.contains("a.w") && model.contains("\"b\":1") && !model.contains("ema"));
        assert_eq!(of("opt.k"), r#"{"opt":{"$dict":[["k",5],[[1,2],6]]}}"#);
    }

    #[test]
    fn everything_but_what_is_dropped_is_kept() {
        let of = |dropped: &[&str]| {
            let dropped = dropped.iter().map(|name| (*name).into()).collect();
            cut_of(TREE, &Wanted::NotBelow(dropped))
        };
        assert_eq!(of(&[]), TREE);
        assert_eq!(of(&["mod", "model.b.c", "l.0.x", "k"]), TREE);
        assert_eq!(
            of(&["model", "l", "é\""]),
            r#"{"model_ema":{"w":3},"opt":{"$dict":[[0,{"s":4}],["k",5],[[1,2],6]]}}"#
        );
        let part = of(&["opt.0", "model.a", "model_ema.w"]);
        assert!(part.contains(r#"{"$odict":{"b":1},"attrs""#), "{part}");
        assert!(part.contains(r#""opt":{"$dict":[["k",5],[[1,2],6]]}"#), "{part}");
        assert!(part.contains(r#""model_ema":{},"#), "{part}");
    }

    #[test]
    fn text_that_is_not_a_tree_is_unchanged() {
        assert_eq!(cut_of("null", &Wanted::Below("a".into())), "null");
        assert_eq!(cut_of(r#"{"$dict":3}"#, &Wanted::Below("a".into())), r#"{"$dict":3}"#);
    }
}
