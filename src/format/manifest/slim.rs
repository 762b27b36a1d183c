//! A manifest without a part of the state, such as the optimizer's.

use super::{FileEntry, Manifest};
use crate::error::{Error, Result, some_of};
use crate::format::Value;
use crate::format::select::{Wanted, cut};
use crate::limits::DROPPED_MAX;
use serde_json::value::RawValue;
use std::collections::HashSet;

/// What a manifest no longer lists.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// The names that were asked for and that it had not dropped before.
    pub names: Vec<String>,
    /// Tensors, arrays and objects.
    pub tensors: usize,
    /// Files that held nothing else.
    pub files: Vec<FileEntry>,
}

impl Manifest {
    /// Drops the values of these names and below, the tensors that only they refer to, and the files that hold nothing
    /// else. Names dropped before are passed over.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the manifest is unchanged: for a name without a value, if nothing would be left, or if no
    /// file would go.
    pub fn slim(&mut self, names: &[String]) -> Result<Dropped> {
        let mut dropped = Dropped::default();
        let mut state = self.state.clone();
        for name in names {
            if !self.dropped.contains(name) && !dropped.names.contains(name) {
                state = without(&state, name)?;
                dropped.names.push(name.clone());
            }
        }
        if dropped.names.is_empty() {
            return Ok(dropped);
        }
        if self.dropped.len() + dropped.names.len() > DROPPED_MAX {
            return Err(Error::invalid(format!(
                "a checkpoint is slimmed by at most {DROPPED_MAX} names"
            )));
        }
        let (before, after) = (stored(&self.state)?, stored(&state)?);
        let goes = |name: &str| before.contains(name) && !after.contains(name);
        let stays: Vec<bool> = self.tensors.iter().map(|tensor| !goes(&tensor.name)).collect();
        dropped.tensors = stays.iter().filter(|stays| !**stays).count();
        if !stays.contains(&true) {
            return Err(Error::invalid(format!(
                "without {} no tensor would be left: remove the checkpoint instead",
                some_of(&dropped.names)
            )));
        }
        let number_of = self.number_files(&stays);
        if dropped.tensors > 0 && number_of.iter().all(Option::is_some) {
            return Err(Error::invalid(format!(
                "dropping {} would free no file, since each holds other tensors too: save these names apart \
                 (`apart` of the save) to slim the checkpoint later",
                some_of(&dropped.names)
            )));
        }
        self.state = state;
        self.dropped.extend_from_slice(&dropped.names);
        self.keep_tensors(&stays, &number_of);
        let mut number = number_of.iter();
        let goes = |_: &mut FileEntry| number.next().is_some_and(Option::is_none);
        dropped.files = self.files.extract_if(.., goes).collect();
        Ok(dropped)
    }

    /// The new number of each file; `None` for one that holds only tensors that go. A file without any tensor stays.
    fn number_files(&self, stays: &[bool]) -> Vec<Option<u32>> {
        let (mut used, mut unused) = (vec![false; self.files.len()], vec![false; self.files.len()]);
        for (tensor, stays) in self.tensors.iter().zip(stays) {
            let holds = if *stays { &mut used } else { &mut unused };
            tensor.chunks.iter().for_each(|chunk| holds[chunk.file as usize] = true);
        }
        let mut next = 0..;
        let stays = used.iter().zip(&unused).map(|(used, unused)| *used || !*unused);
        stays.map(|stays| if stays { next.next() } else { None }).collect()
    }

    fn keep_tensors(&mut self, stays: &[bool], number_of: &[Option<u32>]) {
        let mut stay = stays.iter();
        self.tensors.retain(|_| stay.next() == Some(&true));
        for chunk in self.tensors.iter_mut().flat_map(|tensor| &mut tensor.chunks) {
            chunk.file = number_of[chunk.file as usize].expect("the file of a tensor stays");
        }
    }
}

/// The tree without what is at a name and below it.
///
/// # Errors
/// [`Error::Invalid`] if there is nothing.
fn without(tree: &RawValue, name: &str) -> Result<Box<RawValue>> {
    let unreadable = |e| Error::invalid(format!("the state's values cannot be read: {e}"));
    let all = cut(tree, &Wanted::NotBelow(vec![name.into()])).and_then(RawValue::from_string);
    let rest = all.map_err(unreadable)?;
    // The texts may differ in spaces alone.
    let same = |tree: &RawValue| {
        Value::from_json_with_types(tree)?.to_json().map(|text| text.get().to_owned())
    };
    if same(tree)? == same(&rest)? {
        return Err(Error::invalid(format!(
            "the checkpoint has nothing named {name:?}, and nothing below {name}. (with a dot): \
             `ringstow show` lists its names; a part of a list or a tuple cannot be dropped alone"
        )));
    }
    Ok(rest)
}

/// Names of the tensors, arrays and objects that a tree refers to.
fn stored(tree: &RawValue) -> Result<HashSet<String>> {
    fn add(value: &Value, names: &mut HashSet<String>) {
        if let Some(name) = value.stored() {
            names.insert(name.into());
        }
        match value {
            Value::List(items) | Value::Tuple(items) => {
                items.iter().for_each(|item| add(item, names));
            }
            Value::Dict(items) => items.iter().for_each(|(key, value)| {
                add(key, names);
                add(value, names);
            }),
            Value::Other(fields) => fields.iter().for_each(|(_, value)| add(value, names)),
            _ => {}
        }
    }
    let mut names = HashSet::new();
    add(&Value::from_json_with_types(tree)?, &mut names);
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;

    /// The sample with a tree that refers to its tensors: `w` and `b` lie in the first file, `none` in the second.
    fn with_tree(tree: &str) -> Manifest {
        let mut manifest = sample();
        manifest.state = RawValue::from_string(tree.into()).unwrap();
        manifest
    }

    const TREE: &str = r#"{"model":{"w":{"$tensor":"w"},"b":{"$ndarray":"b","dtype":"<f4"}},"opt":[{"$tensor":"none"},0.5]}"#;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).into()).collect()
    }

    #[test]
    fn values_tensors_and_files_of_a_name_go_and_the_rest_is_a_manifest() {
        let mut manifest = with_tree(TREE);
        let dropped = manifest.slim(&names(&["model"])).unwrap();
        assert_eq!((dropped.tensors, dropped.names), (2, names(&["model"])));
        assert_eq!(
            dropped.files.iter().map(|file| &*file.name).collect::<Vec<_>>(),
            ["a.safetensors"]
        );
        assert_eq!(manifest.state.get(), r#"{"opt":[{"$tensor":"none"},0.5]}"#);
        assert_eq!((manifest.tensors.len(), manifest.tensors[0].chunks[0].file), (1, 0));
        manifest.check().unwrap();
        assert_eq!(manifest.dropped, names(&["model"]));
        assert_eq!(manifest.slim(&names(&["model"])).unwrap(), Dropped::default());
    }

    #[test]
    fn tensor_that_the_rest_refers_to_stays_with_its_file() {
        let tied = r#"{"model":{"w":{"$tensor":"w"}},"opt":{"w":{"$tensor":"w"},"s":{"$tensor":"none"},"b":{"$tensor":"b"}}}"#;
        let mut manifest = with_tree(tied);
        let dropped = manifest.slim(&names(&["opt"])).unwrap();
        assert_eq!(
            dropped.files.iter().map(|file| &*file.name).collect::<Vec<_>>(),
            ["b.safetensors"]
        );
        assert_eq!(manifest.tensors.iter().map(|tensor| &*tensor.name).collect::<Vec<_>>(), ["w"]);
        manifest.check().unwrap();
    }

    #[test]
    fn slimming_that_could_not_do_what_was_asked_is_refused_and_changes_nothing() {
        for (asked, reason) in [
            (&["modell"][..], "nothing named \"modell\""),
            (&["opt.0"], "nothing named"),
            (&["opt", "absent"], "nothing named \"absent\""),
            (&["model", "opt"], "no tensor would be left"),
            (&["model.b"], "would free no file"),
        ] {
            let mut manifest = with_tree(TREE);
            let error = manifest.slim(&names(asked)).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            assert_eq!(manifest.encode().unwrap(), with_tree(TREE).encode().unwrap());
        }
    }
}
