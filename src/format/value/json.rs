//! Values as JSON. Those that JSON lacks are objects whose first key starts with `$`. The Python package reads and writes
//! the same tree; `docs/format.md` lists the tags.

use super::Value;
use crate::error::{Error, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::fmt;

/// Integers up to this size are plain JSON numbers: every reader can represent them exactly.
const PLAIN_INT_MAX: i64 = 1 << 53;

/// Deepest nesting of JSON that is read: enough for 200 levels of Python's values, and it fits any thread's stack.
const NESTING_MAX: usize = 640;

impl Value {
    /// Reads a tree.
    ///
    /// # Errors
    /// [`Error::Invalid`] for text that is not such a tree: bad JSON, duplicate keys, too deep nesting.
    pub fn from_json(text: &RawValue) -> Result<Self> {
        Self::from_json_with_types(text).map(Self::ordered_as_dicts)
    }

    /// Reads a tree in which an OrderedDict stays a [`Value::Other`], attributes included.
    pub(crate) fn from_json_with_types(text: &RawValue) -> Result<Self> {
        let bad = |e: &dyn fmt::Display| {
            Error::invalid(format!("the state's values cannot be read: {e}"))
        };
        if nesting(text.get()) > NESTING_MAX {
            return Err(bad(&format!("nested more than {NESTING_MAX} levels deep")));
        }
        let mut from = serde_json::Deserializer::from_str(text.get());
        from.disable_recursion_limit(); // the check above replaces it
        Self::deserialize(&mut from).map_err(|e| bad(&e))
    }

    /// Makes each OrderedDict a [`Value::Dict`], which has an order too.
    fn ordered_as_dicts(self) -> Self {
        let all = |items: Vec<Self>| items.into_iter().map(Self::ordered_as_dicts).collect();
        match self {
            Self::List(items) => Self::List(all(items)),
            Self::Tuple(items) => Self::Tuple(all(items)),
            Self::Dict(items) => Self::Dict(
                items
                    .into_iter()
                    .map(|(key, value)| (key.ordered_as_dicts(), value.ordered_as_dicts()))
                    .collect(),
            ),
            Self::Other(fields) => {
                let inner = |(name, value): (String, Self)| (name, value.ordered_as_dicts());
                let mut fields: Vec<(String, Self)> = fields.into_iter().map(inner).collect();
                match fields.first() {
                    Some((tag, Self::Dict(_))) if tag == "$odict" => fields.swap_remove(0).1,
                    _ => Self::Other(fields),
                }
            }
            value => value,
        }
    }

    /// Writes a tree.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be written as JSON.
    pub fn to_json(&self) -> Result<Box<RawValue>> {
        serde_json::value::to_raw_value(self)
            .map_err(|e| Error::invalid(format!("the state's values cannot be written: {e}")))
    }
}

/// What a [`Named`] dictionary holds at a key.
pub(crate) enum Leaf<'a> {
    /// A reference to the tensor of this name.
    Tensor(&'a str),
    /// Anything else.
    Value(&'a Value),
}

/// A [`Value::Dict`] with text keys, serialized without copying a million names.
pub(crate) struct Named<I>(pub I);

impl<'a, I: Iterator<Item = (&'a str, Leaf<'a>)> + Clone> Serialize for Named<I> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self.0.clone().all(|(key, _)| is_plain(key)) {
            true => to.collect_map(self.0.clone()),
            false => tagged(to, "$dict", &Pairs(self.0.clone())),
        }
    }
}

/// A list of pairs.
struct Pairs<I>(I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Pairs<I> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_seq(self.0.clone())
    }
}

/// The nesting depth of valid JSON.
pub fn nesting(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Null => to.serialize_unit(),
            Self::Bool(b) => to.serialize_bool(*b),
            Self::Int(n) if n.unsigned_abs() <= PLAIN_INT_MAX as u64 => to.serialize_i64(*n),
            Self::Int(n) => tagged(to, "$int", &n.to_string()),
            Self::BigInt(digits) => tagged(to, "$int", digits),
            Self::Float(x) if x.is_finite() => to.serialize_f64(*x),
            Self::Float(x) if x.is_nan() => tagged(to, "$float", "nan"),
            Self::Float(x) => tagged(to, "$float", if *x > 0.0 { "inf" } else { "-inf" }),
            Self::Str(text) => to.serialize_str(text),
            Self::Bytes(bytes) => tagged(to, "$bytes", &BASE64.encode(bytes)),
            Self::List(items) => to.collect_seq(items),
            Self::Tuple(items) => tagged(to, "$tuple", items),
            Self::Dict(items) => serialize_dict(items, to),
            Self::Tensor(name) => tagged(to, "$tensor", name),
            Self::Object(name) => tagged(to, "$object", name),
            Self::Other(fields) => to.collect_map(fields.iter().map(|(k, v)| (k, v))),
        }
    }
}

impl Serialize for Leaf<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Tensor(name) => tagged(to, "$tensor", name),
            Self::Value(value) => value.serialize(to),
        }
    }
}

fn tagged<S: Serializer, T: Serialize + ?Sized>(
    to: S,
    tag: &str,
    value: &T,
) -> std::result::Result<S::Ok, S::Error> {
    let mut map = to.serialize_map(Some(1))?;
    map.serialize_entry(tag, value)?;
    map.end()
}

/// Whether a key cannot be mistaken for a tag.
fn is_plain(key: &str) -> bool {
    !key.starts_with('$')
}

/// Writes a JSON object if all keys are [plain](is_plain) text, otherwise a list of pairs.
fn serialize_dict<S: Serializer>(
    items: &[(Value, Value)],
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    let plain = items.iter().map(|(key, value)| match key {
        Value::Str(key) if is_plain(key) => Some((key, value)),
        _ => None,
    });
    match plain.collect::<Option<Vec<_>>>() {
        Some(items) => to.collect_map(items),
        None => tagged(to, "$dict", items),
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        from.deserialize_any(ValueVisitor)
    }
}

macro_rules! scalars {
    ($($visit:ident: $scalar:ty),*) => {
        $(fn $visit<E>(self, value: $scalar) -> std::result::Result<Value, E> {
            Ok(value.into())
        })*
    };
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value of the state")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    scalars! { visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element()? {
            items.push(item);
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> std::result::Result<Value, A::Error> {
        let (mut items, mut seen) = (Vec::new(), HashSet::new());
        while let Some((key, value)) = from.next_entry::<String, Value>()? {
            if !seen.insert(key.clone()) {
                return Err(serde::de::Error::custom(format!("the key {key:?} appears twice")));
            }
            items.push((key, value));
        }
        untag(items).map_err(serde::de::Error::custom)
    }
}

/// Converts a JSON object to the value of its tag, or to a dictionary.
fn untag(mut items: Vec<(String, Value)>) -> std::result::Result<Value, String> {
    let Some((tag, value)) = items.first_mut().filter(|(key, _)| key.starts_with('$')) else {
        return Ok(Value::Dict(items.into_iter().map(|(k, v)| (Value::Str(k), v)).collect()));
    };
    let bad = || format!("bad value under {tag:?}");
    Ok(match (tag.as_str(), std::mem::replace(value, Value::Null)) {
        ("$int", Value::Str(digits)) => match digits.parse() {
            Ok(n) => Value::Int(n),
            Err(_) => Value::BigInt(digits),
        },
        ("$float", Value::Str(word)) => Value::Float(word.parse().map_err(|_| bad())?),
        ("$bytes", Value::Str(text)) => Value::Bytes(BASE64.decode(text).map_err(|_| bad())?),
        ("$tuple", Value::List(items)) => Value::Tuple(items),
        ("$tensor", Value::Str(name)) => Value::Tensor(name),
        ("$object", Value::Str(name)) => Value::Object(name),
        ("$dict", Value::List(pairs)) => {
            Value::Dict(pairs.into_iter().map(pair).collect::<Option<_>>().ok_or_else(bad)?)
        }
        ("$defaultdict" | "$odict", Value::List(pairs)) => {
            let pairs = pairs.into_iter().map(pair).collect::<Option<_>>().ok_or_else(bad)?;
            *value = Value::Dict(pairs);
            Value::Other(items)
        }
        (_, other) => {
            *value = other;
            Value::Other(items)
        }
    })
}

fn pair(value: Value) -> Option<(Value, Value)> {
    match value {
        Value::List(items) => <[Value; 2]>::try_from(items).ok().map(|[k, v]| (k, v)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>()
                .prop_filter("NaN is not equal to itself", |x| !x.is_nan())
                .prop_map(Value::from),
            Just(Value::Float(-0.0)),
            Just(Value::Float(f64::NEG_INFINITY)),
            any::<String>().prop_map(Value::from),
            any::<Vec<u8>>().prop_map(Value::from),
            any::<String>().prop_map(Value::Tensor),
            any::<String>().prop_map(Value::Object),
        ];
        leaf.prop_recursive(4, 64, 6, |inner| {
            let key = prop_oneof![
                "\\$?[a-c]{0,3}".prop_map(Value::from),
                any::<i64>().prop_map(Value::from)
            ];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::List),
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Tuple),
                prop::collection::vec((key, inner), 0..6).prop_map(|mut items| {
                    let mut seen = Vec::new();
                    items.retain(|(k, _)| {
                        !seen.contains(k) && {
                            seen.push(k.clone());
                            true
                        }
                    });
                    Value::Dict(items)
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_tree_round_trips(value in any_value()) {
            let read = Value::from_json(&value.to_json().unwrap()).unwrap();
            prop_assert_eq!(&read, &value);
            prop_assert_eq!(format!("{read:?}"), format!("{value:?}")); // distinguishes -0.0 from 0.0
        }
    }

    #[test]
    fn nan_round_trips() {
        let read = Value::from_json(&Value::Float(f64::NAN).to_json().unwrap()).unwrap();
        assert!(matches!(read, Value::Float(x) if x.is_nan()));
    }

    #[test]
    fn duplicate_key_is_refused() {
        let text = RawValue::from_string(r#"{"a":{"b":1,"b":2}}"#.into()).unwrap();
        assert!(Value::from_json(&text).unwrap_err().to_string().contains("twice"));
    }

    #[test]
    fn nesting_up_to_the_limit_is_read() {
        let nested = |depth: usize| {
            let json = format!("{}\"]\"{}", "[".repeat(depth), "]".repeat(depth));
            Value::from_json(&RawValue::from_string(json).unwrap())
        };
        assert!(nested(NESTING_MAX).is_ok());
        assert!(nested(NESTING_MAX + 1).unwrap_err().to_string().contains("nested"));
    }

    fn read(json: &str) -> Value {
        Value::from_json(&RawValue::from_string(json.into()).unwrap()).unwrap()
    }

    #[test]
    fn unknown_tags_are_kept() {
        for json in [
            r#"{"$scalar":"<f8","data":"AAAAAAAA8D8="}"#,
            r#"{"$set":[1,2]}"#,
            r#"{"$defaultdict":{"a":[1]},"factory":"list"}"#,
            r#"{"$dataclass":"app:Config","fields":{"lr":0.1}}"#,
            r#"{"$value":"datetime.date","args":["2026-01-31"]}"#,
            r#"{"$dict":[[{"$str":"x","type":"app:N"},1]]}"#,
        ] {
            assert_eq!(read(json).to_json().unwrap().get(), json);
        }
    }

    #[test]
    fn ordered_dict_is_a_dict_wherever_it_is() {
        for json in [
            r#"{"$odict":{"a":1},"attrs":{}}"#,
            r#"{"$odict":{"$odict":{"a":1}},"attrs":{}}"#,
            r#"{"$odict":[["a",1]]}"#,
        ] {
            assert_eq!(read(json).to_json().unwrap().get(), r#"{"a":1}"#, "{json}");
        }
    }
}
