//! Objects: values that are stored as bytes beside the tensors, such as those that PyTorch's DCP pickles. How they
//! differ is reported as for other values.

use super::contents::Contents;
use super::shown::{OBJECT, text};
use super::values::ValueDiff;
use crate::error::Result;
use crate::format::TensorEntry;
use crate::format::object::Object;
use crate::store::read::checkpoint::Checkpoint;
use std::collections::HashSet;

/// So many objects of so many bytes are read, to say what they are.
const READ_MAX: usize = 1000;
const READ_BYTES_MAX: u64 = 64 << 10;

/// How objects differ.
pub struct Objects(Vec<ValueDiff>);

impl Objects {
    /// Takes the objects that only one checkpoint has out of the tensors that only that one has.
    pub fn alone(
        (a, only_a): (&Checkpoint, &mut Vec<String>),
        (b, only_b): (&Checkpoint, &mut Vec<String>),
    ) -> Self {
        let mut found = Vec::new();
        let mut take = |of: &Checkpoint, only: &mut Vec<String>, in_a: bool| {
            only.retain(|name| {
                let is_tensor = object(of, name).is_none();
                if !is_tensor {
                    let text = Some(OBJECT.to_owned());
                    let (a, b) = if in_a { (text, None) } else { (None, text) };
                    found.push(ValueDiff { name: name.clone(), a, b });
                }
                is_tensor
            });
        };
        take(a, only_a, true);
        take(b, only_b, false);
        Self(found)
    }

    /// Notes that an object differs from what has its name in the other checkpoint.
    pub fn differ(&mut self, one: &TensorEntry, other: &TensorEntry) {
        let kind =
            |entry: &TensorEntry| Some(if entry.object { OBJECT } else { "a tensor" }.into());
        self.0.push(ValueDiff { name: one.name.clone(), a: kind(one), b: kind(other) });
    }

    /// Adds them to the values that differ. A place that differs in kind is there already.
    pub fn add_to(self, values: &mut Vec<ValueDiff>) {
        let known: HashSet<String> = values.iter().map(|value| value.name.clone()).collect();
        values.extend(self.0.into_iter().filter(|object| !known.contains(&object.name)));
    }
}

fn object<'a>(of: &'a Checkpoint, name: &str) -> Option<&'a TensorEntry> {
    of.tensor(name).filter(|entry| entry.object)
}

/// Says of each object that differs how long it is and, of a small one, what it is: the value or the type.
///
/// # Errors
/// As for [`Checkpoint::load_names`].
pub fn describe(values: &mut [ValueDiff], contents: &mut Contents<'_>) -> Result<()> {
    for in_a in [true, false] {
        let of = contents.side(in_a);
        let mut shown: Vec<(&str, &mut String)> = Vec::new();
        for ValueDiff { name, a, b } in values.iter_mut() {
            let (side, other) = if in_a { (a, &*b) } else { (b, &*a) };
            let Some(side) = side.as_mut().filter(|text| *text == OBJECT) else { continue };
            let Some(entry) = object(of, name) else { continue };
            let is_second = !in_a && other.as_ref().is_some_and(|text| text.starts_with(OBJECT));
            let noun = if is_second { "another" } else { OBJECT };
            *side = format!("{noun} of {} bytes", entry.nbytes());
            if entry.nbytes() <= READ_BYTES_MAX && shown.len() < READ_MAX {
                shown.push((name.as_str(), side));
            }
        }
        if shown.is_empty() {
            continue;
        }
        let loaded = contents.load(in_a, shown.iter().map(|(name, _)| *name))?;
        for (name, side) in shown {
            match loaded.tensor(name).and_then(|tensor| Object::of(tensor.data())) {
                Some(Object::Value(value)) => side.push_str(&format!(": {}", text(&value)?)),
                Some(Object::Type(kind)) => side.push_str(&format!(": {kind}")),
                None => {}
            }
        }
    }
    Ok(())
}
