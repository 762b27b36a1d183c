//! The tree of values that are not tensors.

use ringstow::Value;
use serde_json::value::RawValue;

pub fn run(data: &[u8]) {
    let Ok(text) = serde_json::from_slice::<Box<RawValue>>(data) else { return };
    if let Ok(value) = Value::from_json(&text) {
        check(&value);
    }
}

/// The tree is written and read as the same, and can be looked into.
pub fn check(value: &Value) {
    let text = value.to_json().unwrap();
    let read = Value::from_json(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
    // Text, since NaN is not equal to itself and -0.0 is equal to 0.0.
    assert_eq!(format!("{read:?}"), format!("{value:?}"), "{text}");
    let _ = (value.plain(), value.as_int(), value.as_float(), value.as_str());
    look_at_items(value, value, &mut String::new(), 0);
}

/// Each item is found under its name, or another one under the same name before it.
fn look_at_items(root: &Value, value: &Value, path: &mut String, depth: usize) {
    let mut look = |step: &str, item: &Value| {
        let len = path.len();
        if depth > 0 {
            path.push('.');
        }
        path.push_str(step);
        assert!(root.find(path).is_some(), "{path:?} is not found");
        if depth < 8 {
            look_at_items(root, item, path, depth + 1);
        }
        path.truncate(len);
    };
    match value.plain() {
        Value::Dict(items) => {
            for (key, item) in items.iter().take(8) {
                match key {
                    Value::Str(step) => look(step, item),
                    Value::Int(number) => look(&number.to_string(), item),
                    _ => {}
                }
            }
        }
        Value::List(items) | Value::Tuple(items) => {
            for (number, item) in items.iter().take(8).enumerate() {
                look(&number.to_string(), item);
            }
        }
        _ => {}
    }
}
