//! What a load selects of a tree of values: lines of names, or of one prefix that begins with `^`, then an empty line and
//! the tree.

use super::{SLACK, values};
use crate::input::lines_and_rest;
use crate::memory;
use ringstow::Value;
use ringstow::internals::format::select::{Wanted, cut};
use serde_json::value::RawValue;

pub fn run(data: &[u8]) {
    let Some((lines, tree)) = lines_and_rest(data) else { return };
    let Ok(tree) = RawValue::from_string(tree.to_owned()) else { return };
    let wanted = match lines[..] {
        [prefix] if prefix.starts_with('^') => Wanted::Below(prefix[1..].to_owned()),
        _ => Wanted::names(lines.iter().map(|&name| name.to_owned()).collect()),
    };
    // Only a key that is no text, such as half of a pair of surrogates, cannot be cut out.
    let Ok(text) = memory::bounded(data.len(), SLACK, || cut(&tree, &wanted)) else {
        assert!(Value::from_json(&tree).is_err(), "a tree that can be read is cut");
        return;
    };
    let kept = RawValue::from_string(text).expect("what is cut is JSON");
    let again = cut(&kept, &wanted).unwrap();
    assert_eq!(again, kept.get(), "a second cut takes nothing away");
    let Ok(before) = Value::from_json(&tree) else { return };
    let after = Value::from_json(&kept).expect("what is left of a tree is one");
    values::check(&after);
    if let Wanted::Names(names) = &wanted {
        for name in names {
            let shown = |value: &Value| value.find(name).map(|found| format!("{found:?}"));
            assert_eq!(shown(&after), shown(&before), "{name:?} of {}", tree.get());
        }
    }
}
