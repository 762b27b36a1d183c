//! Objects: values that are stored as bytes beside the tensors, such as those that PyTorch's DCP pickles. How they
//! differ is reported as for other values.

use super::values::ValueDiff;
use crate::format::TensorEntry;
use crate::store::read::checkpoint::Checkpoint;
use std::collections::HashSet;

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
            let object = |name: &str| of.tensor(name).filter(|entry| entry.object);
            only.retain(|name| {
                let text = object(name).map(described);
                let is_tensor = text.is_none();
                if !is_tensor {
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
        let (a, b) = (described(one), described(other).replacen("an object", "another", 1));
        self.0.push(ValueDiff { name: one.name.clone(), a: Some(a), b: Some(b) });
    }

    /// Adds them to the values that differ. A place that differs in kind is there already.
    pub fn add_to(self, values: &mut Vec<ValueDiff>) {
        let known: HashSet<String> = values.iter().map(|value| value.name.clone()).collect();
        values.extend(self.0.into_iter().filter(|object| !known.contains(&object.name)));
    }
}

fn described(entry: &TensorEntry) -> String {
    match entry.object {
        true => format!("an object of {} bytes", entry.nbytes()),
        false => "a tensor".into(),
    }
}
