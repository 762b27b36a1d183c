//! Formats a checkpoint's values as an indented list. Counts tensors without listing them.

use super::text::{count, printable, short};
use crate::format::Value;

/// Maximum characters of a value on one line.
const INLINE_MAX: usize = 64;

/// Maximum items of a list on one line.
const ITEMS_MAX: usize = 16;

/// Maximum levels of indentation.
const INDENT_MAX: usize = 16;

/// Formats a tree, one line per element.
pub fn lines(root: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    match is_container(root) {
        true => children(root, 0, &mut lines),
        false => lines.push(inline(root)),
    }
    lines
}

/// Appends one line per child that is not a tensor, each followed by its own children.
fn children(parent: &Value, depth: usize, lines: &mut Vec<String>) {
    match parent.plain() {
        Value::Dict(items) => {
            for (key, value) in items {
                let key = match key {
                    Value::Str(text) => short(text, INLINE_MAX),
                    other => inline(other),
                };
                child(&key, value, depth, lines);
            }
        }
        Value::List(items) | Value::Tuple(items) => {
            for (index, value) in items.iter().enumerate() {
                child(&format!("[{index}]"), value, depth, lines);
            }
        }
        _ => {}
    }
}

fn child(name: &str, value: &Value, depth: usize, lines: &mut Vec<String>) {
    let indent = "  ".repeat(depth.min(INDENT_MAX));
    let tensors = tensors(value);
    match value {
        Value::Tensor(_) => {}
        _ if is_flat(value) && tensors == 0 => {
            lines.push(format!("{indent}{name}: {}", inline(value)))
        }
        _ => {
            let note = match tensors {
                0 => String::new(),
                n => format!(" {}", count(n, "tensor")),
            };
            let kind = match value {
                Value::Other(fields) => format!(" {}", kind(fields)),
                _ => String::new(),
            };
            lines.push(format!("{indent}{name}:{kind}{note}"));
            children(value, depth + 1, lines);
        }
    }
}

/// Counts the tensors directly in a container.
fn tensors(value: &Value) -> usize {
    let is_tensor = |value: &Value| matches!(value, Value::Tensor(_));
    match value.plain() {
        Value::Dict(items) => items.iter().filter(|(_, value)| is_tensor(value)).count(),
        Value::List(items) | Value::Tuple(items) => items.iter().filter(|v| is_tensor(v)).count(),
        _ => 0,
    }
}

/// Whether a value fits on one line: a scalar or a list of scalars.
fn is_flat(value: &Value) -> bool {
    let is_scalar = |value: &Value| !is_container(value) && !matches!(value, Value::Tensor(_));
    match value.plain() {
        Value::Dict(items) => items.is_empty(),
        Value::List(items) | Value::Tuple(items) => items.iter().all(is_scalar),
        _ => true,
    }
}

/// Whether a value has children, whatever its Python type.
fn is_container(value: &Value) -> bool {
    matches!(value.plain(), Value::Dict(_) | Value::List(_) | Value::Tuple(_))
}

/// Formats a value on one line, shortened.
fn inline(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => b.to_string(),
        Value::Int(n) => n.to_string(),
        Value::BigInt(digits) => short(digits, INLINE_MAX),
        Value::Float(x) => format!("{x:?}"),
        Value::Str(text) => format!("\"{}\"", short(text, INLINE_MAX)),
        Value::Bytes(bytes) => count(bytes.len(), "byte"),
        Value::List(items) => sequence("[", items.iter().map(inline), items.len(), "]"),
        Value::Tuple(items) => sequence("(", items.iter().map(inline), items.len(), ")"),
        Value::Dict(items) => {
            let pairs = items.iter().map(|(k, v)| format!("{}: {}", inline(k), inline(v)));
            sequence("{", pairs, items.len(), "}")
        }
        Value::Tensor(name) => format!("tensor {}", short(name, INLINE_MAX)),
        Value::Object(name) => format!("object {}", short(name, INLINE_MAX)),
        Value::Other(fields) => other(fields),
    }
}

/// Formats as many items as fit on one line, and counts the rest.
fn sequence(open: &str, items: impl Iterator<Item = String>, len: usize, close: &str) -> String {
    let mut shown: Vec<String> = Vec::new();
    let mut width = 0;
    for item in items.take(ITEMS_MAX) {
        width += item.chars().count() + 2;
        if width > INLINE_MAX && !shown.is_empty() {
            break;
        }
        shown.push(item);
    }
    let (left, inside) = (len - shown.len(), shown.join(", "));
    match left {
        0 => format!("{open}{inside}{close}"),
        n => format!("{open}{inside}, … {n} more{close}"),
    }
}

/// Returns the Python type of a value: `set`, `app.Config`, `datetime.date`.
fn kind(fields: &[(String, Value)]) -> String {
    let Some((tag, first)) = fields.first() else { return String::new() };
    match (tag.as_str(), first) {
        (
            "$composite" | "$dataclass" | "$namedtuple" | "$namespace" | "$enum" | "$value",
            Value::Str(name),
        ) => {
            let name = name.strip_prefix("builtins.").unwrap_or(name).replace(':', ".");
            short(&name, INLINE_MAX)
        }
        _ => printable(tag.trim_start_matches('$')),
    }
}

/// Formats a value of another language: its type and content, or its tag and fields.
fn other(fields: &[(String, Value)]) -> String {
    let Some(((tag, first), rest)) = fields.split_first() else { return "{}".into() };
    let field = |wanted: &str| rest.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
    match (tag.as_str(), field("name"), field("value"), field("args")) {
        ("$enum", Some(Value::Str(name)), ..) => {
            return format!("{}.{}", kind(fields), short(name, INLINE_MAX));
        }
        ("$enum", None, Some(number), _) => return format!("{}({})", kind(fields), inline(number)),
        ("$value", .., Some(Value::List(args))) => {
            let args = sequence("(", args.iter().map(inline), args.len(), ")");
            return format!("{}{args}", kind(fields));
        }
        ("$str", ..) => return inline(first),
        ("$set" | "$frozenset" | "$deque" | "$defaultdict", ..) => {
            return format!("{}{}", kind(fields), inline(first));
        }
        ("$dataclass" | "$namedtuple" | "$namespace", ..) => {
            return format!("{}{}", kind(fields), field("fields").map_or_else(String::new, inline));
        }
        ("$composite", ..) => {
            return format!(
                "{}{}",
                kind(fields),
                field("tensors").map_or_else(String::new, inline)
            );
        }
        _ => {}
    }
    let named = rest.iter().map(|(name, value)| format!("{}={}", printable(name), inline(value)));
    let all = std::iter::once(inline(first)).chain(named);
    let inside = sequence("(", all, fields.len(), ")");
    format!("{}{inside}", printable(tag.trim_start_matches('$')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dict(items: Vec<(&str, Value)>) -> Value {
        Value::Dict(items.into_iter().map(|(k, v)| (Value::from(k), v)).collect())
    }

    #[test]
    fn tensors_are_counted_and_scalars_shown() {
        let tensor = || Value::Tensor("t".into());
        let group = dict(vec![
            ("lr", Value::Float(1e-3)),
            ("betas", Value::Tuple(vec![Value::Float(0.9), Value::Float(0.999)])),
            ("params", Value::List((0..100).map(Value::Int).collect())),
        ]);
        let tree = dict(vec![
            ("model", dict(vec![("a", tensor()), ("b", tensor())])),
            ("groups", Value::List(vec![group])),
            ("loss", Value::Float(f64::NAN)),
            ("name", Value::from("a\x1b[31m")),
            ("rng", Value::Bytes(vec![0; 5056])),
            ("loader", Value::Object("loader".into())),
        ]);
        assert_eq!(
            lines(&tree),
            [
                "model: 2 tensors",
                "groups:",
                "  [0]:",
                "    lr: 0.001",
                "    betas: (0.9, 0.999)",
                "    params: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, … 84 more]",
                "loss: NaN",
                "name: \"a\\u{1b}[31m\"",
                "rng: 5056 bytes",
                "loader: object loader",
            ]
        );
    }

    #[test]
    fn python_types_are_named() {
        let json = r#"{
            "config": {"$dataclass": "app:Config", "fields": {"lr": 0.1, "w": {"$tensor": "config.w"}}},
            "tags": {"$set": ["a", "b"]},
            "quantized": {"$composite": "q:Int8", "tensors": {"data": {"$tensor": "quantized.data"}}, "context": {}},
            "window": {"$deque": [{"$tensor": "window.0"}], "maxlen": 3},
            "points": [{"$namedtuple": "app:P", "fields": {"x": 1}}],
            "mode": {"$enum": "app:Mode", "name": "TRAIN"},
            "flags": {"$enum": "app:Flags", "value": 3},
            "version": {"$str": "2.1", "type": "app:Version"},
            "day": {"$value": "datetime.date", "args": ["2026-01-31"]},
            "z": {"$value": "builtins.complex", "args": [1.0, {"$float": "inf"}]},
            "odd": {"$dataclass": 5}
        }"#;
        let text = serde_json::value::RawValue::from_string(json.into()).unwrap();
        assert_eq!(
            lines(&Value::from_json(&text).unwrap()),
            [
                "config: app.Config 1 tensor",
                "  lr: 0.1",
                "tags: set[\"a\", \"b\"]",
                "quantized: q.Int8 1 tensor",
                "window: deque 1 tensor",
                "points:",
                "  [0]: app.P",
                "    x: 1",
                "mode: app.Mode.TRAIN",
                "flags: app.Flags(3)",
                "version: \"2.1\"",
                "day: datetime.date(\"2026-01-31\")",
                "z: complex(1.0, inf)",
                "odd: dataclass",
            ]
        );
    }
}
