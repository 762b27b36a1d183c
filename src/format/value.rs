//! Values that are not tensors: step counters, learning rates, names, nested as in the trainer.

mod json;

pub use json::nesting;
pub(crate) use json::{Leaf, Named};

/// A value of the state that is not a tensor, or a reference to a tensor.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Nothing; Python's `None`.
    Null,
    /// True or false.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// An integer beyond 64 bits, in decimal.
    BigInt(String),
    /// A double, NaN and infinities included.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dictionary, in insertion order. Keys may be any value.
    Dict(Vec<(Value, Value)>),
    /// The tensor of this name.
    Tensor(String),
    /// The opaque byte string of this name, stored like a tensor.
    Object(String),
    /// A value that only Python has: a NumPy scalar, a dataclass, a set, a pickle. Tag, then fields; see
    /// [`Value::plain`].
    Other(Vec<(String, Value)>),
}

impl Value {
    /// The value without its Python type:
    ///
    /// - a list for a set or a deque,
    /// - a dictionary for a defaultdict, and of the fields of a dataclass, a named tuple or a namespace,
    /// - a dictionary of the inner tensors of a tensor that is made of others,
    /// - the text of a subclass of `str`,
    /// - otherwise the value itself.
    pub fn plain(&self) -> &Value {
        let Self::Other(fields) = self else { return self };
        let Some((tag, body)) = fields.first() else { return self };
        match tag.as_str() {
            "$set" | "$frozenset" | "$deque" | "$defaultdict" | "$str" => body,
            "$dataclass" | "$namedtuple" | "$namespace" => self.field("fields"),
            "$composite" => self.field("tensors"),
            _ => self,
        }
    }

    /// A field of a value that only Python has; the value itself if it lacks the field.
    fn field(&self, wanted: &str) -> &Value {
        let Self::Other(fields) = self else { return self };
        fields.iter().find(|(name, _)| name == wanted).map_or(self, |(_, value)| value)
    }

    /// The name of the tensor, array or object that it refers to.
    pub(crate) fn stored(&self) -> Option<&str> {
        match self {
            Self::Tensor(name) | Self::Object(name) => Some(name),
            Self::Other(fields) => match fields.first() {
                Some((tag, Self::Str(name))) if tag == "$ndarray" => Some(name),
                _ => None,
            },
            _ => None,
        }
    }

    /// The value of a dictionary's key or of a field; see [`Value::plain`].
    pub fn get(&self, key: &str) -> Option<&Value> {
        match self.plain() {
            Self::Dict(items) => {
                items.iter().find(|(k, _)| matches!(k, Self::Str(s) if s == key)).map(|(_, v)| v)
            }
            _ => None,
        }
    }

    /// The value of a name: a path of keys and indices joined by dots, as in `optimizer.param_groups.0.lr`. Keys may
    /// contain dots.
    pub fn find(&self, name: &str) -> Option<&Value> {
        match self.plain() {
            Self::Dict(items) => items.iter().find_map(|(key, child)| match key {
                Self::Str(step) => child.find_at(step, name),
                Self::Int(number) => child.find_at(&number.to_string(), name),
                _ => None,
            }),
            Self::List(items) | Self::Tuple(items) => {
                let mut numbered = items.iter().enumerate();
                numbered.find_map(|(index, child)| child.find_at(&index.to_string(), name))
            }
            _ => None,
        }
    }

    /// The value of a name that starts with `step`, the path step to this value.
    fn find_at(&self, step: &str, name: &str) -> Option<&Value> {
        match name.strip_prefix(step)? {
            "" => Some(self),
            rest => self.find(rest.strip_prefix('.')?),
        }
    }

    /// The integer, if it is a 64-bit one.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(n) => Some(*n),
            _ => None,
        }
    }

    /// The double, if it is one.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(x) => Some(*x),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self.plain() {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }
}

macro_rules! from {
    ($($from:ty => $make:expr),* $(,)?) => {
        $(impl From<$from> for Value {
            fn from(value: $from) -> Self {
                ($make)(value)
            }
        })*
    };
}

from! {
    bool => Value::Bool,
    i64 => Value::Int,
    i32 => |n: i32| Value::Int(n.into()),
    u32 => |n: u32| Value::Int(n.into()),
    u64 => |n: u64| i64::try_from(n).map_or_else(|_| Value::BigInt(n.to_string()), Value::Int),
    usize => |n: usize| Value::from(n as u64),
    f64 => Value::Float,
    f32 => |x: f32| Value::Float(x.into()),
    &str => |text: &str| Value::Str(text.into()),
    String => Value::Str,
    Vec<u8> => Value::Bytes,
    Vec<Value> => Value::List,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::value::RawValue;

    fn read(json: &str) -> Value {
        Value::from_json(&RawValue::from_string(json.into()).unwrap()).unwrap()
    }

    #[test]
    fn plain_drops_python_container_types() {
        let config = read(
            r#"{"c":{"$dataclass":"app:C","fields":{"lr":0.5,"w":{"$tensor":"c.w"},"n":[{"$str":"x","type":"app:N"}]}}}"#,
        );
        let inner = config.get("c").unwrap();
        assert_eq!(inner.get("lr").unwrap().as_float(), Some(0.5));
        assert_eq!(config.find("c.w"), Some(&Value::Tensor("c.w".into())));
        assert_eq!(config.find("c.n.0").unwrap().as_str(), Some("x"));
        let list = Value::List(vec![Value::Int(1)]);
        for json in [r#"{"$set":[1]}"#, r#"{"$frozenset":[1]}"#, r#"{"$deque":[1],"maxlen":3}"#] {
            assert_eq!(read(json).plain(), &list);
        }
        let by_pairs = read(r#"{"$defaultdict":[[1,2]],"factory":null}"#);
        assert_eq!(by_pairs.plain(), &Value::Dict(vec![(Value::Int(1), Value::Int(2))]));
        let quantized = read(
            r#"{"w":{"$composite":"q:Int8","tensors":{"data":{"$tensor":"w.data"}},"context":{}}}"#,
        );
        assert_eq!(quantized.find("w.data"), Some(&Value::Tensor("w.data".into())));
        assert_eq!(read(r#"{"$enum":"app:E","name":"A"}"#).plain().as_str(), None);
        assert_eq!(read(r#"{"$dataclass":5}"#).get("x"), None);
    }
}
