//! Compares the values that are not tensors, by name.

use crate::error::Result;
use crate::format::Value;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// A value that differs, or that only one checkpoint has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ValueDiff {
    /// Its name: the path joined by dots.
    pub name: String,
    /// The value in `a`, as JSON as in the manifest; `None` if only `b` has it. For containers of unlike kinds, the kind.
    pub a: Option<String>,
    /// Likewise in `b`.
    pub b: Option<String>,
}

/// What a name stands for.
#[derive(Debug, PartialEq, Eq)]
enum Node {
    /// A container, by its kind.
    Container(&'static str),
    /// A tensor, an array or an object.
    Stored { name: String, json: String },
    /// Anything else, as JSON.
    Leaf(String),
}

impl Node {
    fn text(&self) -> String {
        match self {
            Self::Container(kind) => (*kind).into(),
            Self::Stored { json, .. } | Self::Leaf(json) => json.clone(),
        }
    }
}

/// Compares two trees. Takes with each the tensors that only that checkpoint has: these are reported as tensors.
pub fn compare(
    (a, only_a): (&Value, &[String]),
    (b, only_b): (&Value, &[String]),
) -> Result<Vec<ValueDiff>> {
    let (nodes_a, nodes_b) = (flat(a)?, flat(b)?);
    let by_name = |nodes: &[(String, Node)]| -> HashMap<String, usize> {
        nodes.iter().map(|(name, _)| name.clone()).zip(0..).collect()
    };
    let (in_a, in_b) = (by_name(&nodes_a), by_name(&nodes_b));
    let mut diffs = Vec::new();
    for (name, one) in &nodes_a {
        match in_b.get(name).map(|&number| &nodes_b[number].1) {
            Some(other) if other == one => {}
            Some(other) => diffs.push(diff(name, Some(one), Some(other))),
            None => diffs.extend(alone(one, only_a).then(|| diff(name, Some(one), None))),
        }
    }
    for (name, other) in &nodes_b {
        if !in_a.contains_key(name) && alone(other, only_b) {
            diffs.push(diff(name, None, Some(other)));
        }
    }
    Ok(diffs)
}

/// Whether a node that only one tree has is to be reported. Its items are reported themselves.
fn alone(node: &Node, only: &[String]) -> bool {
    match node {
        Node::Container(_) => false,
        Node::Stored { name, .. } => !only.contains(name),
        Node::Leaf(_) => true,
    }
}

fn diff(name: &str, one: Option<&Node>, other: Option<&Node>) -> ValueDiff {
    ValueDiff { name: name.into(), a: one.map(Node::text), b: other.map(Node::text) }
}

/// All names in a tree, in order, each once.
fn flat(root: &Value) -> Result<Vec<(String, Node)>> {
    let (mut nodes, mut seen) = (Vec::new(), HashSet::new());
    collect(root, "", &mut nodes)?;
    nodes.retain(|(name, _): &(String, Node)| seen.insert(name.clone()));
    Ok(nodes)
}

fn collect(value: &Value, name: &str, nodes: &mut Vec<(String, Node)>) -> Result<()> {
    let below = |step: &str| match name {
        "" => step.to_owned(),
        _ => format!("{name}.{step}"),
    };
    match value.plain() {
        Value::Dict(items) if !items.is_empty() => {
            nodes.push((name.into(), Node::Container(kind(value))));
            for (key, child) in items {
                let step = match key {
                    Value::Str(text) => text.clone(),
                    key => key.to_json()?.get().to_owned(),
                };
                collect(child, &below(&step), nodes)?;
            }
        }
        Value::List(items) | Value::Tuple(items) if !items.is_empty() => {
            nodes.push((name.into(), Node::Container(kind(value))));
            for (index, child) in items.iter().enumerate() {
                collect(child, &below(&index.to_string()), nodes)?;
            }
        }
        _ => nodes.push((name.into(), leaf(value)?)),
    }
    Ok(())
}

fn leaf(value: &Value) -> Result<Node> {
    let json = value.to_json()?.get().to_owned();
    let stored = match value {
        Value::Tensor(name) | Value::Object(name) => Some(name),
        Value::Other(fields) => match fields.first() {
            Some((tag, Value::Str(name))) if tag == "$ndarray" => Some(name),
            _ => None,
        },
        _ => None,
    };
    Ok(match stored {
        Some(name) => Node::Stored { name: name.clone(), json },
        None => Node::Leaf(json),
    })
}

/// The kind of a container.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Dict(_) => "a dict",
        Value::List(_) => "a list",
        Value::Tuple(_) => "a tuple",
        Value::Other(fields) => match fields.first().map(|(tag, _)| tag.as_str()) {
            Some("$set") => "a set",
            Some("$frozenset") => "a frozenset",
            Some("$deque") => "a deque",
            Some("$defaultdict") => "a defaultdict",
            Some("$dataclass") => "a dataclass",
            Some("$namedtuple") => "a named tuple",
            Some("$namespace") => "a namespace",
            _ => "a container",
        },
        _ => "a value",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(json: &str) -> Value {
        Value::from_json(&serde_json::value::RawValue::from_string(json.into()).unwrap()).unwrap()
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
                ("tied".into(), text(r#"{"$tensor":"w"}"#), text(r#"{"$tensor":"tied"}"#)),
                ("e".into(), text("{}"), text("a dict")),
                ("e.f".into(), None, text("true")),
            ]
        );
    }
}
