//! A manifest without a part of the state, such as the optimizer's.

use super::{FileEntry, Listed, Manifest};
use crate::error::{Error, Result};
use crate::format::part::{self, Part};
use crate::format::select::is_below;
use crate::limits::DROPPED_MAX;

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

impl Listed {
    /// Whether this is the manifest of the same save, slimmed since `before` was read: it lists some of the same files.
    pub fn is_slimmer_than(&self, before: &Manifest) -> bool {
        let mut files = before.files.iter();
        (self.generation, self.created_unix_ms) == (before.generation, before.created_unix_ms)
            && self.dropped.len() > before.dropped.len()
            && self.files.iter().all(|file| files.any(|other| other == file))
    }
}

impl Manifest {
    /// Drops the values of these names and below, the tensors that only they refer to or that have such a name, and the
    /// files that hold nothing else. Names dropped before are passed over.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the manifest is unchanged: for a name of which there is nothing, or that would free no
    /// file; if no tensor would be left.
    pub fn slim(&mut self, names: &[String]) -> Result<Dropped> {
        let (mut slimmer, mut dropped) = (self.clone(), Dropped::default());
        for name in names {
            if slimmer.dropped.iter().any(|part| is_below(name, part)) {
                continue;
            }
            let (tensors, files) = slimmer.slim_by(name)?;
            dropped.names.push(name.clone());
            dropped.tensors += tensors;
            dropped.files.extend(files);
        }
        *self = slimmer;
        Ok(dropped)
    }

    /// Checks that the state has something of each droppable part: a misspelled one would get no files.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming one that it does not have.
    pub fn check_apart(&self, names: &[String]) -> Result<()> {
        for name in names {
            let is_part = |part: Part| self.tensors.iter().any(|tensor| part.has(&tensor.name));
            if !part::has(&self.state, name)?
                && !is_part(Part::of_tree(&self.state, std::slice::from_ref(name))?)
            {
                return Err(Error::invalid(format!(
                    "the state has nothing named {name:?}, which is to be droppable, and nothing below it, in \
                     dictionaries with keys of text or integers"
                )));
            }
        }
        Ok(())
    }

    /// Drops what has one name. Returns the number of its tensors, and its files.
    fn slim_by(&mut self, name: &str) -> Result<(usize, Vec<FileEntry>)> {
        if self.dropped.len() == DROPPED_MAX {
            return Err(Error::invalid(format!(
                "a checkpoint is slimmed by at most {DROPPED_MAX} names"
            )));
        }
        let part = Part::of_tree(&self.state, std::slice::from_ref(&name.to_owned()))?;
        let stays: Vec<bool> = self.tensors.iter().map(|tensor| !part.has(&tensor.name)).collect();
        let tensors = stays.iter().filter(|stays| !**stays).count();
        if part.rest.is_none() && tensors == 0 {
            return Err(Error::invalid(format!(
                "the checkpoint has nothing named {name:?}, and nothing below {name}. (with a dot): \
                 `ringstow show` lists its names. Only dicts with keys of text or integers are cut"
            )));
        }
        if !stays.contains(&true) {
            return Err(Error::invalid(format!(
                "without {name:?} no tensor would be left: remove the checkpoint instead"
            )));
        }
        let number_of = self.number_files(&stays);
        if tensors > 0 && number_of.iter().all(Option::is_some) {
            return Err(Error::invalid(format!(
                "dropping {name:?} would free no file, since each holds other tensors too: name it in \
                 `droppable` of the save to slim the checkpoint later"
            )));
        }
        if let Some(rest) = part.rest {
            self.state = rest;
        }
        self.dropped.push(name.into());
        self.keep_tensors(&stays, &number_of);
        let mut number = number_of.iter();
        let goes = |_: &mut FileEntry| number.next().is_some_and(Option::is_none);
        let files = self.files.extract_if(.., goes).collect();
        Ok((tensors, files))
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

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;
    use serde_json::value::RawValue;

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
            (&["opt", "model.b"], "would free no file"),
        ] {
            let mut manifest = with_tree(TREE);
            let error = manifest.slim(&names(asked)).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            assert_eq!(manifest.encode().unwrap(), with_tree(TREE).encode().unwrap());
        }
    }

    #[test]
    fn tensor_of_the_name_goes_even_if_no_value_refers_to_it() {
        let mut manifest = with_tree(r#"{"step":1}"#);
        let dropped = manifest.slim(&names(&["none"])).unwrap();
        assert_eq!((dropped.tensors, dropped.files.len()), (1, 1));
        manifest.check().unwrap();
    }

    #[test]
    fn name_below_one_that_was_dropped_is_passed_over() {
        let mut manifest = with_tree(TREE);
        let dropped = manifest.slim(&names(&["model", "model.w"])).unwrap();
        assert_eq!(dropped.names, names(&["model"]));
        assert_eq!(manifest.slim(&names(&["model.b"])).unwrap(), Dropped::default());
    }
}
