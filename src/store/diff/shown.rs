//! What a value is to a comparison, and how a report shows it.

use crate::error::Result;
use crate::format::Value;
use std::collections::HashMap;

/// What an object is called.
pub const OBJECT: &str = "an object";

pub type Pairs = [(Value, Value)];

/// The items of a container.
pub enum Items<'a> {
    Named(&'a Pairs),
    Listed(&'a [Value]),
}

impl<'a> Items<'a> {
    pub fn of(value: &'a Value) -> Option<Self> {
        let body = match value {
            Value::Other(fields) => match fields.first() {
                Some((tag, body)) if tag == "$odict" => body,
                _ => value.plain(),
            },
            value => value,
        };
        match body {
            Value::Dict(items) => Some(Self::Named(items)),
            Value::List(items) | Value::Tuple(items) => Some(Self::Listed(items)),
            _ => None,
        }
    }
}

/// The keys of a dictionary, as JSON and as steps of a path.
pub struct Keys {
    pub json: Vec<String>,
    pub by_json: HashMap<String, usize>,
    pub by_step: HashMap<String, usize>,
}

impl Keys {
    pub fn of(items: &Pairs) -> Result<Self> {
        let json = items.iter().map(|(key, _)| json(key)).collect::<Result<Vec<_>>>()?;
        let by_json = json.iter().cloned().zip(0..).collect();
        let steps = items.iter().map(|(key, _)| step(key)).collect::<Result<Vec<_>>>()?;
        Ok(Self { json, by_json, by_step: steps.into_iter().zip(0..).collect() })
    }
}

pub fn below(name: &str, step: &str) -> String {
    if name.is_empty() { step.into() } else { format!("{name}.{step}") }
}

pub fn step(key: &Value) -> Result<String> {
    match key {
        Value::Str(text) => Ok(text.clone()),
        key => json(key),
    }
}

pub fn key_text(key: &Value) -> Result<String> {
    let kind = match key {
        Value::Str(_) => " (str)",
        Value::Int(_) | Value::BigInt(_) => " (int)",
        Value::Float(_) => " (float)",
        Value::Bool(_) => " (bool)",
        _ => "",
    };
    Ok(format!("{}{kind}", json(key)?))
}

pub fn json(value: &Value) -> Result<String> {
    Ok(value.to_json()?.get().to_owned())
}

pub fn sorted(items: &[Value]) -> Result<Vec<String>> {
    let mut texts = items.iter().map(json).collect::<Result<Vec<_>>>()?;
    texts.sort();
    Ok(texts)
}

/// A value in words where it is a container, a tensor, an array or an object, otherwise as JSON.
pub fn text(value: &Value) -> Result<String> {
    match Items::of(value) {
        Some(Items::Named([]) | Items::Listed([])) => {
            Ok(kind(value).replacen("an ", "an empty ", 1).replacen("a ", "an empty ", 1))
        }
        None if value.stored().is_none() => json(value),
        _ => Ok(kind(value).into()),
    }
}

/// What a container's type has beside its items, such as `maxlen`, as JSON.
pub fn kind_fields(value: &Value) -> Result<String> {
    let Value::Other(fields) = value else { return Ok(String::new()) };
    let is_type =
        |tag: &str| matches!(tag, "$dataclass" | "$namedtuple" | "$namespace" | "$composite");
    let tag = fields.first().map_or("", |(tag, _)| tag);
    let items = if tag == "$composite" { "tensors" } else { "fields" };
    let kept = |(name, _): &&(String, Value)| {
        if name.starts_with('$') { is_type(name) } else { name != items }
    };
    json(&Value::Other(fields.iter().filter(kept).cloned().collect()))
}

pub fn is_set(value: &Value) -> bool {
    matches!(kind(value), "a set" | "a frozenset")
}

/// The kind of a value, in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Dict(_) => "a dict",
        Value::List(_) => "a list",
        Value::Tuple(_) => "a tuple",
        Value::Tensor(_) => "a tensor",
        Value::Object(_) => OBJECT,
        Value::Other(fields) => match fields.first().map(|(tag, _)| tag.as_str()) {
            Some("$ndarray") => "an array",
            Some("$odict") => "an OrderedDict",
            Some("$set") => "a set",
            Some("$frozenset") => "a frozenset",
            Some("$deque") => "a deque",
            Some("$defaultdict") => "a defaultdict",
            Some("$dataclass") => "a dataclass",
            Some("$namedtuple") => "a named tuple",
            Some("$namespace") => "a namespace",
            Some("$composite") => "a tensor made of tensors",
            _ => "a value",
        },
        _ => "a value",
    }
}
